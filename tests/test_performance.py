"""docs/performance.md shows what the commands print from the figures that lie beside it, and says what they say."""

import io
import re
from pathlib import Path

from rich.console import Console

from experiments import latency_report, throughput_report
from experiments.throughput import TOLERANCE, unexplained
from experiments.throughput_report import compare

DOCS = Path(__file__).parent.parent / "docs"
TEXT = (DOCS / "performance.md").read_text()
ROWS = throughput_report.read_rows(DOCS / "throughput" / "results.jsonl")


def printed(*tables) -> str:
    console = Console(width=120, file=io.StringIO())
    for table in tables:
        console.print(table)
    return "\n".join(line.strip() for line in console.file.getvalue().splitlines() if line.strip())


def shown() -> list[str]:
    blocks = re.findall(r"^```text\n(.*?)^```", TEXT, flags=re.DOTALL | re.MULTILINE)
    return ["\n".join(line.strip() for line in block.splitlines() if line.strip()) for block in blocks]


def test_the_tables_are_those_of_the_figures():
    rows = latency_report.read_rows(DOCS / "latency" / "results.jsonl")
    meshes = [[row for row in rows if row.mesh == mesh] for mesh in ("tp2", "tp4")]
    kinds = latency_report.times_table, latency_report.limits_table
    expected = [printed(*(kind(here[0].mesh, here) for here in meshes)) for kind in kinds]
    assert shown() == [printed(throughput_report.table(ROWS)), *expected]


def test_the_pictures_and_commands_are_there():
    for name in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", TEXT):
        assert (DOCS / name).stat().st_size > 10_000
    for module in re.findall(r"python -m (experiments\.\w+)", TEXT):
        assert (DOCS.parent / f"{module.replace('.', '/')}.py").exists()


def test_halving_the_bytes_nearly_halves_steps_that_wait_for_them():
    slow = [c for c in compare(ROWS) if c.exposed >= 0.9 and c.row.mesh in ("tp2", "tp4")]
    eight_bits = [c for c in slow if c.row.compression in ("taco", "int8")]
    assert {(c.row.mesh, c.row.rate) for c in eight_bits} >= {
        (m, r) for m in ("tp2", "tp4") for r in ("20mbit", "50mbit")
    }
    assert min(c.speed_up for c in eight_bits) >= 1.75


def test_every_compression_sent_what_its_program_says():
    measured = [row for row in ROWS if row.planned]
    assert len(measured) == 3 * 6 * 7
    assert max(unexplained(row, ROWS) for row in measured) <= TOLERANCE
    # The transport's notices, which the page speaks of, are more than that of int4's messages alone.
    off = {row: abs(row.payload / row.planned - 1) for row in measured}
    assert max(share for row, share in off.items() if row.compression != "int4") <= TOLERANCE
    assert max(off.values()) <= 0.012
    assert min(row.steps for row in measured) >= 5


def test_fewer_bits_are_faster_where_steps_wait():
    slow = [c for c in compare(ROWS) if c.exposed >= 0.9 and c.row.mesh in ("tp2", "tp4")]
    for name, least in (("int6", 2.2), ("int4", 2.8)):
        found = [c.speed_up for c in slow if c.row.compression == name]
        assert len(found) >= 4 and min(found) >= least
