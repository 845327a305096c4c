"""What each collective puts on the wire: `send` makes the gathered payload, `receive` decodes it, on bare arrays.

No differentiation here: `taco_jax.collectives` joins the two halves. A payload is a tuple of arrays, one per chunk;
with codec None it is the exact result itself. Stats are f32[2, 5], one observation per hop.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from taco_jax import codec as codecs
from taco_jax import compat
from taco_jax.config import Codec
from taco_jax.layout import Layout, layout_for
from taco_jax.scales import ALPHA, COUNT, HOPS, SLOTS

Payload = tuple[jax.Array, ...]


@dataclass(frozen=True)
class Operation:
    """One collective on one shape; hashable, so that it can be a static argument."""

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any
    codec: Codec | None
    chunks: int = 1
    implementation: str | None = None
    split_dim: int | None = None
    axis: int = 0
    concat_axis: int = 0
    tiled: bool = False
    invariant: bool = False
    perm: tuple[tuple[int, int], ...] = ()

    @property
    def ranks(self) -> int:
        """Number of devices in the group."""
        return lax.axis_size(self.axes)

    def send(self, x: jax.Array, state: jax.Array, observe: bool) -> tuple[Payload, jax.Array]:
        """Return the payload this rank ends up with, and the observation; `state` is f32[2, 5] (hop, slot)."""
        raise NotImplementedError

    def receive(self, payload: Payload, state: jax.Array) -> jax.Array:
        """Return the decoded result."""
        raise NotImplementedError

    def run(self, x: jax.Array, state: jax.Array, observe: bool) -> tuple[jax.Array, jax.Array]:
        """Return result and observation at once, where nothing is kept."""
        payload, seen = self.send(x, state, observe)
        return self.receive(payload, state), seen

    def _encode(self, x: jax.Array, state: jax.Array, observe: bool):
        return codecs.encode(x, self.codec, state[0, ALPHA], observe=observe, implementation=self.implementation)

    def _decode(self, message: jax.Array, alpha: jax.Array) -> jax.Array:
        return codecs.decode(message, self.codec, alpha, self.dtype, implementation=self.implementation)

    def _stats(self, first: list, second: list, x: jax.Array) -> jax.Array:
        """Add the chunks' observations and fill in the counts."""
        rows = [_total(first, math.prod(self.shape)), _total(second, math.prod(self.shape) / self.ranks)]
        return jnp.stack([compat.vary(row, compat.varying_axes(x)) for row in rows])


class AllReduce(Operation):
    """Two hops: encode, all-to-all, reduce, all-gather, decode; every rank decodes the same bytes."""

    @property
    def layout(self) -> Layout:
        """Rows of the local tensor, one per rank."""
        return layout_for(self.shape, self.ranks, self.codec, self.split_dim)

    def send(self, x, state, observe):
        if self.codec is None:
            return (lax.psum(x, self.axes),), _no_stats(x)
        rows = self.layout.cut(x)
        payload, first, second = [], [], []
        for piece in self.layout.pieces(self.chunks):
            message, seen = self._encode(rows[..., piece], state, observe)
            message = lax.all_to_all(message, self.axes, 0, 0, tiled=True)
            message, seen_sum = codecs.reduce(
                message, self.codec, state[:, ALPHA], x.dtype, observe=observe, implementation=self.implementation
            )
            payload.append(lax.all_gather(message, self.axes, to="invarying"))
            first.append(seen)
            second.append(seen_sum)
        return tuple(payload), self._stats(first, second, x)

    def receive(self, payload, state):
        if self.codec is None:
            return payload[0]
        return self.layout.join(_concatenate([self._decode(p, state[1, ALPHA]) for p in payload]))


