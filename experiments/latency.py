"""Measure inference over links of known speed: `python -m experiments.latency [--quick] [--out DIR]`.

The same model, split over one host per device (`experiments.netns`), reads prompts of several lengths and continues
one, with each compression in turns, over links whose speed is changed while the processes run. A prompt's messages
grow with its length, a token's are the smallest there are: the lengths are a sweep over message sizes, which says from
which on compression pays, that is, what `min_bytes` is to be. Every message is compressed here; what another limit
sends at a length is either this or `none`, which the processes confirm.

Figures are added to DIR/results.jsonl as they come, and a command that is run again measures what is missing. Needs
the rights and tools that `experiments.cluster` needs.

Exit codes: 2 a mistake or missing rights, 1 a process failed, sent other bytes than planned or continued the prompt
with other tokens than before, 130 interrupted.
"""

import dataclasses
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from experiments.cli import parse_command_line
from experiments.config import CommunicationConfig, ConfigError
from experiments.latency_report import (
    BASELINE,
    LONGEST,
    TOKENS,
    Row,
    bytes_table,
    limits_table,
    plot,
    read_rows,
    times_table,
    write_csv,
)
from experiments.link_figures import add_rows, check_turns, exit_code, write_rows
from experiments.link_workers import WorkerFailed, Workers, say

PROGRAM = "python -m experiments.latency"
WORKER = "experiments.latency_worker"
TOLERANCE = 0.03
"""Share by which the bytes of the interfaces may differ from the plan's, of calls that send 2^18 bytes or more: what
gloo says beside the messages is some 3 KB per call, and some are sent twice where a slow link drops them."""
_LARGE = 2**18
_POSITIONS_IN_A_TURN = 256
_MOST_CALLS = 8


@dataclasses.dataclass(frozen=True)
class Options:
    """Time prefill and decoding with each compression over links of several speeds."""

    meshes: Annotated[
        tuple[str, ...], tyro.conf.arg(help="some of tp2, tp4, tp8, a host per device; by default tp2 and tp4")
    ] = ()
    rates: Annotated[
        tuple[str, ...],
        tyro.conf.arg(help="of each link and direction, none: unshaped; by default 50mbit 200mbit 1gbit none"),
    ] = ()
    compressions: Annotated[
        tuple[str, ...], tyro.conf.arg(help="in turns; compared with none, which is what lax sends")
    ] = ("none", "bf16", "taco", "int8")
    prompts: Annotated[
        tuple[int, ...], tyro.conf.arg(help="lengths, beside a single token; by default 4 16 64 256 1024")
    ] = ()
    rounds: Annotated[int, tyro.conf.arg(help="turns of all compressions")] = 5
    min_bytes: Annotated[int, tyro.conf.arg(help="the limit to judge")] = CommunicationConfig().min_bytes
    quick: Annotated[
        bool, tyro.conf.arg(help="tp2, 50mbit and none, prompts of 16 and 256, where nothing else is asked for")
    ] = False
    out: Annotated[Path, tyro.conf.arg(metavar="DIR", help="folder of the figures")] = Path("runs/latency")
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help="also write all rows to this file")] = None
    csv: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help="also write the table to this file")] = None


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write tables, CSV and plot; returns the exit code."""
    return exit_code(PROGRAM, lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    options = _filled(parse_command_line(Options, PROGRAM, argv))
    _check(options)
    options.out.mkdir(parents=True, exist_ok=True)
    results = options.out / "results.jsonl"
    for mesh in options.meshes:
        _measure_mesh(options, mesh, results)
    rows = _asked_for(options, read_rows(results))
    _write(options, rows)
    return _verdict(rows)


def _filled(options: Options) -> Options:
    """Return the options with what was not asked for."""
    quick = options.quick
    return dataclasses.replace(
        options,
        meshes=options.meshes or (("tp2",) if quick else ("tp2", "tp4")),
        rates=options.rates or (("50mbit", "none") if quick else ("50mbit", "200mbit", "1gbit", "none")),
        prompts=options.prompts or ((16, 256) if quick else (4, 16, 64, 256, 1024)),
    )


def _check(options: Options) -> None:
    if wrong := [mesh for mesh in options.meshes if not re.fullmatch("tp[248]", mesh)]:
        raise ConfigError(f"--meshes: a host per device and 8 heads: tp2, tp4 or tp8, got {', '.join(wrong)}")
    check_turns(options.rates, options.compressions, BASELINE, options.rounds)
    if wrong_sizes := [size for size in options.prompts if not 2 <= size <= LONGEST]:
        raise ConfigError(f"--prompts must be from 2 to {LONGEST} tokens, got {wrong_sizes[0]}")
    if options.min_bytes < 0:
        raise ConfigError(f"--min-bytes must be 0 or more, got {options.min_bytes}")
    for path in (options.json, options.csv):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise ConfigError(f"cannot write {path}: it is a folder, or there is no folder {path.parent}")


def _sizes(options: Options) -> list[int]:
    return sorted({1, *options.prompts})


def _asked_for(options: Options, rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the options, in their order."""
    by_key = {row.key: row for row in rows if row.limit == options.min_bytes}
    keys = (
        (mesh, rate, name, size)
        for mesh in options.meshes
        for rate in options.rates
        for size in _sizes(options)
        for name in options.compressions
    )
    return [by_key[key] for key in keys if key in by_key]


