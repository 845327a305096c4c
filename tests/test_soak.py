"""The soak: its comparison, and minutes of it."""

import pytest

from experiments import soak
from experiments.metrics import json_line


def write(folder, *losses: float):
    folder.mkdir()
    rows = [{"step": i + 1, "loss": loss, "step_ms": i * loss} for i, loss in enumerate(losses)]
    (folder / "metrics.jsonl").write_text("".join(map(json_line, rows)))
    return folder


def test_runs_that_differ_in_a_bit_are_told_apart(tmp_path):
    one = write(tmp_path / "one", 3.0, 2.0, 1.0)
    assert soak.compare(one, write(tmp_path / "same", 3.0, 2.0, 1.0)) == []
    assert soak.compare(one, write(tmp_path / "other", 3.0, 2.0 + 2**-51, 1.0)) == [2]
    with pytest.raises(soak.SoakError, match="3 and 2 steps"):
        soak.compare(one, write(tmp_path / "short", 3.0, 2.0))


def test_a_mistake_is_one_line_and_code_2(capsys):
    assert soak.main(["--minutes=0"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_three_minutes_of_kills_and_signals_change_no_bit(tmp_path, capsys):
    assert soak.main(["--minutes=3", "--every=20", f"--out={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert out.count("exit code") >= 5 and "SIGKILL" in out
