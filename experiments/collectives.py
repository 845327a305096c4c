"""Time the collectives on the devices that are there, compressed and through lax, in the manner of nccl-tests.

For each operation, compression and size: median time of a call, algorithm and bus bandwidth, bytes that leave a device
as the compiled program says, error, and the size from which on the compression is faster than `jax.lax`.

python -m experiments.collectives [--quick] [--devices N] [--operations NAME...] [--compressions NAME...]
    [--min-size 64KiB] [--max-size 64MiB] [--factor 4] [--json FILE] [--csv FILE]
    [--coordinator HOST:PORT --num-processes N --process-id I]
"""

import csv
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro
from jax.sharding import AxisType, Mesh
from rich import box
from rich.console import Console
from rich.table import Table

import taco_jax
from experiments.collective_times import AXIS, OPERATIONS, Row, crossover, measure
from experiments.communication import CommunicationMismatch
from experiments.config import ConfigError
from experiments.processes import find, join
from taco_jax.sharding.mesh import emulate_devices

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_EMULATED = 8


@dataclass(frozen=True)
class Options:
    """Time compressed collectives against jax.lax, on the devices of all processes together."""

    devices: Annotated[
        int | None, tyro.conf.arg(help="how many; by default all, on a CPU 8 that are emulated, in all processes")
    ] = None
    operations: Annotated[tuple[str, ...], tyro.conf.arg(help=f"some of {', '.join(OPERATIONS)}; by default all")] = ()
    compressions: Annotated[
        tuple[str, ...], tyro.conf.arg(help=f"some of {', '.join(taco_jax.PRESETS)}; by default all")
    ] = ()
    min_size: Annotated[str, tyro.conf.arg(help="of the bf16 tensor per device; by default 64KiB")] = ""
    max_size: Annotated[str, tyro.conf.arg(help="by default 64MiB, with --quick 1MiB")] = ""
    factor: Annotated[int | None, tyro.conf.arg(help="between sizes; by default 4, with --quick 16")] = None
    rounds: Annotated[int | None, tyro.conf.arg(help="turns that are timed; by default 10, with --quick 5")] = None
    seed: Annotated[int, tyro.conf.arg(help="of the values")] = 0
    quick: Annotated[
        tyro.conf.FlagCreatePairsOff[bool],
        tyro.conf.arg(help="few sizes and only psum, where nothing else is asked for"),
    ] = False
    json: Annotated[Path | None, tyro.conf.arg(help="also write the rows to this file")] = None
    csv: Annotated[Path | None, tyro.conf.arg(help="also write the rows to this file")] = None
    coordinator: Annotated[str, tyro.conf.arg(help="HOST:PORT of process 0, if there are several")] = ""
    num_processes: Annotated[int | None, tyro.conf.arg(help="how many processes there are")] = None
    process_id: Annotated[int | None, tyro.conf.arg(help="number of this one, 0 first")] = None


@dataclass(frozen=True)
class Plan:
    """What is measured: the options with everything filled in."""

    operations: tuple[str, ...]
    compressions: tuple[str, ...]
    sizes: tuple[int, ...]
    rounds: int
    seed: int


def main(argv: list[str] | None = None) -> int:
    """Print the tables; returns the exit code."""
    options = tyro.cli(Options, args=argv)
    try:
        plan = plan_of(options)
        mesh = mesh_of(options)
        check_sizes(plan, mesh.size)
    except (ValueError, ConfigError) as error:
        print(f"python -m experiments.collectives: error: {error}", file=sys.stderr)
        return 2
    first = jax.process_index() == 0
    console = Console(width=120, quiet=not first)
    console.print(header(plan, mesh), highlight=False)
    rows: list[Row] = []
    count = len(plan.sizes) * len(plan.operations)
    try:
        measured = measure(mesh, plan.sizes, plan.operations, plan.compressions, plan.rounds, plan.seed)
        for done, found in enumerate(measured, start=1):
            rows += found
            if first:
                told = f"{done} of {count}: {found[0].operation} of {with_unit(found[0].size)}"
                print(told, file=sys.stderr, flush=True)
                # After each, so that a run that is cut short leaves what it measured.
                write(options, plan, mesh, rows)
    except CommunicationMismatch as error:
        print(f"python -m experiments.collectives: error: {error}", file=sys.stderr)
        return 4
    for operation in plan.operations:
        console.print(operation_table(operation, rows))
    for baseline in ("none", "bf16"):
        if baseline in plan.compressions:
            console.print(crossover_table(plan, rows, baseline))
    return 0


