"""Token ids cut into windows: batch k is a function of the seed and k alone.

So a resumed run needs only its step, and every mesh and number of processes sees the same tokens.

Shapes: B sequences per batch, S tokens per sequence.
"""

import dataclasses
import gzip
import hashlib
import importlib.resources
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import grain
import numpy as np

from experiments.config import ConfigError, DataConfig, TrainConfig
from experiments.sources import Named, TokenStream, check_is_text, parse_sources, reading_bar
from experiments.token_file import (
    Sidecar,
    open_tokens,
    read_sidecar,
    sidecar_tokenizer,
    smallest_dtype,
    tokens_digest,
)
from experiments.tokenizer import BYTES, Tokenizer, load_tokenizer

Batch = dict[str, np.ndarray]
"""`tokens` int32[B, S], `targets` int32[B, S] (the next token), `mask` f32[B, S] (which targets count)."""


@dataclass(frozen=True)
class Source:
    """The ids of one file, split by position: the last part is for validation.

    Attributes:
        name: what it is called in the log.
        train: ids to learn from, u8, u16 or u32[N].
        validation: ids to measure with.
        weight: share of the sequences that come from here; those of all sources add up to 1.
        digest: SHA-256 of a text read as bytes; of what the ids depend on for everything else.
        bytes_per_token: bytes of text per id, 0 if unknown.
    """

    name: str
    train: np.ndarray
    validation: np.ndarray
    weight: float
    digest: str
    bytes_per_token: float


@dataclass(frozen=True)
class Corpus:
    """What a run reads.

    Attributes:
        sources: one per file.
        tokenizer: of all of them.
    """

    sources: tuple[Source, ...]
    tokenizer: Tokenizer

    @property
    def train(self) -> np.ndarray:
        """Ids of the first source to learn from."""
        return self.sources[0].train

    @property
    def validation(self) -> np.ndarray:
        """Ids of the first source to measure with."""
        return self.sources[0].validation

    @property
    def digest(self) -> str:
        """SHA-256 of the text of a single source read as bytes; of the sources' digests and weights otherwise."""
        if len(self.sources) == 1:
            return self.sources[0].digest
        return _digest([[source.digest, source.weight] for source in self.sources])

    @property
    def unit(self) -> str:
        """Unit of the loss, "nats/byte" or "nats/token"."""
        return f"nats/{self.tokenizer.item}"

    def describe(self) -> str:
        """Return lines for the log: the name of every source, its share and where its split lies."""
        lines = [f"tokenizer {self.tokenizer.name}, {self.tokenizer.vocab_size:,} ids"] * (self.unit != "nats/byte")
        for source in self.sources:
            first, item = len(source.train), f"{self.tokenizer.item}s"
            total = first + len(source.validation)
            share = f" ({source.weight:.1%} of the sequences)" * (len(self.sources) > 1)
            lines.append(
                f"{source.name}{share}: training {item} 0..{first - 1:,}, validation {item} {first:,}..{total - 1:,}"
            )
        return "\n".join(lines)

    def format_loss(self, loss: float) -> str:
        """Return a loss with its unit, and in bits per byte of text where a token's mean length is known."""
        text = f"{loss:.4f} {self.unit}"
        if self.unit == "nats/byte" or not all(source.bytes_per_token for source in self.sources):
            return text
        length = sum(source.weight * source.bytes_per_token for source in self.sources)
        return f"{text} ({loss / math.log(2) / length:.4f} bits/byte at {length:.3f} bytes/token)"


def load_corpus(config: DataConfig) -> Corpus:
    """Open every file that `config.path` names and split each.

    Text and .jsonl files are read, and turned into ids, here; .bin files are mapped into memory.

    Raises:
        ConfigError: if one cannot be read, does not go with the tokenizer, or has a part that is shorter than one
            window of sequence_length + 1 ids.
    """
    named = parse_sources(config.path)
    sidecars = _read_sidecars(named)
    tokenizer = _tokenizer(config, sidecars)
    sources = [_load_source(source, sidecars.get(source.path), config, tokenizer) for source in named]
    weights = [named[i].weight or len(source.train) for i, source in enumerate(sources)]
    total = math.fsum(weights)
    return Corpus(
        tuple(dataclasses.replace(s, weight=w / total) for s, w in zip(sources, weights, strict=True)), tokenizer
    )


