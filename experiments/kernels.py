"""Print what the codec's kernels move and, on a device that is there, how long they take.

Bytes per value are counted in the compiled program: every instruction that becomes a kernel reads its operands and
writes its results. The device is this machine's GPU, without one an H200 where JAX's CUDA compiler is installed, else
the CPU, in plain jnp. The floors, for n ranks, are 3 (encode), 1 + 1/n (reduce), 3 (decode) and 1 + 2/n (decode_sum)
bytes per value of the bf16 tensor of one rank, whose n messages or parts the operation takes.

python -m experiments.kernels [--device NAME] [--presets NAME...] [--implementations NAME...]
    [--time | --count-only] [--sizes-mib N...] [--json FILE]
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.kernel_programs import PRESETS, Program, Target, compile_program, find_target, floor, programs
from experiments.kernel_times import Effort, Timing, seconds_of_calls, timings
from experiments.kernel_traffic import read_traffic
from taco_jax.pallas import registry

_GPU, _CPU = (4, 16, 64, 256), (1,)
"""Sizes to time by default."""


@dataclass(frozen=True)
class Options:
    """Count the bytes that the codec's kernels move, and time them."""

    device: Annotated[str, tyro.conf.arg(help="auto, cpu, or a GPU that need not be there: a100, h100, h200, b200")] = (
        "auto"
    )
    presets: tuple[str, ...] = PRESETS
    implementations: Annotated[
        tuple[str, ...], tyro.conf.arg(help="only these of the registry's, beside xla; by default all")
    ] = registry.IMPLEMENTATIONS
    ranks: Annotated[int, tyro.conf.arg(help="messages that reduce and decode_sum add")] = 8
    mib: Annotated[int, tyro.conf.arg(help="size of the bf16 tensor whose programs are counted")] = 64
    time: Annotated[
        tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(help="run and time them too; a GPU that is there always does")
    ] = False
    count_only: Annotated[tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(help="run nothing on a GPU either")] = False
    sizes_mib: Annotated[
        tuple[int, ...], tyro.conf.arg(help="sizes of the bf16 tensor to time; by default 4 16 64 256, on a CPU 1")
    ] = ()
    json: Annotated[Path | None, tyro.conf.arg(help="also write the figures to this file")] = None


@dataclass(frozen=True)
class Row:
    """Bytes per value of one compiled operation, and the kernels it launches."""

    implementation: str
    operation: str
    preset: str
    read: float
    written: float
    total: float
    floor: float
    ratio: float
    kernels: int


def main(argv: list[str] | None = None) -> int:
    """Print the tables; returns the exit code."""
    options = tyro.cli(Options, args=argv)
    try:
        check(options)
        target = find_target(options.device)
        timed = timed_sizes(options, target)
    except ValueError as error:
        print(f"python -m experiments.kernels: error: {error}", file=sys.stderr)
        return 2
    chosen = tuple(name for name in registry.IMPLEMENTATIONS if name in (*options.implementations, "xla"))
    found, declined = programs(target, options.presets, chosen)
    report: dict[str, Any] = {
        "device": target.label,
        "jax": jax.__version__,
        "ranks": options.ranks,
        "mib": options.mib,
        "declined": declined,
        "traffic": [],
        "times": [],
    }
    rows: list[Row] = []
    for count, program in enumerate(found, start=1):
        rows.append(count_bytes(program, target, options.ranks, options.mib))
        if count % 16 == 0 or count == len(found):
            print(f"compiled {count} of {len(found)}", file=sys.stderr, flush=True)
    console = Console(width=110)
    console.print(traffic_table(rows, target, options))
    for line in declined:
        console.print(line, highlight=False, soft_wrap=True)
    report["traffic"] = [asdict(row) for row in rows]
    _write(options.json, report)
    effort = Effort(rounds=10, calls=20) if target.platform == "gpu" else Effort(rounds=3, calls=2)
    if timed:
        report["seconds_of_calls"] = seconds_of_calls(target, effort)
    for size in timed:
        times = list(timings(found, target, options.ranks, size, effort))
        console.print(times_table(times, target, size, report["seconds_of_calls"]))
        report["times"] += [asdict(timing) for timing in times]
        # After each size, so that a run that is cut short leaves what it measured.
        _write(options.json, report)
    return 0