def _measure_mesh(options: Options, mesh: str, results: Path) -> None:
    """Measure what results.jsonl does not have of this mesh."""
    found = {row.key for row in _asked_for(options, read_rows(results))}
    missing = [
        (rate, size)
        for rate in options.rates
        for size in _sizes(options)
        if any((mesh, rate, name, size) not in found for name in options.compressions)
    ]
    if not missing:
        return
    numbers = ",".join(str(size) for size in dict.fromkeys(size for _, size in missing))
    arguments = [numbers, str(options.min_bytes), *options.compressions]
    with Workers(WORKER, mesh, arguments, options.out) as workers:
        for rate, size in missing:
            workers.links.set_rate(rate)
            add_rows(results, list(_measure_size(workers, options, rate, size)))


def _measure_size(workers: Workers, options: Options, rate: str, size: int) -> Iterator[Row]:
    """Yield the rows of all compressions for one link and number of positions, in turns after a call that warms up."""
    say(f"{workers.mesh} over {rate}: {size} position{'s' if size > 1 else ', tokens'}, {options.rounds} turns")
    calls = TOKENS if size == 1 else max(1, min(_MOST_CALLS, _POSITIONS_IN_A_TURN // size))
    answers: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in options.compressions}
    for turn in range(options.rounds):
        for name in options.compressions:
            if turn == 0:
                workers.ask(run=name, size=size, calls=1)
            answers[name].append(workers.ask(run=name, size=size, calls=calls))
    texts = {name: _text(turns) for name, turns in answers.items() if size == 1}
    for name, turns in answers.items():
        # A call is over when its last process is.
        seconds = [[max(times) for times in zip(*(a["seconds"] for a in turn), strict=True)] for turn in turns]
        flat = [second for turn in seconds for second in turn]
        ready = [told["models"][name] for told in workers.ready]
        yield Row(
            mesh=workers.mesh,
            rate=rate,
            compression=name,
            size=size,
            message=size * workers.ready[0]["bytes_per_position"],
            seconds=statistics.median(flat),
            fastest=min(flat),
            slowest=max(flat),
            turns=[statistics.median(turn) for turn in seconds],
            payload=sum(a["payload"] for turn in turns for a in turn) / len(flat) / workers.hosts,
            planned=sum(told["planned"][str(size)] for told in ready) / workers.hosts,
            limit=options.min_bytes,
            exact=size in ready[0]["exact"],
            snr_db=ready[0]["snr_db"],
            same_tokens=_same(texts[BASELINE], texts[name]) if size == 1 else None,
        )


def _text(turns: Sequence[Sequence[dict[str, Any]]]) -> list[int]:
    """Return the tokens that continue the prompt, on all hosts and in all turns the same.

    Raises:
        WorkerFailed: if they are not: the likeliest token leaves nothing to chance.
    """
    first = turns[0][0]["tokens"]
    for turn, found in enumerate(turns):
        for host, told in enumerate(found):
            if told["tokens"] != first:
                raise WorkerFailed(
                    f"host {host} continued the prompt with {told['tokens']} in turn {turn + 1}, "
                    f"host 0 with {first} in turn 1"
                )
    return first


def _same(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens agree before the first that does not."""
    return next((i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b), len(first))


def _write(options: Options, rows: Sequence[Row]) -> None:
    write_csv(rows, options.out / "latency.csv")
    plot(rows, options.out / "latency.png")
    if options.csv is not None:
        write_csv(rows, options.csv)
    write_rows(options.json, rows)
    console = Console(width=120)
    for mesh in options.meshes:
        here = [row for row in rows if row.mesh == mesh]
        for table in (times_table, bytes_table, limits_table):
            console.print(table(mesh, here))
    print(f"{options.out}: results.jsonl, latency.csv, latency.png")


def _verdict(rows: Sequence[Row]) -> int:
    """Return 1 if an interface has counted other bytes than planned."""
    large = [row for row in rows if row.planned >= _LARGE]
    wrong = [row for row in large if abs(row.payload / row.planned - 1) > TOLERANCE]
    for row in wrong:
        print(
            f"{row.mesh} over {row.rate}, {row.compression}, {row.size} positions: {row.payload:,.0f} bytes per call "
            f"and host were sent, {row.planned:,.0f} were planned",
            file=sys.stderr,
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
