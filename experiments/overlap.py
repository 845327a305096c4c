"""Show which messages of the training step travel behind other work, as compiled for a GPU that need not be there.

For each number of chunks: with XLA's own settings, and with the options that the trainer sets on GPUs.

python -m experiments.overlap [--gpu h200] [--chunks 1 2 4] [--json FILE]
"""

import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from experiments import step, targets
from experiments.compiler_options import describe, gpu_options
from experiments.config import (
    CommunicationConfig,
    ConfigError,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
    validate,
)
from experiments.schedule import Transfer, count_launches, read_transfers

AXES = {"dp": 1, "pp": 1, "tp": 8}


@dataclass(frozen=True)
class Options:
    """Compile the training step of a GPT of 4 layers, 1,024 wide, at tp=8 and count the messages that are hidden."""

    gpu: Annotated[str, tyro.conf.arg(help=f"one of {', '.join(targets.GPUS)}")] = "h200"
    chunks: tuple[int, ...] = (1, 2)
    compression: str = "taco"
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help="write the figures there too")] = None


def step_config(compression: str = "taco", chunks: int = 1, implementation: str = "triton") -> TrainConfig:
    """Return a run whose tensor-parallel messages have 8 MiB in bf16: 4 layers, 1,024 wide, 4 x 1,024 tokens."""
    return TrainConfig(
        mesh="dp1,pp1,tp8",
        compression=compression,
        model=ModelConfig(num_layers=4, hidden_size=1024, num_heads=16, vocab_size=32768),
        data=DataConfig(sequence_length=1024, batch_size=4),
        parallel=ParallelConfig(num_microbatches=1),
        communication=CommunicationConfig(min_bytes=65536, chunks=chunks, implementation=implementation),
    )


def main(argv: list[str] | None = None) -> int:
    """Print the table; returns the exit code."""
    options = tyro.cli(Options, args=argv)
    if options.gpu not in targets.GPUS:
        return _fail(f"--gpu must be one of {', '.join(targets.GPUS)}, got {options.gpu!r}")
    if min(options.chunks, default=0) < 1:
        return _fail(f"--chunks must be 1 or more, got {' '.join(map(str, options.chunks)) or 'none'}")
    if options.json is not None and not options.json.parent.is_dir():
        return _fail(f"cannot write {options.json}: there is no folder {options.json.parent}")
    try:
        validate(step_config(options.compression))
    except ConfigError as error:
        return _fail(str(error))
    # The plugin then answers for the compiler only and looks for no driver.
    jax.config.update("jax_platforms", "cpu")
    if reason := targets.missing_compiler():
        return _fail(reason)
    warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning)
    rows = []
    for chunks in options.chunks:
        program = step.build(step_config(options.compression, chunks), targets.mesh(options.gpu, AXES))
        for settings in ({}, gpu_options("gpu", "")):
            text = program.compile(settings).as_text()
            assert text is not None
            rows.append({"chunks": chunks, "options": describe(settings), **figures(text)})
            print(f"compiled {len(rows)} of {2 * len(options.chunks)}", file=sys.stderr, flush=True)
    print_table(options, rows)
    if options.json:
        report = {"gpu": options.gpu, "compression": options.compression, "rows": rows}
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def figures(hlo_text: str) -> dict[str, Any]:
    """Return {"messages", "hidden", "transfers", "launches"} of a compiled step, each per step."""
    transfers = read_transfers(hlo_text, AXES)
    return {
        "messages": int(sum(t.count for t in transfers)),
        "hidden": int(sum(t.count for t in transfers if t.hidden)),
        "transfers": [_transfer(t) for t in transfers],
        "launches": dict(count_launches(hlo_text)),
    }


def print_table(options: Options, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a line for each number of chunks and settings."""
    table = Table(box=box.SIMPLE_HEAD, title=f"{options.compression}, tp=8, compiled for {options.gpu}")
    for column in ("chunks", "settings", "messages/step", "in transfers", "hidden", "launches/step"):
        table.add_column(column, justify="left" if column == "settings" else "right")
    for row in rows:
        transfers = int(sum(t["executions"] for t in row["transfers"]))
        launches = sum(row["launches"].values())
        settings = "the trainer's" if row["options"] else "XLA's"
        table.add_row(*map(str, (row["chunks"], settings, row["messages"], transfers, row["hidden"], launches)))
    console = Console(width=100)
    console.print(table)
    console.print(f"the trainer's: {describe(gpu_options('gpu', ''))}", soft_wrap=True)


def _transfer(transfer: Transfer) -> dict[str, Any]:
    first = transfer.messages[0]
    return {
        "op": first.op,
        "site": first.site,
        "direction": first.direction,
        "executions": float(first.count),
        "arrays": sum(len(m.operands) for m in transfer.messages),
        "wire_bytes": float(transfer.wire_bytes),
        "asynchronous": transfer.asynchronous,
        "hidden": transfer.hidden,
        "behind": [work.name for work in transfer.cover],
    }


def _fail(reason: str) -> int:
    print(f"python -m experiments.overlap: error: {reason}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
