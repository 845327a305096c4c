r"""What `--data` names, and the token ids of a text read piece by piece.

`--data=a.bin:0.7,b.txt:0.3` names two files and their weights. A name of an existing file is taken as it stands;
otherwise a comma or a colon that belongs to a name is written `\,` or `\:`.
"""

import contextlib
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from rich.progress import DownloadColumn

from experiments.config import ConfigError
from experiments.metrics import progress_bar
from experiments.tokenizer import Tokenizer

_PIECE = 1 << 16
_BATCH = 16 * _PIECE
# Pre-tokenizers of GPT-2's and Llama 3's kind cut here anyway, so that pieces have the ids of the whole text.
_CUT = re.compile(r"(?<=[^\W_])\s")
_TAIL = 1 << 12
_NOT_TEXT = (".gz", ".zst", ".xz", ".bz2", ".zip", ".parquet", ".arrow", ".npy", ".npz", ".safetensors")


@dataclass(frozen=True)
class Named:
    """One file of `--data`; without a `weight` it counts in proportion to its size."""

    path: str
    weight: float | None


def parse_sources(text: str) -> list[Named]:
    """Return the files that `--data=text` names; weights are as they were written.

    Raises:
        ConfigError: for an empty name, a weight that is not above 0 and finite, or weights for some files only.
    """
    if not text or os.path.exists(text):  # false for a name that is too long, where Path.exists raises
        return [Named(text, None)]
    sources = [_parse_source(part, text) for part in re.split(r"(?<!\\),", text)]
    unweighted = [source.path for source in sources if source.weight is None]
    if 0 < len(unweighted) < len(sources):
        raise ConfigError(f"--data={text}: give every file a weight or none; {unweighted[0]} has none")
    return sources


def _parse_source(part: str, text: str) -> Named:
    weight = None
    if match := re.fullmatch(r"(.*)(?<!\\):([^:]*)", part, re.DOTALL):
        # What follows a colon and is no number belongs to the name.
        with contextlib.suppress(ValueError):
            weight = float(match[2])
    path = match[1] if match and weight is not None else part
    if not path:
        raise ConfigError(f"--data={text}: a file name is empty; write FILE:WEIGHT,FILE:WEIGHT")
    if weight is not None and not 0 < weight < math.inf:
        raise ConfigError(f"--data={text}: the weight of {path} must be above 0 and finite, got {weight:g}")
    return Named(path.replace(r"\,", ",").replace(r"\:", ":"), weight)


def check_is_text(path: str) -> None:
    """Check by its name that a file can be read as text: everything is bytes, compressed files too.

    Raises:
        ConfigError: for compressed files and arrays.
    """
    if path.endswith(_NOT_TEXT):
        raise ConfigError(f"{path} is not text; give .txt, .jsonl, or a .bin from python -m experiments.prepare")


