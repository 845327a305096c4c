"""Layers shared by the models; each is one device's part, which parts depends on the shapes of its parameters.

`comm` is the communication between the devices that share a layer (`taco_jax.sharding.tensor_parallel`):
`enter(x, site)` stands where a replicated activation meets sharded weights, `leave(y, site)` where partial sums meet.

Shapes: B batch, S sequence, H hidden, N heads here, D head, F intermediate here, V vocabulary here.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float) -> nnx.Param:
    """Return a float32 parameter drawn from N(0, std^2)."""
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32))


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
        y = centred * jax.lax.rsqrt(variance + self.epsilon)
        return (y * self.scale[...] + self.bias[...]).astype(x.dtype)


class Linear(nnx.Module):
    """Contract the last axes of x with the first axes of a kernel; `bias` is added by `__call__` only.

    A row-parallel layer calls `partial`, sums over the devices and then adds the bias once.
    """

    def __init__(self, inputs: tuple[int, ...], outputs: tuple[int, ...], *, std: float, rngs: nnx.Rngs):
        self.kernel = normal(rngs, inputs + outputs, std)
        self.bias = nnx.Param(jnp.zeros(outputs, jnp.float32))
        self.num_contracted = len(inputs)

    def partial(self, x: jax.Array) -> jax.Array:
        """Return x @ kernel without the bias, in the dtype of `x`."""
        k = self.num_contracted
        dimensions = (tuple(range(x.ndim - k, x.ndim)), tuple(range(k)))
        return jax.lax.dot_general(x, self.kernel[...].astype(x.dtype), (dimensions, ((), ())))

    def add_bias(self, y: jax.Array) -> jax.Array:
        """Return y + bias in the dtype of `y`."""
        return y + self.bias[...].astype(y.dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return x @ kernel + bias in the dtype of `x`."""
        return self.add_bias(self.partial(x))


class Embedding(nnx.Module):
    """Table of vectors, of which this device may hold a slice of the rows."""

    def __init__(self, num: int, size: int, *, padded: int | None = None, std: float, rngs: nnx.Rngs):
        table = normal(rngs, (num, size), std)[...]
        self.embedding = nnx.Param(jnp.pad(table, ((0, (padded or num) - num), (0, 0))))

    def lookup(self, ids: jax.Array, first_row: jax.Array | int, dtype: jnp.dtype) -> jax.Array:
        """Return the rows of `ids`, zeros for those outside rows first_row .. first_row + rows here."""
        table = self.embedding[...]
        local = ids - first_row
        here = (local >= 0) & (local < table.shape[0])
        rows = jnp.take(table, jnp.where(here, local, 0), axis=0, mode="clip").astype(dtype)
        return jnp.where(here[..., None], rows, jnp.zeros_like(rows))


def causal_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Return softmax(q k^T / sqrt(D) + causal mask) v, softmax in float32; all [B, S, N, D]."""
    length, size = query.shape[1], query.shape[3]
    scores = jnp.einsum("bqnd,bknd->bnqk", query, key, preferred_element_type=jnp.float32) / math.sqrt(size)
    causal = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bnqk,bknd->bqnd", weights.astype(value.dtype), value)


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
    largest = comm.max(jnp.max(jax.lax.stop_gradient(logits), axis=-1))
    total = comm.sum(jnp.sum(jnp.exp(logits - largest[..., None]), axis=-1))
    picked = comm.sum(jnp.sum(jnp.where(ids == targets[..., None], logits, 0.0), axis=-1))
    return largest + jnp.log(total) - picked