def tokenizer_of_data(config: DataConfig) -> Tokenizer:
    """Return the tokenizer of what `load_corpus` would open; no text is read.

    Raises:
        ConfigError: if it cannot be loaded.
    """
    return _tokenizer(config, {} if config.tokenizer else _read_sidecars(parse_sources(config.path)))


def with_model_sizes(config: TrainConfig, corpus: Corpus) -> TrainConfig:
    """Return `config` with the zeros of `config.model` replaced: vocab_size by the tokenizer's, max_positions too.

    Raises:
        ConfigError: if the model's vocabulary is smaller than the tokenizer's.
    """
    needed, chosen = corpus.tokenizer.vocab_size, config.model.vocab_size
    if 0 < chosen < needed:
        raise ConfigError(
            f"model.vocab_size={chosen} is smaller than the {needed} of the tokenizer {corpus.tokenizer.name} "
            f"(usable: {needed} or more, or 0 for the tokenizer's)"
        )
    longest = config.model.max_positions or config.data.sequence_length
    model = dataclasses.replace(config.model, vocab_size=chosen or needed, max_positions=longest)
    return dataclasses.replace(config, model=model)


class TrainingData:
    """Endless shuffled training batches; `data[k]` is batch k.

    Every source is shuffled and repeated by itself, and they take turns: of any first n sequences a source gives its
    weight times n, to within 1 % of it and a few sequences.
    """

    def __init__(self, corpus: Corpus, config: DataConfig, seed: int):
        shuffled = [
            grain.MapDataset.source(_Windows(source.train, config.sequence_length)).seed(own).shuffle().repeat()
            for source, own in zip(corpus.sources, _seeds(seed, len(corpus.sources)), strict=True)
        ]
        # With one source there is nothing to mix, and runs of old have these batches.
        mixed = (
            grain.MapDataset.mix(shuffled, [source.weight for source in corpus.sources])
            if len(shuffled) > 1
            else shuffled[0]
        )
        self._sequences = mixed
        self._batch_size = config.batch_size

    def __getitem__(self, step: int) -> Batch:
        return self.rows(step, 0, self._batch_size)

    def rows(self, step: int, start: int, stop: int) -> Batch:
        """Return rows start to stop - 1 of batch `step`; no others are read."""
        first = step * self._batch_size
        return _as_batch(np.stack([self._sequences[first + row] for row in range(start, stop)]))


def validation_batches(corpus: Corpus, config: DataConfig, count: int) -> list[Batch]:
    """Return up to `count` batches of windows spread evenly over each validation part, always the same ones.

    Sources have as many windows as their weights say, at least one, as far as their validation parts go. The last
    batch is filled up with sequences whose mask is zero.
    """
    chosen = []
    for source, share in zip(corpus.sources, _shares(corpus.sources, count * config.batch_size), strict=True):
        windows = _Windows(source.validation, config.sequence_length)
        places = np.linspace(0, len(windows) - 1, min(len(windows), share)).round().astype(int)
        chosen += [windows[i] for i in places]
    rows = np.stack(chosen)
    batches = []
    for start in range(0, len(rows), config.batch_size):
        part = rows[start : start + config.batch_size]
        batch = _as_batch(np.pad(part, ((0, config.batch_size - len(part)), (0, 0))))
        batch["mask"][len(part) :] = 0
        batches.append(batch)
    return batches


class _Windows:
    """Windows int32[S + 1], one every S ids, so that each id but the first is a target once."""

    def __init__(self, tokens: np.ndarray, sequence_length: int):
        self._tokens = tokens
        self._length = sequence_length

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._length

    def __getitem__(self, index: int) -> np.ndarray:
        start = int(index) * self._length
        return self._tokens[start : start + self._length + 1].astype(np.int32)


def _as_batch(rows: np.ndarray) -> Batch:
    tokens, targets = rows[:, :-1], rows[:, 1:]
    return {"tokens": tokens, "targets": targets, "mask": np.ones(tokens.shape, np.float32)}


def _seeds(seed: int, count: int) -> list[int]:
    """Return a seed for each source, so that sources of the same length are not shuffled alike."""
    if count == 1:
        return [seed]
    return [int(np.random.SeedSequence([seed, i]).generate_state(1)[0]) for i in range(count)]


