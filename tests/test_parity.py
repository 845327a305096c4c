"""Equal losses: the runs that are planned, what is run again, losses compared in pairs, and the report."""

import csv
import dataclasses
import io
import json
import math
import os
import signal
import statistics
import sys
import time

import pytest
from rich.console import Console

from experiments import ablations, parity, parity_report
from experiments.cli import build_config, parse_arguments
from experiments.config import flatten, validate
from experiments.link_figures import read_rows
from experiments.parity import Options, Planned
from experiments.parity_report import Row
from taco_jax.config import PRESETS
from taco_jax.pallas import registry

TRAINER = """
import json, pathlib, sys
folder, code = pathlib.Path(sys.argv[1]), int(sys.argv[2])
(folder / "checkpoints").mkdir(parents=True)
totals = {"axes": {"tp": {"bytes_per_step": 50, "bf16_bytes_per_step": 100}}}
(folder / "communication.json").write_text(json.dumps({"totals": totals}))
seen = {"snr_forward": 30.0, "snr_backward": None}
steps = [{"step": n, "loss": 5.0 - n, "step_ms": 10.0 * n, **seen} for n in (1, 2, 3)]
steps[-1] |= {"val_loss": 2.5} if code == 0 else {"loss": None, "skipped_step": 1.0}
(folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\\n" for step in steps))
print("last words")
sys.exit(code)
"""
"""Stands for the trainer: its arguments are the run folder and the exit code."""


def row(codec: str, seed: int, val_loss: float, mesh: str = "tp4", steps: int = 6, **changes) -> Row:
    status = "finished" if math.isfinite(val_loss) else "diverged"
    name = f"{mesh}-{steps}-{codec}-seed{seed}"
    values = Row(name, mesh, steps, codec, seed, status, steps, val_loss, 2.0, 30.0, 29.0, 0.0, 2e6, 4e6, 0.5, 60.0)
    return dataclasses.replace(values, **changes)


def config_of(run: Planned, tmp_path):
    argv = run.argv(tmp_path)
    config = build_config(parse_arguments(argv[3:]))
    validate(config)
    return argv[2], config


def test_every_run_is_compared_with_one_of_the_same_seed_that_comes_first():
    runs = parity.plan(Options())
    assert len(runs) == len({run.name for run in runs}) == 8 + 2 * 4 + 4 + 3 + 3
    for number, run in enumerate(runs):
        assert dataclasses.replace(run, codec="none") in runs[: number + 1]
    assert {run.codec for run in runs} <= {*PRESETS, *ablations.ABLATIONS}
    assert set(parity.ABLATIONS) == set(ablations.ABLATIONS)


def test_runs_of_a_seed_differ_in_what_they_send_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    ablations.register()
    fields = {}
    for run in parity.plan(Options(long_steps=0)):
        module, config = config_of(run, tmp_path)
        assert module == ("experiments.ablations" if run.codec in parity.ABLATIONS else "experiments.train")
        flat = flatten(config)
        sent = flat.pop("compression"), flat.pop("communication.implementation")
        assert sent == (("paper", run.codec) if run.codec in parity.ABLATIONS else (run.codec, "auto"))
        assert (flat.pop("mesh"), flat.pop("seed"), flat["steps"]) == (run.mesh, run.seed, run.steps)
        fields[run.name] = flat
    first, *others = fields.values()
    assert all(other == first for other in others)


def run_with(tmp_path, monkeypatch, codes: dict[str, int], *argv: str) -> tuple[int, list[str]]:
    """Run the command on one trainer after the other that ends with a code; return its exit code and what was run."""
    started: list[str] = []

    def argv_of(run: Planned, out) -> list[str]:
        started.append(run.codec)
        return [sys.executable, "-c", TRAINER, str(out / run.name), str(codes.get(run.codec, 0))]

    monkeypatch.setattr(Planned, "argv", argv_of)
    monkeypatch.setattr(parity, "_LOOKS_EVERY", 0.02)
    command = ["--steps=3", "--long-steps=0", "--seeds", "0", f"--out={tmp_path}", "--only", "tp4-3-none-seed0", *argv]
    return parity.main(command), started


def test_a_run_that_diverges_is_a_result_and_nothing_runs_twice(tmp_path, monkeypatch, capsys):
    wanted = ("tp4-3-taco-seed0", "e4m3_unscaled", "fp8")
    code, started = run_with(tmp_path, monkeypatch, {"e4m3_unscaled": 3}, *wanted)
    assert code == 0 and started == ["none", "taco", "fp8", "e4m3_unscaled"]
    rows = {r.codec: r for r in read_rows(tmp_path / "results.jsonl", Row)}
    exact, lost = rows["none"], rows["e4m3_unscaled"]
    assert (exact.status, exact.done, exact.val_loss, exact.train_loss) == ("finished", 3, 2.5, 3.0)
    assert (exact.snr_forward, exact.bytes_per_step, exact.step_seconds) == (30.0, 50, 0.02)
    assert math.isnan(exact.snr_backward)
    assert (lost.status, lost.done, lost.train_loss) == ("diverged", 2, 3.5) and math.isnan(lost.val_loss)
    assert not list(tmp_path.glob("*/checkpoints"))
    assert "0 at 3" in capsys.readouterr().out
    code, started = run_with(tmp_path, monkeypatch, {}, *wanted, "int8_without_amax")
    assert code == 0 and started == ["int8_without_amax"]


def test_a_run_that_fails_ends_the_command_and_is_run_again(tmp_path, monkeypatch, capsys):
    code, started = run_with(tmp_path, monkeypatch, {"fp8": 4}, "fp8", "int4")
    assert code == 1 and started == ["none", "fp8"]
    error = capsys.readouterr().err.splitlines()[-1]
    assert "tp4-3-fp8-seed0 ended with code 4: last words (see " in error
    assert [r.codec for r in read_rows(tmp_path / "results.jsonl", Row)] == ["none"]
    assert (tmp_path / "tp4-3-fp8-seed0" / "checkpoints").exists()


