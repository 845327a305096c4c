"""Measure a model on a whole file: `python -m experiments.evaluate FOLDER --data=FILE --mesh=dp2,tp4`.

Prints the mean loss per token and the perplexity. Every token but the first is predicted once, from what precedes it in
its window; windows follow each other without overlap, and the last one is shorter. Exit codes: 0 done, 2 a mistake in
the command, 4 the compiled program does not send what --compression asks for, 130 interrupted.
"""

import json
import math
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import tyro

from experiments.cli import parse_command_line
from experiments.communication import CommunicationMismatch
from experiments.config import ConfigError, DataConfig
from experiments.data import Batch, read_ids
from experiments.inference import ModelArguments, require_compression, sent_per_call, tokenizer_for
from experiments.metrics import log_to_stderr, progress_bar, write_atomically

PROGRAM = "python -m experiments.evaluate"


@dataclass(frozen=True)
class Arguments(ModelArguments):
    """Measure the loss and the perplexity of a model on a whole file, on any mesh."""

    data: Annotated[str, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: the King James Bible)")] = ""
    """A text, .jsonl or .bin file."""
    sequence_length: Annotated[int, tyro.conf.arg(metavar="INT")] = 0
    """Tokens per window; 0 means the model's longest sequence, but at most 1024."""
    batch_size: Annotated[int, tyro.conf.arg(metavar="INT")] = 32
    """Windows per call over the whole mesh."""
    max_tokens: Annotated[int, tyro.conf.arg(metavar="INT")] = 0
    """Read no more than this many from the beginning of the file; 0 reads all."""
    json: Annotated[str, tyro.conf.arg(metavar="FILE")] = ""
    """Write the figures there too."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the program's own) and return the exit code."""
    try:
        arguments = parse_command_line(Arguments, PROGRAM, sys.argv[1:] if argv is None else argv)
        log_to_stderr()
        _evaluate(arguments)
    except ConfigError as error:
        return _fail(error, 2)
    except CommunicationMismatch as error:
        return _fail(error, 4)
    except KeyboardInterrupt:
        return _fail("interrupted", 128 + signal.SIGINT)
    return 0


def windows(ids: np.ndarray, length: int, rows: int) -> Iterator[Batch]:
    """Yield batches [rows, length] that predict every id but the first once; what is missing at the end is masked."""
    count = len(ids) - 1
    for first in range(0, count, rows * length):
        part = np.asarray(ids[first : min(first + rows * length, count) + 1], np.int32)
        padding = rows * length + 1 - len(part)
        mask = np.pad(np.ones(len(part) - 1, np.float32), (0, padding))
        part = np.pad(part, (0, padding))
        yield {
            "tokens": part[:-1].reshape(rows, length),
            "targets": part[1:].reshape(rows, length),
            "mask": mask.reshape(rows, length),
        }


def _evaluate(arguments: Arguments) -> None:
    arguments.check(batch_size=1, sequence_length=0, max_tokens=0)
    started = time.perf_counter()
    model = arguments.load(sequence_length=arguments.sequence_length, batch_size=arguments.batch_size)
    tokenizer = tokenizer_for(model, arguments.tokenizer)
    ids, file_bytes = read_ids(DataConfig(path=arguments.data, tokenizer=arguments.tokenizer), tokenizer)
    text_bytes = float(file_bytes)
    if arguments.max_tokens and arguments.max_tokens < len(ids):
        text_bytes = file_bytes * arguments.max_tokens / len(ids)
        ids = ids[: arguments.max_tokens]
    if len(ids) < 2:
        raise ConfigError(f"{arguments.data} has {len(ids)} tokens, two are needed")
    program, data = model.program, model.program.config.data
    traced = program.traced_evaluation()
    evaluate = traced.lower().compile()
    require_compression(program, sent_per_call(program, traced, evaluate))
    loss = tokens = 0.0
    with progress_bar("evaluating", len(ids) - 1) as advance:
        for batch in windows(ids, data.sequence_length, data.batch_size):
            placed = jax.device_put(batch, program.batch_sharding)
            sums = evaluate(model.state["params"], model.state["scales"], placed)
            loss, tokens = loss + float(sums["loss_sum"]), tokens + float(sums["tokens"])
            advance(int(batch["mask"].sum()))
    mean = loss / tokens
    figures = {
        "folder": str(model.folder),
        "step": model.step,
        "data": arguments.data or "King James Bible",
        "mesh": program.config.mesh,
        "compression": arguments.compression,
        "dtype": program.config.dtype,
        "sequence_length": data.sequence_length,
        "tokens": int(tokens),
        "loss": mean,
        "perplexity": math.exp(mean),
        "bits_per_byte": loss / math.log(2) / text_bytes if text_bytes else None,
    }
    print(
        f"loss {mean:.4f} nats/{tokenizer.item}, perplexity {math.exp(mean):.3f}, {int(tokens):,} {tokenizer.item}s of "
        f"{figures['data']} in windows of {data.sequence_length}; {model.folder} step {model.step}, "
        f"{program.config.mesh}, {arguments.compression}, {program.config.dtype}, {time.perf_counter() - started:.1f} s"
    )
    if arguments.json:
        write_atomically(Path(arguments.json), json.dumps(figures, indent=2) + "\n")


def _fail(error: Exception | str, code: int) -> int:
    print(f"{PROGRAM}: error: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
