"""Exchange models with Hugging Face: `python -m experiments.convert IN OUT`.

IN is a folder of Hugging Face's (config.json and safetensors of a GPT-2 or Qwen); OUT then is one that --init-from of
experiments.train reads. Or IN is a run, a checkpoint in one, or such a converted folder; OUT then is Hugging Face's.
A model is never in memory as a whole, but for --check. Exit codes: 0 done, 2 a mistake in the command, files that
cannot be read or written, or a model that is not what it should be, 130 interrupted.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import tyro

from experiments.cli import parse_command_line
from experiments.config import ConfigError
from experiments.exchange import Summary, export_model, import_model, is_huggingface
from experiments.tensor_files import DTYPES, parse_size

PROGRAM = "python -m experiments.convert"
# Parameters of mallopt(3).
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
_NAMES = {dtype.name: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Arguments:
    """Turn a Hugging Face folder into one to train from, or a run into a Hugging Face folder."""

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="IN", help_behavior_hint="")] = ""
    """Hugging Face folder; or a run, one checkpoint in it, or what this command made of a Hugging Face folder."""
    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT", help_behavior_hint="")] = ""
    """Folder to write, which must not exist."""
    dtype: Annotated[str, tyro.conf.arg(metavar="float32|bfloat16|float16", help_behavior_hint="")] = ""
    """Type of the weights of a Hugging Face folder (default: as they came from there, or float32)."""
    step: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: the newest)")] = None
    """Which checkpoint of a run."""
    shard_size: Annotated[str, tyro.conf.arg(metavar="SIZE", help_behavior_hint="")] = ""
    """Largest safetensors file, such as 500MB (default: the files it came in, or 5GB)."""
    check: bool = False
    """Compare the logits of IN and OUT, and those of the package transformers if it is installed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the program's own) and return the exit code."""
    started = time.perf_counter()
    try:
        arguments = parse_command_line(Arguments, PROGRAM, sys.argv[1:] if argv is None else argv)
        # What is computed here is small, and an accelerator's memory may be another program's.
        jax.config.update("jax_platforms", "cpu")
        out = _checked(arguments)
        with _written(out) as folder:
            summary = _convert(arguments, folder)
    except ConfigError as error:
        return _fail(error)
    except OSError as error:
        return _fail(f"cannot read or write {error.filename or arguments.out}: {error.strerror or error}")
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted; nothing was written", file=sys.stderr)
        return 128 + signal.SIGINT
    for note in summary.notes:
        print(note)
    print(f"{out}: {summary.description}, {time.perf_counter() - started:.1f} s")
    return 0


def _checked(arguments: Arguments) -> Path:
    """Return where to write, after the checks that need no reading."""
    if not arguments.source or not arguments.out:
        raise ConfigError("name a folder to read and a folder to write: IN OUT")
    out = Path(arguments.out)
    if os.path.lexists(out):
        raise ConfigError(f"{out} exists; choose another OUT or remove it")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"cannot write {out}: there is no folder {out.parent}")
    if arguments.dtype and arguments.dtype not in _NAMES:
        raise ConfigError(f"--dtype must be one of {', '.join(_NAMES)}, got {arguments.dtype!r}")
    return out


def _convert(arguments: Arguments, folder: Path) -> Summary:
    source = Path(arguments.source)
    shard_bytes = parse_size(arguments.shard_size) if arguments.shard_size else None
    if not is_huggingface(source):
        dtype = _NAMES[arguments.dtype] if arguments.dtype else None
        return export_model(source, folder, arguments.step, dtype, shard_bytes, check=arguments.check)
    for flag, value in (("dtype", arguments.dtype), ("step", arguments.step), ("shard-size", arguments.shard_size)):
        if value not in (None, ""):
            raise ConfigError(f"--{flag} is for writing a Hugging Face folder; {source} is one to read")
    return import_model(source, folder, check=arguments.check)


@contextlib.contextmanager
def _written(out: Path) -> Iterator[Path]:
    """Yield a folder that becomes `out` when the block ends, and vanishes if it raises."""
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".tmp", dir=out.absolute().parent))
    try:
        mask = os.umask(0)
        os.umask(mask)
        folder.chmod(0o777 & ~mask)
        yield folder
        os.rename(folder, out)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError) and str(error.filename or folder).startswith(str(folder)):
            error.filename = str(out)
        raise


def _fail(error: Exception | str) -> int:
    print(f"{PROGRAM}: error: {error}", file=sys.stderr)
    return 2


def _return_freed_memory() -> None:
    """Let glibc return blocks of 1 MiB as soon as they are freed: else each thread of TensorStore's keeps its own."""
    with contextlib.suppress(OSError, AttributeError):
        allocator = ctypes.CDLL(None)
        allocator.mallopt(_M_ARENA_MAX, 1)
        allocator.mallopt(_M_MMAP_THRESHOLD, 2**20)


if __name__ == "__main__":
    _return_freed_memory()
    sys.exit(main())