def plan_of(options: Options) -> Plan:
    """Return what is to be measured.

    Raises:
        ValueError: for options that mean nothing.
    """
    for flag, asked, known in (
        ("--operations", options.operations, OPERATIONS),
        ("--compressions", options.compressions, taco_jax.PRESETS),
    ):
        if unknown := [name for name in asked if name not in known]:
            raise ValueError(f"{flag} must be some of {', '.join(known)}, got {', '.join(unknown)}")
    low = bytes_of("--min-size", options.min_size or "64KiB")
    high = bytes_of("--max-size", options.max_size or ("1MiB" if options.quick else "64MiB"))
    factor = (16 if options.quick else 4) if options.factor is None else options.factor
    rounds = (5 if options.quick else 10) if options.rounds is None else options.rounds
    if low > high:
        raise ValueError(f"--min-size is {low} bytes, more than --max-size, {high}")
    if factor < 2:
        raise ValueError(f"--factor must be 2 or more, got {factor}")
    if rounds < 1:
        raise ValueError(f"--rounds must be 1 or more, got {rounds}")
    if options.seed < 0:
        raise ValueError(f"--seed must be 0 or more, got {options.seed}")
    for path in (options.json, options.csv):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise ValueError(f"cannot write {path}: it is a folder, or there is no folder {path.parent}")
    sizes = [low]
    while sizes[-1] * factor <= high:
        sizes.append(sizes[-1] * factor)
    operations = options.operations or (("psum",) if options.quick else OPERATIONS)
    compressions = options.compressions or taco_jax.PRESETS
    return Plan(_once(operations), _once(compressions), tuple(sizes), rounds, options.seed)


def bytes_of(flag: str, text: str) -> int:
    """Return the bytes of a size such as 65536, 64KiB or 1MiB.

    Raises:
        ValueError: if it is none.
    """
    match = re.fullmatch(r"(\d+)\s*([KMG]iB|B|)", text, re.IGNORECASE)
    size = int(match.group(1)) * _UNITS[match.group(2).upper()] if match else 0
    if size < 1:
        raise ValueError(f"{flag} must be a size such as 64KiB or 1MiB, got {text!r}")
    return size


def mesh_of(options: Options) -> Mesh:
    """Join the other processes and return the mesh of one axis over the devices of all.

    Raises:
        ValueError, ConfigError: if the processes do not come together or the devices do not suffice.
    """
    wanted = options.devices
    if wanted is not None and wanted < 2:
        raise ValueError(f"--devices must be 2 or more, got {wanted}")
    emulated = _EMULATED if wanted is None else wanted
    processes = find(options.coordinator, options.num_processes, options.process_id)
    join(processes, emulated)
    if processes.count == 1:
        emulate_devices(emulated)
    there = jax.devices()
    count = len(there) if wanted is None else wanted
    if count > len(there) or len(there) < 2:
        raise ValueError(f"{max(count, 2)} devices are needed, there are {len(there)}")
    if jax.process_count() > 1 and count != len(there):
        raise ValueError(
            f"--devices must be all {len(there)} devices of the {jax.process_count()} processes, got {count}"
        )
    return jax.make_mesh((count,), (AXIS,), axis_types=(AxisType.Auto,), devices=there[:count])


def check_sizes(plan: Plan, ranks: int) -> None:
    """Raise ValueError for a size that cannot be cut into a part of whole bf16 values for each rank."""
    for size in plan.sizes:
        if size % (2 * ranks):
            raise ValueError(
                f"a size must be a multiple of {2 * ranks} bytes, a bf16 value for each device, got {size}; "
                f"--min-size={max(1, size // (2 * ranks)) * 2 * ranks} would do"
            )


