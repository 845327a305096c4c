"""docs/fidelity.md shows what the commands print."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from experiments import fidelity
from experiments.link_figures import read_rows
from experiments.parity_report import Row, compare, table

DOCS = Path(__file__).parent.parent / "docs"
TEXT = (DOCS / "fidelity.md").read_text()
ROWS = read_rows(DOCS / "parity" / "results.jsonl", Row)
FIGURE = re.compile(r"-?\d+\.\d+")


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def blocks() -> list[list[str]]:
    return [lines(block) for block in re.findall(r"^```text\n(.*?)^```", TEXT, flags=re.DOTALL | re.MULTILINE)]


def test_the_table_of_losses_is_that_of_the_figures():
    console = Console(width=120, file=io.StringIO())
    console.print(table(ROWS))
    assert blocks()[-1] == lines(console.file.getvalue())


def test_the_gaps_in_the_text_are_those_of_the_figures():
    gaps = {c.rows[0].codec: c.gap for c in compare(ROWS)}
    said = re.findall(r"([-+]\d\.\d+) % \(`(\w+)`\)", TEXT)
    assert said
    for gap, codec in said:
        assert float(gap) == pytest.approx(gaps[codec], abs=0.051)


def test_pictures_and_commands_are_there():
    for name in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", TEXT):
        assert (DOCS / name).stat().st_size > 10_000
    for module in re.findall(r"python -m (experiments\.\w+)", TEXT):
        assert (DOCS.parent / f"{module.replace('.', '/')}.py").exists()
    for path, test in re.findall(r"`(tests/\w+\.py)(::\w+)?`", TEXT):
        assert test.removeprefix("::") in (DOCS.parent / path).read_text()


@pytest.mark.slow
def test_the_tables_of_fidelity_are_what_the_command_prints(capsys, tmp_path):
    """To the last digit but one: another processor may round a figure that ends in 5 the other way."""
    assert fidelity.main([f"--out={tmp_path}", f"--json={tmp_path / 'figures.json'}"]) == 0
    printed = lines(capsys.readouterr().out)
    found = json.loads((tmp_path / "figures.json").read_text())
    assert len(found["checks"]) == 20 and all(check["passed"] for check in found["checks"])
    assert {(row["codec"], row["step"]) for row in found["captured"]} == {
        (name, number) for name in fidelity.NAMES for number in (0, 20, 40)
    }
    for shown in blocks()[:-1]:
        start = printed.index(shown[0])
        for line, other in zip(shown, printed[start : start + len(shown)], strict=True):
            assert FIGURE.sub("", line) == FIGURE.sub("", other)
            assert list(map(float, FIGURE.findall(line))) == pytest.approx(
                list(map(float, FIGURE.findall(other))), abs=0.101
            )