def test_an_interruption_lets_the_trainer_save(tmp_path):
    saves = f"""
import pathlib, signal, sys, time
def save(*_):
    pathlib.Path({str(tmp_path / "saved")!r}).touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
pathlib.Path({str(tmp_path / "ready")!r}).touch()
time.sleep(60)
"""
    with pytest.raises(SystemExit, match="143"), parity._ends_at_sigterm():
        with parity._process([sys.executable, "-c", saves]) as process:
            while not (tmp_path / "ready").exists():
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
    assert (tmp_path / "saved").exists() and process.returncode == 143
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_what_remains_goes_by_the_same_codec_or_by_all():
    runs = [Planned("tp4", 10, "taco", 1), Planned("tp8", 10, "taco", 0)]
    assert parity.remaining(runs, []) == pytest.approx(20 * parity.GUESS)
    known = [row("taco", 0, 2.0, done=5, seconds=10.0), row("none", 0, 2.0, done=5, seconds=5.0)]
    assert parity.remaining(runs, known) == pytest.approx(10 * 2.0 + 10 * 1.5)


ROWS = [
    row("none", 0, 2.0), row("taco", 0, 2.02), row("fp8", 0, 3.0), row("none", 1, 1.0), row("taco", 1, 0.99),
    row("none", 0, 4.0, mesh="tp8"), row("taco", 0, 4.2, mesh="tp8"),
    row("e4m3_unscaled", 0, math.nan, done=4, snr_backward=math.nan), row("int4", 7, 2.0), row("taco", 0, 9.0, steps=9),
]  # fmt: skip


def test_losses_are_compared_with_that_of_the_same_seed_mesh_and_length():
    found = {(c.rows[0].mesh, c.rows[0].steps, c.rows[0].codec): c for c in parity_report.compare(ROWS)}
    taco = found["tp4", 6, "taco"]
    assert taco.gaps == pytest.approx((1.0, -1.0)) and taco.gap == pytest.approx(0.0, abs=1e-12)
    assert taco.spread == pytest.approx(statistics.stdev((1.0, -1.0)))
    assert found["tp8", 6, "taco"].gaps == pytest.approx((5.0,)) and math.isnan(found["tp8", 6, "taco"].spread)
    for place in (("tp4", 6, "none"), ("tp4", 6, "e4m3_unscaled"), ("tp4", 6, "int4"), ("tp4", 9, "taco")):
        assert found[place].gaps == () and math.isnan(found[place].gap)
    assert list(found)[:2] == [("tp4", 6, "none"), ("tp4", 6, "taco")]


def test_the_report_says_it_all(tmp_path):
    keys = [f"{kind}/mlp/{way}" for kind in ("saturation", "snr") for way in ("forward", "backward")]
    keys += [f"alpha/mlp/{way}/{hop}" for way in ("forward", "backward") for hop in (1, 2)]
    for r in ROWS:
        (tmp_path / r.name).mkdir()
        steps = [{"step": n, "loss": 3.0, "val_loss": 3.0 + n, **dict.fromkeys(keys, 0.5)} for n in range(1, 7)]
        (tmp_path / r.name / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    parity_report.write_report(ROWS, tmp_path)
    with (tmp_path / "parity.csv").open() as file:
        written = {r["name"]: r for r in csv.DictReader(file)}
    assert len(written) == len(ROWS)
    assert float(written["tp8-6-taco-seed0"]["gap"]) == pytest.approx(5.0)
    assert written["tp4-6-e4m3_unscaled-seed0"]["gap"] == "nan"
    for name in ("curves.png", "long.png"):
        assert (tmp_path / name).stat().st_size > 10_000
    console = Console(width=120, file=io.StringIO())
    console.print(parity_report.table(ROWS))
    text = console.file.getvalue()
    lines = {tuple(line.split()[:3]): line.split() for line in text.splitlines() if "tp" in line}
    assert lines["tp4", "6", "taco"][3:7] == ["2", "1.5050", "+0.00", "1.41"]
    assert lines["tp4", "6", "e4m3_unscaled"][-7:] == ["30.0/lost", "2.000", "2.00", "0.500", "0", "at", "5"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--steps", "0"], "--steps must be 1 or more, got 0"),
        (["--long-steps=-1"], "--long-steps must be 0 or more, got -1"),
        (["--seeds", "1", "1"], "--seeds must be different numbers from 0 up, got (1, 1)"),
        (["--only", "tako"], "--only tako: there are none, taco"),
        (["--onyl", "taco"], "did you mean --only?"),
    ],
)
def test_a_mistake_is_one_line(argv, message, tmp_path, capsys):
    assert parity.main([*argv, f"--out={tmp_path / 'out'}"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_quick_run_tells_a_codec_from_an_ablation(tmp_path):
    assert parity.main(["--quick", f"--out={tmp_path}"]) == 0
    gaps = {c.rows[0].codec: c.gap for c in parity_report.compare(read_rows(tmp_path / "results.jsonl", Row))}
    assert all(abs(gaps[codec]) < 2 for codec in ("taco", "int8"))
    assert gaps["int8_without_amax"] > 10
    rows = read_rows(tmp_path / "results.jsonl", Row)
    # The published layout: 33 bytes for 32 values, of four bytes each where nothing is compressed.
    ablation, exact = (next(r for r in rows if r.codec == codec) for codec in ("int8_without_amax", "none"))
    assert exact.bytes_per_step / ablation.bytes_per_step == pytest.approx(4 / (33 / 32), rel=0.01)