def _shares(sources: Sequence[Source], total: int) -> list[int]:
    """Return how many of `total` windows each source has: at least one, more by the largest remainders."""
    spare = max(0, total - len(sources))
    exact = [source.weight * spare for source in sources]
    shares = [1 + math.floor(share) for share in exact]
    by_remainder = sorted(range(len(sources)), key=lambda i: math.floor(exact[i]) - exact[i])
    for i in by_remainder[: max(0, total - sum(shares))]:
        shares[i] += 1
    return shares


def _read_sidecars(named: Sequence[Named]) -> dict[str, Sidecar]:
    return {source.path: read_sidecar(Path(source.path)) for source in named if source.path.endswith(".bin")}


def _tokenizer(config: DataConfig, sidecars: Mapping[str, Sidecar]) -> Tokenizer:
    if config.tokenizer or not sidecars:
        return load_tokenizer(config.tokenizer or BYTES)
    path, sidecar = next(iter(sidecars.items()))
    return sidecar_tokenizer(Path(path), sidecar)


def _load_source(named: Named, sidecar: Sidecar | None, config: DataConfig, tokenizer: Tokenizer) -> Source:
    """Return the ids of one file, split; its weight is yet to be set."""
    name = named.path or "King James Bible"
    tokens, digest, text_bytes = _read_ids(named.path, sidecar, config, tokenizer)
    first = len(tokens) - round(len(tokens) * config.validation_fraction)
    window = config.sequence_length + 1
    if min(first, len(tokens) - first) < window:
        raise ConfigError(
            f"{name} is too short: its {len(tokens):,} {tokenizer.item}s split into {first:,} for training and "
            f"{len(tokens) - first:,} for validation, and each needs {window} (data.sequence_length + 1)"
        )
    return Source(name, tokens[:first], tokens[first:], 0.0, digest, text_bytes / len(tokens))


def read_ids(config: DataConfig, tokenizer: Tokenizer) -> tuple[np.ndarray, int]:
    """Return all ids of the one file that `config.path` names, and the bytes of text that they stand for.

    Raises:
        ConfigError: if it cannot be read, does not go with the tokenizer, or there are several.
    """
    named = parse_sources(config.path)
    if len(named) > 1:
        raise ConfigError(f"--data={config.path}: one file at a time")
    path = named[0].path
    sidecar = read_sidecar(Path(path)) if path.endswith(".bin") else None
    ids, _, text_bytes = _read_ids(path, sidecar, config, tokenizer)
    return ids, text_bytes


def _read_ids(
    path: str, sidecar: Sidecar | None, config: DataConfig, tokenizer: Tokenizer
) -> tuple[np.ndarray, str, int]:
    """Return the ids of a file, the digest of what they depend on, and the bytes of its text."""
    if sidecar is None:
        return _read_text(path, config, tokenizer)
    ids = open_tokens(Path(path), sidecar, tokenizer)
    return ids, tokens_digest(Path(path), sidecar), sidecar.text_bytes


def _read_text(path: str, config: DataConfig, tokenizer: Tokenizer) -> tuple[np.ndarray, str, int]:
    """Return the ids of a text or .jsonl file, the digest of what they depend on, and the bytes of its text."""
    check_is_text(path)
    file: BinaryIO
    try:
        if path:
            file, size = open(path, "rb"), Path(path).stat().st_size
        else:
            packaged = importlib.resources.files("taco_jax.data").joinpath("kjv.txt.gz")
            text = gzip.decompress(packaged.read_bytes())
            file, size = io.BytesIO(text), len(text)
        with file, reading_bar(size) as report:
            if tokenizer.name == BYTES and not path.endswith(".jsonl"):
                text = file.read()
                return np.frombuffer(text, np.uint8), hashlib.sha256(text).hexdigest(), len(text)
            stream = TokenStream(file, path, tokenizer, config.text_field, report)
            dtype = smallest_dtype(tokenizer.vocab_size)
            parts = [ids.astype(dtype, copy=False) for ids in stream]
    except OSError as error:
        raise ConfigError(f"cannot read --data={path}: {error.strerror}") from None
    digest = _digest([stream.digest, tokenizer.digest, list(tokenizer.separator)])
    return np.concatenate(parts) if parts else np.empty(0, dtype), digest, stream.text_bytes


def _digest(values: list) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()