def header(plan: Plan, mesh: Mesh) -> str:
    """Return what has been asked for and where it runs, in the lines that precede the tables."""
    device = mesh.devices.flat[0]
    sizes = f"{with_unit(plan.sizes[0])} to {with_unit(plan.sizes[-1])}"
    return (
        f"# {mesh.size} devices ({device.platform}, {device.device_kind}) in {jax.process_count()} process(es), "
        f"JAX {jax.__version__}\n"
        f"# bf16, {sizes} per device, {plan.rounds} rounds in turns after a warm-up, seed {plan.seed}\n"
        "# size: of the larger one of operand and result; bus: GB/s of the tensor times 2(n-1)/n for psum, 1 for\n"
        "# ppermute, else (n-1)/n; sent: bytes that leave a device, by the compiled program; ratio: of what bf16 sends"
    )


def operation_table(operation: str, rows: Sequence[Row]) -> Table:
    """Return the rows of one operation as a table."""
    table = Table(box=box.SIMPLE_HEAD, title=operation)
    table.add_column("size", justify="right")
    table.add_column("compression")
    for name in ("us", "alg GB/s", "bus GB/s", "sent", "ratio", "SNR dB", "of lax's speed"):
        table.add_column(name, justify="right")
    for row in rows:
        if row.operation == operation:
            table.add_row(with_unit(row.size), row.compression, *_figures(row))
    if reasons := {row.skipped for row in rows if row.operation == operation and row.skipped}:
        table.caption = "left out: " + "; ".join(sorted(reasons))
    return table


def crossover_table(plan: Plan, rows: Sequence[Row], baseline: str) -> Table:
    """Return, for each compression and operation, the size from which on it is faster than the baseline."""
    what = {"none": "lax", "bf16": "bf16 on the same way"}[baseline]
    captions = {
        "none": "what min_bytes is to be on these devices; where XLA:CPU sums, lax sends float32",
        "bf16": "what the compression is worth by itself",
    }
    table = Table(box=box.SIMPLE_HEAD, title=f"faster than {what} from this size on", caption=captions[baseline])
    table.add_column("compression")
    for operation in plan.operations:
        table.add_column(operation, justify="right")
    for name in plan.compressions:
        if name not in ("none", baseline):
            table.add_row(name, *(crossover_text(operation, name, rows, baseline) for operation in plan.operations))
    return table


def crossover_text(operation: str, compression: str, rows: Sequence[Row], baseline: str) -> str:
    """Return the crossover of one operation and compression in words."""
    seconds = {(row.compression, row.size): row.seconds for row in rows if row.operation == operation}
    pairs = [
        (size, base / own)
        for (name, size), own in seconds.items()
        if name == compression and own is not None and (base := seconds.get((baseline, size))) is not None
    ]
    if not pairs:
        return f"{'lax' if baseline == 'none' else baseline} not timed"
    found = crossover(pairs)
    return f"never up to {with_unit(max(pairs)[0])}" if found is None else with_unit(found)


def with_unit(size: int) -> str:
    """Return bytes in the largest unit that leaves a whole number."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def write(options: Options, plan: Plan, mesh: Mesh, rows: Sequence[Row]) -> None:
    """Write the files that were asked for."""
    if options.json is not None:
        device = mesh.devices.flat[0]
        report: dict[str, Any] = {
            "devices": mesh.size,
            "processes": jax.process_count(),
            "platform": device.platform,
            "device_kind": device.device_kind,
            "jax": jax.__version__,
            "dtype": "bfloat16",
            **asdict(plan),
            "rows": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.csv is not None:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Row)])
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)


def _figures(row: Row) -> list[str]:
    if row.seconds is None:
        return ["left out"] + 6 * ["-"]
    snr = "exact" if row.exact else "not finite" if row.snr_db is None else f"{row.snr_db:.1f}"
    return [
        f"{row.seconds * 1e6:,.1f}",
        f"{row.algorithm_gb_per_s:.4g}",
        f"{row.bus_gb_per_s:.4g}",
        f"{row.wire_bytes:,}",
        f"{row.ratio:.3f}",
        snr,
        "-" if row.speedup is None else f"{row.speedup:.2f}x",
    ]


def _once(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


if __name__ == "__main__":
    raise SystemExit(main())
