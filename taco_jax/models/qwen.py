"""Qwen in Flax NNX, generations 1 to 3: RMSNorm, rotary positions, SwiGLU, grouped query heads.

Shapes: B batch, S sequence, H hidden, N query heads, K key heads, D head, F intermediate.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from taco_jax.models.config import ModelConfig, stored_sizes
from taco_jax.models.decoder import Block, Decoder
from taco_jax.models.layers import Cache, Linear, RMSNorm, attend, key_heads_read, rotate, without_padding


class Attention(nnx.Module):
    """Causal self-attention with rotary positions; query heads are shared among the devices, key heads if they can be.

    Key heads that the number of devices does not divide are held by all of them; each computes those that it reads.
    """

    def __init__(self, config: ModelConfig, *, shards: int, rngs: nnx.Rngs):
        self.config = config
        hidden, heads, kv_heads, size = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        stored, linear = stored_sizes(config, shards), functools.partial(Linear, std=config.kernel_std, rngs=rngs)
        q_shape, kv_shape = (hidden, stored.heads, size), (hidden, 2, stored.kv_heads, size)
        self.q = linear((hidden,), (heads, size), stored=q_shape, bias=config.qkv_bias)
        self.kv = linear((hidden,), (2, kv_heads, size), stored=kv_shape, bias=config.qkv_bias)
        self.q_norm = RMSNorm(size, epsilon=config.norm_epsilon) if config.qk_norm else None
        self.k_norm = RMSNorm(size, epsilon=config.norm_epsilon) if config.qk_norm else None
        self.out = linear((heads, size), (hidden,), stored=(stored.heads, size, hidden), bias=False)

    def __call__(self, x: jax.Array, comm, start: jax.Array | int, cache: Cache | None) -> tuple:
        """Map x[B, S, H] to [B, S, H], and a cache to one with these positions."""
        x = comm.enter(x, "attention")
        q = self.q(x)
        k, v = jnp.moveaxis(self.kv(x, key_heads_read(q.shape[2], self.config, comm)), 2, 0)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (rotate(heads, start, self.config.rope_theta) for heads in (q, k))
        y, cache = attend(q, k, v, start, cache)
        y = self.out.partial(without_padding(y, self.config, comm))
        return comm.leave(y, "attention"), cache

    def num_cached_heads(self, comm) -> int:
        """Return the key heads that this device computes."""
        read = key_heads_read(self.q.kernel.shape[-2], self.config, comm)
        return self.kv.kernel.shape[-2] if read is None else read.size


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, *, shards: int, rngs: nnx.Rngs):
        hidden, size = config.hidden_size, config.intermediate_size
        stored = stored_sizes(config, shards).intermediate
        linear = functools.partial(Linear, bias=False, std=config.kernel_std, rngs=rngs)
        self.gate_up = linear((hidden,), (2, size), stored=(hidden, 2, stored))
        self.down = linear((size,), (hidden,), stored=(stored, hidden))

    def __call__(self, x: jax.Array, comm) -> jax.Array:
        """Map x[B, S, H] to [B, S, H]."""
        gate, up = jnp.moveaxis(self.gate_up(comm.enter(x, "mlp")), 2, 0)
        return comm.leave(self.down.partial(jax.nn.silu(gate) * up), "mlp")


class Qwen(Decoder):
    """Qwen: token table, L pre-norm layers, a final norm and a head."""

    def __init__(self, config: ModelConfig, *, shards: int = 1, dtype: str = "bfloat16", rngs: nnx.Rngs):
        layer = functools.partial(Block, norm=RMSNorm, attention=Attention, mlp=MLP)
        super().__init__(config, layer, RMSNorm, num_positions=0, shards=shards, dtype=dtype, rngs=rngs)