class ReduceScatter(Operation):
    """One hop: encode, all-to-all, decode and sum; rank r keeps part r of `axis`."""

    @property
    def layout(self) -> Layout:
        """Parts of the local tensor along `axis`, each flattened into one row."""
        part = math.prod(self.shape) // self.ranks
        return layout_for((self.ranks, part), self.ranks, self.codec, 0)

    def send(self, x, state, observe):
        if self.codec is None:
            result = lax.psum_scatter(x, self.axes, scatter_dimension=self.axis, tiled=self.tiled)
            return (result,), _no_stats(x)
        rows = self.layout.cut(_parts_first(x, self.axis, self.ranks).reshape(self.ranks, -1))
        payload, first = [], []
        for piece in self.layout.pieces(self.chunks):
            message, seen = self._encode(rows[..., piece], state, observe)
            payload.append(lax.all_to_all(message, self.axes, 0, 0, tiled=True))
            first.append(seen)
        return tuple(payload), self._stats(first, [], x)

    def receive(self, payload, state):
        if self.codec is None:
            return payload[0]
        alpha = state[0, ALPHA]
        sums = [
            codecs.decode_sum(p, self.codec, alpha, self.dtype, implementation=self.implementation) for p in payload
        ]
        d = self.axis
        part = (*self.shape[:d], self.shape[d] // self.ranks, *self.shape[d + 1 :])
        result = _concatenate(sums).reshape(-1)[: math.prod(part)].reshape(part)
        return result if self.tiled else jnp.squeeze(result, d)

    def transposed(self, codec: Codec | None) -> "AllGather":
        """Return the operation on cotangents."""
        d = self.axis
        inner = (self.shape[d] // self.ranks,) if self.tiled else ()
        shape = (*self.shape[:d], *inner, *self.shape[d + 1 :])
        return AllGather(**{**vars(self), "shape": shape, "codec": codec})


class AllGather(Operation):
    """One hop: encode, all-gather, decode; the local tensors are joined along `axis`."""

    @property
    def layout(self) -> Layout:
        """The whole local tensor as one row."""
        return layout_for(self.shape, 1, self.codec)

    def send(self, x, state, observe):
        to = "invarying" if self.invariant else "varying"
        if self.codec is None:
            gathered = lax.all_gather(_to_bits(x), self.axes, axis=self.axis, tiled=self.tiled, to=to)
            return (_from_bits(gathered, self.dtype),), _no_stats(x)
        row = self.layout.cut(x)[0]
        payload, first = [], []
        for piece in self.layout.pieces(self.chunks):
            message, seen = self._encode(row[piece], state, observe)
            payload.append(lax.all_gather(message, self.axes, to=to))
            first.append(seen)
        return tuple(payload), self._stats(first, [], x)

    def receive(self, payload, state):
        if self.codec is None:
            return payload[0]
        rows = _concatenate([self._decode(p, state[0, ALPHA]) for p in payload])
        parts = rows[:, : math.prod(self.shape)].reshape(self.ranks, *self.shape)
        if not self.tiled:
            return jnp.moveaxis(parts, 0, self.axis)
        d = self.axis
        moved = jnp.moveaxis(parts, 0, d)
        return moved.reshape(*self.shape[:d], self.ranks * self.shape[d], *self.shape[d + 1 :])

    def transposed(self, codec: Codec | None) -> ReduceScatter:
        """Return the operation on cotangents of a varying result."""
        d = self.axis
        outer = (self.ranks * self.shape[d], *self.shape[d + 1 :]) if self.tiled else (self.ranks, *self.shape[d:])
        return ReduceScatter(**{**vars(self), "shape": (*self.shape[:d], *outer), "codec": codec})


class AllToAll(Operation):
    """One hop: encode one message per destination, all-to-all, decode."""

    @property
    def layout(self) -> Layout:
        """One row per destination."""
        return layout_for((self.ranks, math.prod(self.shape) // self.ranks), self.ranks, self.codec, 0)

    def send(self, x, state, observe):
        if self.codec is None:
            moved = lax.all_to_all(_to_bits(x), self.axes, self.axis, self.concat_axis, tiled=self.tiled)
            return (_from_bits(moved, self.dtype),), _no_stats(x)
        rows = self.layout.cut(_parts_first(x, self.axis, self.ranks).reshape(self.ranks, -1))
        payload, first = [], []
        for piece in self.layout.pieces(self.chunks):
            message, seen = self._encode(rows[..., piece], state, observe)
            payload.append(lax.all_to_all(message, self.axes, 0, 0, tiled=True))
            first.append(seen)
        return tuple(payload), self._stats(first, [], x)

    def receive(self, payload, state):
        if self.codec is None:
            return payload[0]
        rows = _concatenate([self._decode(p, state[0, ALPHA]) for p in payload])
        d = self.axis
        part = (*self.shape[:d], self.shape[d] // self.ranks, *self.shape[d + 1 :])
        parts = rows[:, : math.prod(part)].reshape(self.ranks, *part)
        if not self.tiled:
            return jnp.moveaxis(jnp.squeeze(parts, d + 1), 0, self.concat_axis)
        moved = jnp.moveaxis(parts, 0, self.concat_axis)
        c = self.concat_axis
        return moved.reshape(*part[:c], self.ranks * part[c], *part[c + 1 :])

    def transposed(self, codec: Codec | None) -> "AllToAll":
        """Return the operation on cotangents: source and destination axes swap."""
        result = jax.eval_shape(
            lambda x: _all_to_all_shape(x, self.ranks, self.axis, self.concat_axis, self.tiled),
            jax.ShapeDtypeStruct(self.shape, self.dtype),
        )
        return replace(self, shape=result.shape, codec=codec, axis=self.concat_axis, concat_axis=self.axis)


class Permute(Operation):
    """One hop: encode, collective permute, decode; ranks that receive nothing get zeros."""

    @property
    def layout(self) -> Layout:
        """The whole local tensor as one row."""
        return layout_for(self.shape, 1, self.codec)

    def send(self, x, state, observe):
        if self.codec is None:
            return (_from_bits(lax.ppermute(_to_bits(x), self.axes, self.perm), self.dtype),), _no_stats(x)
        row = self.layout.cut(x)[0]
        payload, first = [], []
        for piece in self.layout.pieces(self.chunks):
            message, seen = self._encode(row[piece], state, observe)
            payload.append(lax.ppermute(message, self.axes, self.perm))
            first.append(seen)
        return tuple(payload), self._stats(first, [], x)

    def receive(self, payload, state):
        if self.codec is None:
            return payload[0]
        row = _concatenate([self._decode(p, state[0, ALPHA]) for p in payload])
        return self.layout.join(row[None])

    def transposed(self, codec: Codec | None) -> "Permute":
        """Return the operation on cotangents: the inverse permutation."""
        return replace(self, codec=codec, perm=tuple((b, a) for a, b in self.perm))


def _parts_first(x: jax.Array, axis: int, ranks: int) -> jax.Array:
    shape = (*x.shape[:axis], ranks, x.shape[axis] // ranks, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def _all_to_all_shape(x, ranks: int, split_axis: int, concat_axis: int, tiled: bool) -> jax.Array:
    if not tiled:
        return jnp.moveaxis(x, split_axis, concat_axis)
    part = _parts_first(x, split_axis, ranks)[0]
    return jnp.concatenate([part] * ranks, axis=concat_axis)


def _concatenate(parts: list[jax.Array]) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


def _total(seen: list, count: float) -> jax.Array:
    if not seen or seen[0] is None:
        return jnp.zeros(SLOTS, jnp.float32)
    total = seen[0]
    for other in seen[1:]:
        total = total + other
    return total.at[COUNT].set(count)


def _no_stats(x: jax.Array) -> jax.Array:
    return compat.vary(jnp.zeros((HOPS, SLOTS), jnp.float32), compat.varying_axes(x))


def _to_bits(x: jax.Array) -> jax.Array:
    # XLA:CPU moves 16-bit floats as 32-bit ones.
    return lax.bitcast_convert_type(x, jnp.uint16) if _is_half(x.dtype) else x


def _from_bits(x: jax.Array, dtype) -> jax.Array:
    return lax.bitcast_convert_type(x, dtype) if _is_half(dtype) else x


def _is_half(dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 2
