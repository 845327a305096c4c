"""Measure training steps over links of known speed: `python -m experiments.throughput [--quick] [--out DIR]`.

The same model and tokens with each compression, in one process per host (`experiments.netns`), in turns, over links
whose speed is changed while the processes run. Bytes are those that the hosts' interfaces counted, compared with what
the compiled step is to send; needs the rights and tools that `experiments.cluster` needs. Figures are added to
DIR/results.jsonl as they come, and a command that is run again measures what is missing.

Exit codes: 2 a mistake or missing rights, 1 a process failed or sent other bytes than planned, 130 interrupted.
"""

import dataclasses
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from experiments.cli import parse_command_line
from experiments.config import ConfigError
from experiments.link_figures import add_rows, check_turns, exit_code, write_rows
from experiments.link_workers import Workers, say
from experiments.throughput_report import ALONE, BASELINE, Row, read_rows, table, write_report
from taco_jax.config import Compression
from taco_jax.sharding.mesh import parse_mesh

PROGRAM = "python -m experiments.throughput"
WORKER = "experiments.throughput_worker"
TOLERANCE = 0.01
"""Share by which the bytes of the interfaces may differ from the plan's.

Messages of less than a byte a value without what the baseline sends above its plan: notices of the transport, as many
for messages of any size, hence a larger share of smaller ones.
"""


@dataclasses.dataclass(frozen=True)
class Options:
    """Time training steps with each compression over links of several speeds."""

    meshes: Annotated[tuple[str, ...], tyro.conf.arg(help="dp lies within a host, pp and tp between hosts")] = (
        "tp2", "tp4", "dp2,pp2,tp2",
    )  # fmt: skip
    rates: Annotated[tuple[str, ...], tyro.conf.arg(help="of each link and direction; none: unshaped")] = (
        "20mbit", "50mbit", "100mbit", "200mbit", "500mbit", "none",
    )  # fmt: skip
    compressions: Annotated[tuple[str, ...], tyro.conf.arg(help="in turns; compared with bf16")] = (
        "bf16", "taco", "int8", "int6", "int4", "paper", "none",
    )  # fmt: skip
    rounds: Annotated[int, tyro.conf.arg(help="turns; each times two steps of every compression")] = 3
    quick: Annotated[bool, tyro.conf.arg(help="tp2 over two links, bf16, taco and int8: four minutes")] = False
    out: Annotated[Path, tyro.conf.arg(metavar="DIR", help="folder of the figures")] = Path("runs/throughput")
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help="also write all rows to this file")] = None


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write table, CSV and plot; returns the exit code."""
    return exit_code(PROGRAM, lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    options = parse_command_line(Options, PROGRAM, argv)
    if options.quick:
        options = dataclasses.replace(
            options, meshes=("tp2",), rates=("30mbit", "none"), compressions=("bf16", "taco", "int8")
        )
    _check(options)
    options.out.mkdir(parents=True, exist_ok=True)
    results = options.out / "results.jsonl"
    for mesh in options.meshes:
        _measure_mesh(options, mesh, results)
    rows = [row for row in read_rows(results) if row.mesh in options.meshes and row.rate in options.rates]
    write_report(rows, options.out)
    write_rows(options.json, rows)
    Console(width=120).print(table(rows))
    print(f"{options.out}: results.jsonl, throughput.csv, throughput.png")
    return _verdict(rows)


def _check(options: Options) -> None:
    for mesh in options.meshes:
        try:
            sizes = parse_mesh(mesh)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if min(sizes.values()) < 1 or sizes["tp"] not in (2, 4, 8) or sizes["pp"] > 2 or sizes["dp"] > 4:
            raise ConfigError(
                f"--meshes: {mesh}: the model has 2 layers and 8 heads; tp 2, 4 or 8, pp 1 or 2, dp 1 to 4"
            )
    check_turns(options.rates, options.compressions, BASELINE, options.rounds)


def _measure_mesh(options: Options, mesh: str, results: Path) -> None:
    """Measure what results.jsonl does not have of this mesh."""
    found = {row.key for row in read_rows(results)}
    names = (*options.compressions, ALONE)
    missing = [rate for rate in options.rates if any((mesh, rate, name) not in found for name in names)]
    if not missing:
        return
    with Workers(WORKER, mesh, options.compressions, options.out) as workers:
        codec = {name: max(a["seconds"] for a in workers.ask(codec=name)) for name in options.compressions}
        for rate in missing:
            workers.links.set_rate(rate)
            add_rows(results, list(_measure_rate(workers, options, mesh, rate, codec)))


def _measure_rate(workers: Workers, options: Options, mesh: str, rate: str, codec: dict[str, float]) -> Iterator[Row]:
    """Yield the rows of a link speed: turns of two steps, after one that warms up."""
    names = (*options.compressions, ALONE)
    answers: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in names}
    for turn in range(options.rounds):
        for name in names:
            say(f"{mesh} over {rate}: turn {turn + 1} of {options.rounds}, {name}")
            if turn == 0:
                workers.ask(run=name, steps=1)
            answers[name].append(workers.ask(run=name, steps=2))
    for name, turns in answers.items():
        # A step is over when its last process is.
        seconds = [max(times) for turn in turns for times in zip(*(a["seconds"] for a in turn), strict=True)]
        steps = len(seconds)
        yield Row(
            mesh=mesh,
            hosts=workers.hosts,
            rate=rate,
            compression=name,
            seconds=statistics.median(seconds),
            fastest=min(seconds),
            slowest=max(seconds),
            steps=steps,
            sent=sum(a["sent"] for turn in turns for a in turn) / steps / workers.hosts,
            payload=sum(a["payload"] for turn in turns for a in turn) / steps / workers.hosts,
            planned=sum(planned.get(name, 0.0) for planned in workers.ready) / workers.hosts,
            codec=codec.get(name, 0.0),
        )


def _verdict(rows: Sequence[Row]) -> int:
    """Return 1 if an interface has counted other bytes than planned."""
    wrong = [row for row in rows if row.planned and unexplained(row, rows) > TOLERANCE]
    for row in wrong:
        print(
            f"{row.mesh} over {row.rate}, {row.compression}: {row.payload:,.0f} bytes per step and host were sent, "
            f"{row.planned:,.0f} were planned",
            file=sys.stderr,
        )
    return 1 if wrong else 0


def unexplained(row: Row, rows: Iterable[Row]) -> float:
    """Return the share of the planned bytes that neither the plan nor the transport's notices explain."""
    notices = 0.0
    codec = Compression.named(row.compression).forward
    if codec is not None and codec.value_bits < 8:
        baselines = {other.key: other for other in rows}
        if baseline := baselines.get((row.mesh, row.rate, BASELINE)):
            notices = baseline.payload - baseline.planned
    return abs(row.payload - notices - row.planned) / row.planned


if __name__ == "__main__":
    raise SystemExit(main())
