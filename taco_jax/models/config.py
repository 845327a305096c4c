"""Shapes of the models: frozen, checked when made."""

import math
from dataclasses import dataclass

import jax.numpy as jnp


@dataclass(frozen=True)
class GPTConfig:
    """Architecture of a GPT-2 model.

    Attributes:
        num_layers: transformer blocks L.
        hidden_size: width H of the residual stream.
        num_heads: attention heads N.
        head_dim: width D of a head; 0 means hidden_size / num_heads.
        intermediate_size: width of the MLP; 0 means 4 * hidden_size.
        vocab_size: token ids the tokenizer knows.
        max_positions: longest sequence, rows of the table of positions.
        vocab_multiple: the tables have `padded_vocab_size` rows, the next multiple of this. Padding rows are zero,
            their logits minus infinity. The default suits every mesh whose tp divides it, so that a checkpoint moves
            between meshes.
        tie_embeddings: the head reads the token table.
        norm_epsilon: added to the variance in LayerNorm.
        dtype: compute dtype; parameters are float32.
        embedding_std: standard deviation of the initial tables.
        kernel_std: standard deviation of the initial matrices.

    Raises:
        ValueError: for a size that is not positive, or a hidden size that the heads do not divide.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    vocab_size: int
    max_positions: int
    head_dim: int = 0
    intermediate_size: int = 0
    vocab_multiple: int = 128
    tie_embeddings: bool = True
    norm_epsilon: float = 1e-5
    dtype: str = "bfloat16"
    embedding_std: float = 0.05
    kernel_std: float = 0.04

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_heads", "vocab_size", "max_positions", "vocab_multiple"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if not self.head_dim:
            if self.hidden_size % self.num_heads:
                usable = ", ".join(map(str, divisors(self.hidden_size)))
                raise ValueError(
                    f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}; usable: {usable}"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        if not self.intermediate_size:
            object.__setattr__(self, "intermediate_size", 4 * self.hidden_size)
        if jnp.dtype(self.dtype) not in (jnp.dtype("bfloat16"), jnp.dtype("float16"), jnp.dtype("float32")):
            raise ValueError(f"dtype must be bfloat16, float16 or float32, got {self.dtype!r}")

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the token table, padding included."""
        return math.ceil(self.vocab_size / self.vocab_multiple) * self.vocab_multiple


def divisors(n: int) -> list[int]:
    """Return the positive divisors of `n`, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]
