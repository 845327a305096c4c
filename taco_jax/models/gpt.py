"""GPT-2 and GPT-3 in Flax NNX: LayerNorm, learned positions, GELU, biases.

Shapes: B batch, S sequence, H hidden, N heads, D head, F intermediate.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from taco_jax.models.config import ModelConfig, stored_sizes
from taco_jax.models.decoder import Block, Decoder
from taco_jax.models.layers import Cache, LayerNorm, Linear, attend, without_padding


class Attention(nnx.Module):
    """Causal self-attention; heads are shared among the devices."""

    def __init__(self, config: ModelConfig, *, shards: int, rngs: nnx.Rngs):
        self.config = config
        hidden, heads, size = config.hidden_size, config.num_heads, config.head_dim
        stored, std = stored_sizes(config, shards).heads, config.kernel_std
        self.qkv = Linear((hidden,), (3, heads, size), stored=(hidden, 3, stored, size), std=std, rngs=rngs)
        self.out = Linear((heads, size), (hidden,), stored=(stored, size, hidden), std=std, rngs=rngs)

    def __call__(self, x: jax.Array, comm, start: jax.Array | int, cache: Cache | None) -> tuple:
        """Map x[B, S, H] to [B, S, H], and a cache to one with these positions."""
        q, k, v = jnp.moveaxis(self.qkv(comm.enter(x, "attention")), 2, 0)
        y, cache = attend(q, k, v, start, cache)
        y = self.out.partial(without_padding(y, self.config, comm))
        return self.out.add_bias(comm.leave(y, "attention")), cache

    def num_cached_heads(self, comm) -> int:
        """Return the key heads of this device."""
        return self.qkv.kernel.shape[-2]


class MLP(nnx.Module):
    """Two matrices with a tanh-approximated GELU between them."""

    def __init__(self, config: ModelConfig, *, shards: int, rngs: nnx.Rngs):
        hidden, size, std = config.hidden_size, config.intermediate_size, config.kernel_std
        stored = stored_sizes(config, shards).intermediate
        self.up = Linear((hidden,), (size,), stored=(hidden, stored), std=std, rngs=rngs)
        self.down = Linear((size,), (hidden,), stored=(stored, hidden), std=std, rngs=rngs)

    def __call__(self, x: jax.Array, comm) -> jax.Array:
        """Map x[B, S, H] to [B, S, H]."""
        y = self.down.partial(jax.nn.gelu(self.up(comm.enter(x, "mlp")), approximate=True))
        return self.down.add_bias(comm.leave(y, "mlp"))


class GPT(Decoder):
    """GPT-2: token and position tables, L pre-norm layers, a final norm and a head."""

    def __init__(self, config: ModelConfig, *, shards: int = 1, dtype: str = "bfloat16", rngs: nnx.Rngs):
        rows = config.max_positions
        layer = functools.partial(Block, norm=LayerNorm, attention=Attention, mlp=MLP)
        super().__init__(config, layer, LayerNorm, num_positions=rows, shards=shards, dtype=dtype, rngs=rngs)
