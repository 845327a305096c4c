"""Text as bytes, cut into windows: batch k is a function of the seed and k alone.

So a resumed run needs only its step, and every mesh and number of processes sees the same tokens.

Shapes: B sequences per batch, S tokens per sequence.
"""

import gzip
import hashlib
import importlib.resources
from dataclasses import dataclass
from pathlib import Path

import grain
import numpy as np

from experiments.config import ConfigError, DataConfig

Batch = dict[str, np.ndarray]
"""`tokens` int32[B, S], `targets` int32[B, S] (the next token), `mask` f32[B, S] (which targets count)."""


@dataclass(frozen=True)
class Corpus:
    """A text as bytes u8[N], split by position: the last part is for validation.

    Attributes:
        name: what it is called in the log.
        train: bytes to learn from.
        validation: bytes to measure with.
        digest: SHA-256 of the whole text.
    """

    name: str
    train: np.ndarray
    validation: np.ndarray
    digest: str

    def describe(self) -> str:
        """Return one line for the log: the name and where the split lies."""
        first = len(self.train)
        total = first + len(self.validation)
        return f"{self.name}: training bytes 0..{first - 1:,}, validation bytes {first:,}..{total - 1:,}"


def load_corpus(config: DataConfig) -> Corpus:
    """Read the text and split it.

    Raises:
        ConfigError: if it cannot be read, or a part is shorter than one window of sequence_length + 1 bytes.
    """
    text, name = _read(config.path)
    first = len(text) - round(len(text) * config.validation_fraction)
    window = config.sequence_length + 1
    if min(first, len(text) - first) < window:
        raise ConfigError(
            f"{name} is too short: its {len(text):,} bytes split into {first:,} for training and {len(text) - first:,} "
            f"for validation, and each needs {window} (data.sequence_length + 1)"
        )
    tokens = np.frombuffer(text, np.uint8)
    return Corpus(name, tokens[:first], tokens[first:], hashlib.sha256(text).hexdigest())


class TrainingData:
    """Endless shuffled training batches; `data[k]` is batch k."""

    def __init__(self, corpus: Corpus, config: DataConfig, seed: int):
        windows = _Windows(corpus.train, config.sequence_length)
        self._batches = grain.MapDataset.source(windows).seed(seed).shuffle().repeat().batch(config.batch_size)

    def __getitem__(self, step: int) -> Batch:
        return _as_batch(self._batches[step])


def validation_batches(corpus: Corpus, config: DataConfig, count: int) -> list[Batch]:
    """Return up to `count` batches of windows spread evenly over the validation text, always the same ones.

    The last batch is filled up with sequences whose mask is zero.
    """
    windows = _Windows(corpus.validation, config.sequence_length)
    chosen = np.linspace(0, len(windows) - 1, min(len(windows), count * config.batch_size)).round().astype(int)
    rows = np.stack([windows[i] for i in chosen])
    batches = []
    for start in range(0, len(rows), config.batch_size):
        part = rows[start : start + config.batch_size]
        batch = _as_batch(np.pad(part, ((0, config.batch_size - len(part)), (0, 0))))
        batch["mask"][len(part) :] = 0
        batches.append(batch)
    return batches


class _Windows:
    """Windows of S + 1 bytes, one every S bytes, so that each byte but the first is a target once."""

    def __init__(self, tokens: np.ndarray, sequence_length: int):
        self._tokens = tokens
        self._length = sequence_length

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._length

    def __getitem__(self, index: int) -> np.ndarray:
        start = int(index) * self._length
        return self._tokens[start : start + self._length + 1]


def _as_batch(rows: np.ndarray) -> Batch:
    rows = rows.astype(np.int32)
    tokens, targets = rows[:, :-1], rows[:, 1:]
    return {"tokens": tokens, "targets": targets, "mask": np.ones(tokens.shape, np.float32)}


def _read(path: str) -> tuple[bytes, str]:
    if not path:
        packaged = importlib.resources.files("taco_jax.data").joinpath("kjv.txt.gz")
        return gzip.decompress(packaged.read_bytes()), "King James Bible"
    try:
        return Path(path).read_bytes(), path
    except OSError as error:
        raise ConfigError(f"cannot read --data={path}: {error.strerror}") from None