def check(options: Options) -> None:
    """Raise ValueError for options that mean nothing, before anything compiles."""
    unknown = [name for name in options.presets if name not in PRESETS]
    if unknown or not options.presets:
        raise ValueError(f"--presets must be some of {', '.join(PRESETS)}, got {', '.join(unknown) or 'none'}")
    if unknown := [name for name in options.implementations if name not in registry.IMPLEMENTATIONS]:
        raise ValueError(
            f"--implementations must be some of {', '.join(registry.IMPLEMENTATIONS)}, got {', '.join(unknown)}"
        )
    if not 1 <= options.ranks <= 64 or options.ranks & (options.ranks - 1):
        raise ValueError(f"--ranks must be a power of two up to 64, got {options.ranks}")
    sizes = options.mib, *options.sizes_mib
    if min(sizes) < 1:
        raise ValueError(f"sizes must be 1 MiB or more, got {min(sizes)}")
    if options.count_only and (options.time or options.sizes_mib):
        raise ValueError("--count-only runs nothing, but --time or --sizes-mib asks for times")
    if options.json is not None and not options.json.parent.is_dir():
        raise ValueError(f"cannot write {options.json}: there is no folder {options.json.parent}")


def timed_sizes(options: Options, target: Target) -> tuple[int, ...]:
    """Return the MiB to time, none where nothing is.

    Raises:
        ValueError: if something is to be timed on a device that does not exist.
    """
    wanted = options.time or options.sizes_mib
    if wanted and not target.real:
        raise ValueError(f"nothing can be timed on {target.label}; --device cpu can")
    if options.count_only or not (wanted or (target.platform == "gpu" and target.real)):
        return ()
    return options.sizes_mib or (_GPU if target.platform == "gpu" else _CPU)


def count_bytes(program: Program, target: Target, ranks: int, mib: int) -> Row:
    """Compile one operation on a bf16 tensor of `mib` MiB and count what it moves per value."""
    size = mib * 2**20 // 2
    text = compile_program(program, target, ranks, size // ranks).as_text()
    assert text is not None
    traffic, least = read_traffic(text), floor(program, ranks)
    total = (traffic.read + traffic.written) / size
    return Row(
        implementation=program.implementation,
        operation=program.operation,
        preset=program.preset,
        read=traffic.read / size,
        written=traffic.written / size,
        total=total,
        floor=least,
        ratio=total / least,
        kernels=traffic.kernels,
    )


def traffic_table(rows: Sequence[Row], target: Target, options: Options) -> Table:
    """Return the bytes per value as a table."""
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"bytes per value of a bf16 tensor of {options.mib} MiB, {options.ranks} ranks: {target.label}",
        caption=f"floor: 3, 1 + 1/n, 3, 1 + 2/n bytes with n = {options.ranks}, per value of one rank's tensor (its n "
        "messages together); taco_block, fp8 and int8 also send 2 bytes per block of 128; taco also observes",
    )
    for name in ("preset", "operation", "implementation"):
        table.add_column(name)
    for name in ("read", "written", "total", "floor", "total/floor", "kernels"):
        table.add_column(name, justify="right")
    for row in rows:
        figures = (f"{value:.3f}" for value in (row.read, row.written, row.total, row.floor, row.ratio))
        table.add_row(row.preset, row.operation, row.implementation, *figures, str(row.kernels))
    return table


def times_table(times: Sequence[Timing], target: Target, mib: int, calls: float) -> Table:
    """Return the timings of one size as a table."""
    copy = min(timing.copy_seconds for timing in times)
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"a bf16 tensor of {mib} MiB: median time of a call on {target.label}",
        caption=f"GB/s: the floor's bytes; the best median of a copy was {2 * mib * 2**20 / copy / 1e9:.0f} GB/s "
        f"({copy * 1e6:.1f} us); a call alone takes {calls * 1e6:.1f} us",
    )
    for name in ("preset", "operation", "implementation"):
        table.add_column(name)
    for name in ("us", "GB/s", "of a copy", "over plain jnp", "over a bf16 cast"):
        table.add_column(name, justify="right")
    for t in times:
        figures = f"{t.seconds * 1e6:.1f}", f"{t.gb_per_s:.4g}", f"{t.share_of_copy:.0%}"
        table.add_row(t.preset, t.operation, t.implementation, *figures, f"{t.over_xla:.2f}x", f"{t.over_cast:.2f}x")
    return table


def _write(path: Path | None, report: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
