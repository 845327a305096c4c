"""Layers shared by the models; each is one device's part, which parts depends on the shapes of its parameters.

`comm` is the communication between the devices that share a layer (`taco_jax.sharding.tensor_parallel`):
`enter(x, site)` stands where a replicated activation meets sharded weights, `leave(y, site)` where partial sums meet.

Shapes: B batch, S sequence, T positions in the cache, H hidden, N query heads here, K key heads here, D head,
F intermediate here, V vocabulary here.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from taco_jax.models.config import ModelConfig

Cache = tuple[jax.Array, jax.Array]
"""Keys and values [B, T, K, D] of the positions seen so far, and room for more."""


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float, *, stored: tuple[int, ...] | None = None) -> nnx.Param:
    """Return a float32 parameter drawn from N(0, std^2), padded with zeros at the ends to `stored`."""
    return nnx.Param(padded(std * jax.random.normal(rngs.params(), shape, jnp.float32), stored or shape))


def padded(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return `x` with zeros at the end of every axis that is shorter than in `shape`."""
    return jnp.pad(x, [(0, size - have) for size, have in zip(shape, x.shape, strict=True)])


class LayerNorm(nnx.Module):
    """Normalise the last axis with statistics in float32: (x - mean) / sqrt(var + eps) * scale + bias."""

    def __init__(self, size: int, *, epsilon: float):
        self.scale = nnx.Param(jnp.ones((size,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((size,), jnp.float32))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return x[..., H] normalised, in the dtype of `x`."""
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        y = centred * lax.rsqrt(variance + self.epsilon)
        return (y * self.scale[...] + self.bias[...]).astype(x.dtype)


class RMSNorm(nnx.Module):
    """Normalise the last axis with statistics in float32: x / sqrt(mean(x^2) + eps) * scale."""

    def __init__(self, size: int, *, epsilon: float):
        self.scale = nnx.Param(jnp.ones((size,), jnp.float32))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return x[..., H] normalised, in the dtype of `x`."""
        wide = x.astype(jnp.float32)
        y = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.epsilon)
        return (y * self.scale[...]).astype(x.dtype)


class Linear(nnx.Module):
    """Contract the last axes of x with the first axes of a kernel; `bias` is added by `__call__` only.

    A row-parallel layer calls `partial`, sums over the devices and then adds the bias once.

    Args:
        inputs: sizes of the contracted axes.
        outputs: sizes of the others.
        stored: sizes of the kernel's array, which zeros fill up; None means inputs + outputs.
        bias: whether there is one.
        std: standard deviation of the initial kernel.
        rngs: source of its randomness.
    """

    def __init__(
        self,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        *,
        stored: tuple[int, ...] | None = None,
        bias: bool = True,
        std: float,
        rngs: nnx.Rngs,
    ):
        self.kernel = normal(rngs, inputs + outputs, std, stored=stored)
        self.num_contracted = len(inputs)
        self.bias = nnx.Param(jnp.zeros(self.kernel.shape[self.num_contracted :], jnp.float32)) if bias else None

    def partial(self, x: jax.Array) -> jax.Array:
        """Return x @ kernel without the bias, in the dtype of `x`."""
        return self._product(x, self.kernel[...])

    def add_bias(self, y: jax.Array) -> jax.Array:
        """Return y + bias in the dtype of `y`."""
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)

    def __call__(self, x: jax.Array, heads: jax.Array | None = None) -> jax.Array:
        """Return x @ kernel + bias in the dtype of `x`, of an output [..., heads, D] only the `heads`."""
        if heads is None:
            return self.add_bias(self.partial(x))
        y = self._product(x, jnp.take(self.kernel[...], heads, axis=-2, mode="clip"))
        return y if self.bias is None else y + jnp.take(self.bias[...], heads, axis=-2, mode="clip").astype(y.dtype)

    def _product(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        k = self.num_contracted
        dimensions = (tuple(range(x.ndim - k, x.ndim)), tuple(range(k)))
        return lax.dot_general(x, kernel.astype(x.dtype), (dimensions, ((), ())))


class Embedding(nnx.Module):
    """Table of vectors, of which this device may hold a slice of the rows."""

    def __init__(self, num: int, size: int, *, stored: int | None = None, std: float, rngs: nnx.Rngs):
        self.embedding = normal(rngs, (num, size), std, stored=(stored or num, size))

    def lookup(self, ids: jax.Array, first_row: jax.Array | int, dtype: jnp.dtype) -> jax.Array:
        """Return the rows of `ids`, zeros for those outside rows first_row .. first_row + rows here."""
        table = self.embedding[...]
        local = ids - first_row
        here = (local >= 0) & (local < table.shape[0])
        rows = jnp.take(table, jnp.where(here, local, 0), axis=0, mode="clip").astype(dtype)
        return jnp.where(here[..., None], rows, jnp.zeros_like(rows))


def rotate(x: jax.Array, start: jax.Array | int, theta: float) -> jax.Array:
    """Return x[B, S, N, D] with rotary positions start .. start + S, computed in float32.

    The pair (x_i, x_{i + D/2}) of position p turns by the angle p * theta^(-2 i / D).
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = (start + jnp.arange(x.shape[1], dtype=jnp.int32)).astype(jnp.float32)[:, None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, start: jax.Array | int, cache: Cache | None
) -> tuple[jax.Array, Cache | None]:
    """Return what the queries read of their own and of the cached positions, and the cache with theirs added.

    Args:
        query: [B, S, N, D], of the positions start .. start + S.
        key: [B, S, K, D] of the same positions.
        value: as `key`.
        start: position of the first.
        cache: keys and values up to `start`; None if there are no positions before.
    """
    if cache is None:
        return causal_attention(query, key, value), None
    key, value = (
        lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), start, axis=1)
        for old, new in zip(cache, (key, value), strict=True)
    )
    return causal_attention(query, key, value, start), (key, value)


def causal_attention(query: jax.Array, key: jax.Array, value: jax.Array, start: jax.Array | int = 0) -> jax.Array:
    """Return softmax(q k^T / sqrt(D) + causal mask) v, softmax in float32.

    Args:
        query: [B, S, N, D], of the positions start .. start + S.
        key: [B, T, K, D], of the positions 0 .. T; query head n reads head n // (N / K).
        value: as `key`.
        start: position of the first query.

    Returns:
        [B, S, N, D] in the dtype of `value`.
    """
    batch, length, heads, size = query.shape
    grouped = query.reshape(batch, length, key.shape[2], -1, size)
    scores = jnp.einsum("bqkgd,btkd->bkgqt", grouped, key, preferred_element_type=jnp.float32) / math.sqrt(size)
    seen = (start + jnp.arange(length))[:, None] >= jnp.arange(key.shape[1])
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    y = jnp.einsum("bkgqt,btkd->bqkgd", weights.astype(value.dtype), value)
    return y.reshape(batch, length, heads, size)


def key_heads_read(num_heads_here: int, config: ModelConfig, comm) -> jax.Array | None:
    """Return which of the key heads, all held here, this device's query heads read; None if it holds just those.

    One head if all of its query heads read the same, otherwise one per query head.
    """
    size, heads, kv_heads = comm.size, config.num_heads, config.num_kv_heads
    if heads == kv_heads or kv_heads % size == 0:
        return None
    group, first = heads // kv_heads, comm.index() * num_heads_here
    if heads % size == 0 and group % num_heads_here == 0:
        return (first // group)[None]
    return jnp.minimum((first + jnp.arange(num_heads_here)) // group, kv_heads - 1)


def without_padding(y: jax.Array, config: ModelConfig, comm) -> jax.Array:
    """Return y[B, S, N, D] with zeros for padded heads, whose weights then get no gradient."""
    here = y.shape[2]
    if here * comm.size == config.num_heads:
        return y
    real = comm.index() * here + jnp.arange(here) < config.num_heads
    return jnp.where(real[:, None], y, jnp.zeros_like(y))


def cross_entropy(logits: jax.Array, targets: jax.Array, vocab_size: int, comm) -> jax.Array:
    """Return -log softmax(logits)[target] per token, over a vocabulary that the devices share.

    loss = m + log sum_v exp(l_v - m) - l_target, m = max_v l_v; the three reductions are exact scalars per token.

    Args:
        logits: f32[..., V], this device's columns of the vocabulary.
        targets: int32[...], ids in the whole vocabulary.
        vocab_size: ids from here on are padding and count for nothing.
        comm: sums and maxima over the devices that share the vocabulary.

    Returns:
        f32[...], the same on all those devices.
    """
    ids = comm.index() * logits.shape[-1] + jnp.arange(logits.shape[-1])
    logits = jnp.where(ids < vocab_size, logits, -jnp.inf)
    largest = comm.max(jnp.max(lax.stop_gradient(logits), axis=-1))
    total = comm.sum(jnp.sum(jnp.exp(logits - largest[..., None]), axis=-1))
    picked = comm.sum(jnp.sum(jnp.where(ids == targets[..., None], logits, 0.0), axis=-1))
    return largest + jnp.log(total) - picked