class TokenStream:
    """The token ids of a text or .jsonl file, in bounded memory; read it once.

    A .jsonl file holds one JSON object a line; the texts in one of their fields are joined by the tokenizer's
    separator. Any other file is one document. Texts are encoded in pieces of 64 KiB that end before white space after
    a letter or digit; where there is none in reach, the ids at the end of a piece may differ from the whole text's.

    Args:
        file: what to read.
        name: the file's name; its ending says what it is.
        tokenizer: of the ids.
        text_field: the field of a .jsonl file's objects.
        report: called with the number of bytes read since the last call.
        hashed: a hash that goes on over several files.

    Attributes:
        text_bytes: bytes of text so far.
        digest: SHA-256 of the file's contents so far.
    """

    def __init__(
        self,
        file: BinaryIO,
        name: str,
        tokenizer: Tokenizer,
        text_field: str,
        report: Callable[[int], None] = lambda read: None,
        hashed: Any = None,
    ):
        self._file, self._name, self._tokenizer, self._field, self._report = file, name, tokenizer, text_field, report
        self._hash = hashed or hashlib.sha256()
        self.text_bytes = 0

    @property
    def digest(self) -> str:
        """SHA-256 of what has been read."""
        return self._hash.hexdigest()

    def __iter__(self) -> Iterator[np.ndarray]:
        texts = self._documents() if self._name.endswith(".jsonl") else self._pieces()
        batch: list[bytes] = []
        starts: list[bool] = []
        size = 0
        for text, starts_document in texts:
            batch.append(text)
            starts.append(starts_document)
            size += len(text)
            if size >= _BATCH or len(batch) >= _BATCH // 256:
                yield self._encode(batch, starts)
                batch, starts, size = [], [], 0
        if batch:
            yield self._encode(batch, starts)

    def _encode(self, texts: Sequence[bytes], starts: Sequence[bool]) -> np.ndarray:
        try:
            encoded = self._tokenizer.encode(texts)
        except UnicodeDecodeError:
            raise self._not_utf8(texts) from None
        separator = np.asarray(self._tokenizer.separator, np.uint32)
        parts = [part for ids, start in zip(encoded, starts, strict=True) for part in ([separator] * start + [ids])]
        self.text_bytes += sum(map(len, texts))
        return np.concatenate(parts)

    def _not_utf8(self, texts: Sequence[bytes]) -> ConfigError:
        offset = self.text_bytes
        for text in texts:
            try:
                text.decode()
            except UnicodeDecodeError as error:
                offset += error.start
                break
            offset += len(text)
        return ConfigError(f"{self._name}: byte {offset:,} is not UTF-8; only the tokenizer bytes takes such a file")

    def _pieces(self) -> Iterator[tuple[bytes, bool]]:
        """Yield a text in pieces."""
        rest = b""
        while len(block := self._file.read(_PIECE)) == _PIECE:
            self._read(block)
            block = rest + block
            end = _end_of_piece(block)
            yield block[:end], False
            rest = block[end:]
        self._read(block)
        if rest or block:
            yield rest + block, False

    def _documents(self) -> Iterator[tuple[bytes, bool]]:
        """Yield the documents of a .jsonl file, and whether a separator stands before them."""
        is_first = True
        for number, line in enumerate(self._file, 1):
            self._read(line)
            if line.strip():
                yield self._read_line(line, number), not is_first
                is_first = False

    def _read(self, data: bytes) -> None:
        self._hash.update(data)
        self._report(len(data))

    def _read_line(self, line: bytes, number: int) -> bytes:
        where = f"{self._name}, line {number}"
        try:
            document = json.loads(line.decode())
        except ValueError as error:
            reason = "is not UTF-8" if isinstance(error, UnicodeDecodeError) else f"is not JSON ({error})"
            raise ConfigError(f"{where} {reason}") from None
        if not isinstance(document, dict):
            raise ConfigError(f"{where} is not a JSON object with the field {self._field!r}")
        if self._field not in document:
            found = ", ".join(document) or "none"
            raise ConfigError(
                f"{where} has no field {self._field!r} (its fields: {found}); --set data.text_field=NAME, or "
                "--text-field of experiments.prepare, chooses one"
            )
        text = document[self._field]
        if not isinstance(text, str):
            raise ConfigError(f"{where}: the field {self._field!r} holds no text but {type(text).__name__}")
        try:
            return text.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"{where}: the field {self._field!r} holds half a surrogate pair, no text") from None


def _end_of_piece(block: bytes) -> int:
    """Return where to cut: before the last white space after a letter or digit, or else between two characters."""
    start = max(0, len(block) - _TAIL)
    tail = block[start:].decode("utf-8", "surrogateescape")  # what is cut off at either end comes back as it was
    cuts = [match.start() for match in _CUT.finditer(tail)]
    if cuts:
        return start + len(tail[: cuts[-1]].encode("utf-8", "surrogateescape"))
    last = next((i for i in range(len(block) - 1, max(len(block) - 5, -1), -1) if block[i] & 0xC0 != 0x80), 0)
    return last if block[last] >= 0xC0 else len(block)


def reading_bar(total: int, doing: str = "tokenizing") -> contextlib.AbstractContextManager[Callable[[int], None]]:
    """Show how much of `total` bytes has been read, on a terminal only; yields what to tell how many more."""
    return progress_bar(doing, total, DownloadColumn())
