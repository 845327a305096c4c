"""Shapes of the models: frozen, checked when made."""

import dataclasses
import math
from dataclasses import dataclass

FAMILIES = ("gpt", "qwen")
"""Architectures: GPT-2 and 3; Qwen 1, 2, 2.5 and 3."""


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of a decoder; what a mesh or a number format adds to it stands elsewhere.

    Attributes:
        num_layers: transformer blocks L.
        hidden_size: width H of the residual stream.
        num_heads: query heads N.
        family: `gpt` (LayerNorm, learned positions, GELU, biases) or `qwen` (RMSNorm, rotary positions, SwiGLU).
        num_kv_heads: key and value heads K, each read by N / K query heads; 0 means N. Family gpt has K = N.
        head_dim: width D of a head; 0 means hidden_size / num_heads.
        intermediate_size: width F of the MLP; 0 means 4 * hidden_size.
        vocab_size: token ids V; 0 stands for the tokenizer's until a trainer fills it in.
        max_positions: longest sequence, for gpt the rows of the table of positions; 0 stands for the length that a
            trainer trains on.
        tie_embeddings: the head reads the token table.
        qkv_bias: biases on query, key and value (Qwen 1, 2 and 2.5); always there in family gpt.
        qk_norm: RMSNorm of every query and key head (Qwen 3).
        rope_theta: base of the rotary positions' wavelengths, family qwen.
        norm_epsilon: added to the variance in a norm.
        embedding_std: standard deviation of the initial tables.
        kernel_std: standard deviation of the initial matrices.

    Raises:
        ValueError: for a size that is not positive, heads that do not divide, or a field that the family does not have.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    family: str = "gpt"
    num_kv_heads: int = 0
    head_dim: int = 0
    intermediate_size: int = 0
    vocab_size: int = 0
    max_positions: int = 0
    tie_embeddings: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5
    embedding_std: float = 0.02
    kernel_std: float = 0.02

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {self.family!r}")
        for name in ("num_layers", "hidden_size", "num_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        for name in ("num_kv_heads", "head_dim", "intermediate_size", "vocab_size", "max_positions"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        for name in ("norm_epsilon", "embedding_std", "kernel_std", "rope_theta"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be 0 or more and finite, got {getattr(self, name)}")
        if not self.head_dim and self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is no multiple of num_heads={self.num_heads} (usable num_heads: "
                f"{_listed(divisors(self.hidden_size))}; or give head_dim)"
            )
        if self.num_kv_heads and self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is no multiple of num_kv_heads={self.num_kv_heads} (usable num_kv_heads: "
                f"{_listed(divisors(self.num_heads))})"
            )
        if self.family == "gpt":
            self._check_gpt()
        elif self.resolved_head_dim % 2:
            raise ValueError(f"rotary positions need an even head_dim, got {self.resolved_head_dim}")

    def _check_gpt(self) -> None:
        if self.num_kv_heads not in (0, self.num_heads):
            raise ValueError(f"family gpt has as many key heads as query heads, got num_kv_heads={self.num_kv_heads}")
        default = {field.name: field.default for field in dataclasses.fields(self)}
        for name in ("qkv_bias", "qk_norm", "rope_theta"):
            if getattr(self, name) != default[name]:
                raise ValueError(f"family gpt has no {name}; it has learned positions, and biases everywhere")

    @property
    def resolved_head_dim(self) -> int:
        """Width D of a head."""
        return self.head_dim or self.hidden_size // self.num_heads

    def resolved(self) -> "ModelConfig":
        """Return the same architecture with the sizes written out that 0 stands for.

        Raises:
            ValueError: without a vocabulary or a longest sequence, which nothing here implies.
        """
        for name in ("vocab_size", "max_positions"):
            if not getattr(self, name):
                raise ValueError(f"{name} is not known: a model needs the number")
        return dataclasses.replace(
            self,
            num_kv_heads=self.num_kv_heads or self.num_heads,
            head_dim=self.resolved_head_dim,
            intermediate_size=self.intermediate_size or 4 * self.hidden_size,
        )


@dataclass(frozen=True)
class StoredSizes:
    """Sizes of the arrays that hold a model for `shards` devices per layer, padded with zeros at the end of an axis.

    A padded head, or unit of the MLP, has zero weights on both sides, contributes exactly nothing and stays zero in
    training. Padded ids have logits of minus infinity.

    Attributes:
        heads: query heads.
        kv_heads: key and value heads. Fewer than the devices, or not divisible, they are held by every device.
        intermediate: units of the MLP.
        vocab: rows of the token table.
    """

    heads: int
    kv_heads: int
    intermediate: int
    vocab: int


def stored_sizes(config: ModelConfig, shards: int) -> StoredSizes:
    """Return the sizes of the arrays of a resolved `config`; `shards` = 0 stands for no padding at all.

    The vocabulary is padded to 128 rows too, so that a checkpoint has the same arrays on most meshes.
    """
    if not shards:
        return StoredSizes(config.num_heads, config.num_kv_heads, config.intermediate_size, config.vocab_size)
    heads = _up(config.num_heads, shards)
    return StoredSizes(
        heads=heads,
        kv_heads=heads if config.num_kv_heads == config.num_heads else config.num_kv_heads,
        intermediate=_up(config.intermediate_size, shards),
        vocab=_up(config.vocab_size, math.lcm(128, shards)),
    )


def padding_note(config: ModelConfig, shards: int) -> str:
    """Return what `shards` devices per layer add to the work and memory of a resolved `config`; empty for nothing."""
    stored, notes = stored_sizes(config, shards), []
    if stored.heads > config.num_heads:
        notes.append(f"{config.num_heads} heads padded to {stored.heads}")
    if stored.intermediate > config.intermediate_size:
        notes.append(f"{config.intermediate_size} units of the MLP padded to {stored.intermediate}")
    if stored.kv_heads % shards:
        notes.append(f"{stored.kv_heads} key heads held by every device")
    return f"tp={shards}: {', '.join(notes)}" if notes else ""


def divisors(n: int) -> list[int]:
    """Return the positive divisors of `n`, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def _up(size: int, multiple: int) -> int:
    return math.ceil(size / multiple) * multiple


def _listed(values: list[int]) -> str:
    return ", ".join(map(str, values))
