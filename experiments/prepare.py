"""Turn texts into one file of token ids for `--data`: `python -m experiments.prepare IN... --out=x.bin`.

Reads .jsonl and text files piece by piece, in the order given; documents are joined by the tokenizer's end-of-document
token (a line feed for bytes), files too. Writes x.bin and x.bin.json (`experiments.token_file`), the second one last:
as long as it is missing the trainer refuses x.bin. Exit codes: 0 done, 2 a mistake in the command or a file that cannot
be read or written, 130 interrupted.
"""

import contextlib
import fcntl
import hashlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO

import numpy as np
import tyro

from experiments.cli import parse_command_line
from experiments.config import ConfigError
from experiments.sources import TokenStream, check_is_text, reading_bar
from experiments.token_file import (
    Sidecar,
    file_identity,
    sidecar_path,
    smallest_dtype,
    tokenizer_place,
    write_sidecar,
)
from experiments.tokenizer import BYTES, Tokenizer, load_tokenizer

PROGRAM = "python -m experiments.prepare"


@dataclass(frozen=True)
class Arguments:
    """Turn texts into one file of token ids that --data of experiments.train maps into memory."""

    inputs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IN", help_behavior_hint="")] = ()
    """Text files and .jsonl files, joined in this order."""
    out: Annotated[str, tyro.conf.arg(metavar="FILE.bin", help_behavior_hint="")] = ""
    """What to write; FILE.bin.json, which says what the ids mean, goes beside it."""
    tokenizer: Annotated[str, tyro.conf.arg(metavar="PATH")] = BYTES
    """bytes, a tokenizer.json, a folder with one or with vocab.json and merges.txt, or VOCAB,MERGES."""
    text_field: Annotated[str, tyro.conf.arg(metavar="NAME")] = "text"
    """Where the text stands in the objects of a .jsonl file."""
    force: bool = False
    """Replace FILE.bin if it is there."""


@dataclass(frozen=True)
class Summary:
    """What has been written: number of ids, bytes of text, the largest id, and the SHA-256 of the input files."""

    tokens: int
    text_bytes: int
    largest_id: int
    source_sha256: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the program's own) and return the exit code."""
    try:
        arguments = parse_command_line(Arguments, PROGRAM, sys.argv[1:] if argv is None else argv)
        started = time.perf_counter()
        out = _checked_out(arguments)
        tokenizer = load_tokenizer(arguments.tokenizer)
        dtype = smallest_dtype(tokenizer.vocab_size)
        summary = prepare(arguments, out, tokenizer, dtype)
    except ConfigError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted; nothing was written", file=sys.stderr)
        return 128 + signal.SIGINT
    print(
        f"{out}: {summary.tokens:,} tokens of {dtype.name} (tokenizer {tokenizer.name}, {tokenizer.vocab_size:,} ids), "
        f"{summary.text_bytes:,} bytes of text, {summary.text_bytes / summary.tokens:.3f} bytes/token, "
        f"{time.perf_counter() - started:.1f} s"
    )
    return 0


def prepare(arguments: Arguments, out: Path, tokenizer: Tokenizer, dtype: np.dtype) -> Summary:
    """Write the ids of all inputs to `out`, and its sidecar; whatever ends it early, `out` is never half-written.

    Raises:
        ConfigError: if something cannot be read or written, or there is no text; what was there is left as it was.
    """
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        with _locked(temporary, out) as file:
            summary = _write_ids(arguments, tokenizer, dtype, file)
            if not summary.tokens:
                raise ConfigError(f"there is no text in {', '.join(arguments.inputs)}")
            file.flush()
            os.fsync(file.fileno())
            sidecar = Sidecar(
                dtype=dtype.name,
                vocab_size=tokenizer.vocab_size,
                tokenizer=tokenizer_place(tokenizer.name, out),
                tokenizer_sha256=tokenizer.digest,
                tokens=summary.tokens,
                text_bytes=summary.text_bytes,
                source_sha256=summary.source_sha256,
                checked=file_identity(os.fstat(file.fileno())) | {"largest_id": summary.largest_id},
            )
            write_sidecar(out, sidecar, temporary)
    except OSError as error:
        raise ConfigError(f"cannot write --out={out}: {error.strerror}") from None
    return summary


def _checked_out(arguments: Arguments) -> Path:
    """Return where to write, after checking everything that is known before reading."""
    if not arguments.inputs:
        raise ConfigError("name at least one text or .jsonl file to read")
    if not arguments.out.endswith(".bin"):
        raise ConfigError(f"--out must name a file that ends in .bin, got {arguments.out!r}")
    for path in arguments.inputs:
        if path.endswith(".bin"):
            raise ConfigError(f"{path} holds token ids already; --data takes several files")
        check_is_text(path)
        # Not opened: that would end a pipe.
        if reason := _unreadable_reason(path):
            raise ConfigError(f"cannot read {path}: {reason}")
    out = Path(arguments.out)
    existing = [str(path) for path in (out, sidecar_path(out)) if path.exists()]
    if existing and not arguments.force:
        raise ConfigError(f"{existing[0]} exists; --force replaces it")
    return out


def _unreadable_reason(path: str) -> str | None:
    if not os.path.exists(path):
        return "there is no such file"
    if os.path.isdir(path):
        return "it is a folder"
    return None if os.access(path, os.R_OK) else "its permissions forbid it"


@contextlib.contextmanager
def _locked(temporary: Path, out: Path) -> Iterator[BinaryIO]:
    """Yield `temporary`, empty and for this process alone; it is removed if the block raises."""
    # Not truncated before it is locked: another process may be writing it.
    with open(os.open(temporary, os.O_CREAT | os.O_RDWR, 0o644), "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = os.path.samestat(os.fstat(file.fileno()), os.stat(temporary))
        except (BlockingIOError, FileNotFoundError):
            is_ours = False
        if not is_ours:
            raise ConfigError(f"another process is writing {out}")
        try:
            file.truncate()
            yield file
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _write_ids(arguments: Arguments, tokenizer: Tokenizer, dtype: np.dtype, out: BinaryIO) -> Summary:
    tokens, text_bytes, largest = 0, 0, -1
    hashed = hashlib.sha256()
    separator = np.asarray(tokenizer.separator, dtype)
    with reading_bar(sum(os.path.getsize(path) for path in arguments.inputs)) as report:
        for path in arguments.inputs:
            with open(path, "rb") as file:
                stream = TokenStream(file, path, tokenizer, arguments.text_field, report, hashed)
                between = [separator] if tokens else []
                for ids in stream:
                    parts, between = [*between, ids], []
                    for part in parts:
                        out.write(np.ascontiguousarray(part, dtype))
                        tokens += part.size
                        largest = max(largest, int(part.max(initial=0)))
                text_bytes += stream.text_bytes
    return Summary(tokens, text_bytes, largest, hashed.hexdigest())


if __name__ == "__main__":
    sys.exit(main())
