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
Keys = tuple[jax.Array | None, jax.Array | None]


@dataclass(frozen=True)
class Operation:
    """One collective on one shape; hashable, so that it can be a static argument.

    A subclass says how its tensor lies in rows (`layout`, `_rows`), how a message travels (`_exchange`) and how the
    decoded rows make the result (`_join`).
    """

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

    @property
    def layout(self) -> Layout:
        """How the local tensor is cut into rows of whole blocks."""
        raise NotImplementedError

    @property
    def channels(self) -> int:
        """Distance of a block's neighbours in a row."""
        return self._options[0].channels(self.shape)

    def send(
        self, x: jax.Array, state: jax.Array, observe: bool, key: jax.Array | None = None
    ) -> tuple[Payload, jax.Array]:
        """Return the payload this rank ends up with, and the observation.

        `state` is f32[2, 5] (hop, slot); a key of stochastic rounding is the same on all ranks.
        """
        if self.codec is None:
            zeros = jnp.zeros((HOPS, SLOTS), jnp.float32)
            return (self._exact(x),), compat.vary(zeros, compat.varying_axes(x))
        rows = self._rows(x)
        places = self.layout.pieces(self.chunks)
        keys = self._keys(key, len(places), x)
        pieces = [self._send(rows[..., place], state, observe, k) for place, k in zip(places, keys, strict=True)]
        payload, first, second = zip(*pieces, strict=True)
        counts = (math.prod(self.shape), math.prod(self.shape) / self.ranks)
        seen = [_total(hop, count) for hop, count in zip((first, second), counts, strict=True)]
        return payload, jnp.stack([compat.vary(hop, compat.varying_axes(x)) for hop in seen])

    def receive(self, payload: Payload, state: jax.Array, residual: jax.Array | None = None) -> jax.Array:
        """Return the decoded result, plus a residual of its shape and type (offered by `AllReduce`)."""
        if self.codec is None:
            return payload[0] if residual is None else payload[0] + residual
        more: list[jax.Array | None] = [None] * len(payload)
        if residual is not None:
            rows = self._rows(residual)
            more = [rows[..., piece] for piece in self.layout.pieces(self.chunks)]
        decoded = [self._decode(p, state, r) for p, r in zip(payload, more, strict=True)]
        return self._join(jnp.concatenate(decoded, axis=-1))

    def run(
        self, x: jax.Array, state: jax.Array, observe: bool, key: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Return result and observation at once, where nothing is kept."""
        payload, seen = self.send(x, state, observe, key)
        return self.receive(payload, state), seen

    def own_part(self, ct: jax.Array) -> jax.Array:
        """Return what of an invariant result's cotangent belongs to this rank's input, without communication."""
        return ct

    @property
    def _options(self) -> tuple[Codec, dict[str, str | None]]:
        assert self.codec is not None
        return self.codec, {"implementation": self.implementation}

    def _keys(self, key: jax.Array | None, chunks: int, x: jax.Array) -> list[Keys]:
        """Return the keys of each chunk's hops, this rank's own."""
        if key is None or self._options[0].rounding == "nearest":
            return [(None, None)] * chunks
        own = jax.random.fold_in(compat.vary(key, compat.varying_axes(x)), lax.axis_index(self.axes))
        hops = jax.random.split(own, (chunks, HOPS))
        return [(hop[0], hop[1]) for hop in hops]

    def _exact(self, x: jax.Array) -> jax.Array:
        raise NotImplementedError

    def _rows(self, x: jax.Array) -> jax.Array:
        raise NotImplementedError

    def _exchange(self, message: jax.Array) -> jax.Array:
        """Send one row to each rank."""
        return lax.all_to_all(message, self.axes, 0, 0, tiled=True)

    def _join(self, rows: jax.Array) -> jax.Array:
        raise NotImplementedError

    def _send(self, rows: jax.Array, state: jax.Array, observe: bool, keys: Keys):
        """Return (payload, observation of hop 1, of hop 2) of one chunk."""
        codec, options = self._options
        message, seen = codecs.encode(
            rows, codec, state[0, ALPHA], observe=observe, channels=self.channels, key=keys[0], **options
        )
        return self._exchange(message), seen, None

    def _decode(self, message: jax.Array, state: jax.Array, residual: jax.Array | None) -> jax.Array:
        codec, options = self._options
        return codecs.decode(
            message, codec, state[0, ALPHA], self.dtype, channels=self.channels, residual=residual, **options
        )

    def _changed(self, kind: type, **changes) -> Any:
        return kind(**{**vars(self), **changes})


class AllReduce(Operation):
    """Two hops: encode, all-to-all, reduce, all-gather, decode; every rank decodes the same bytes."""

    @property
    def layout(self) -> Layout:
        """One row per rank."""
        if self.channels > 1 and self.split_dim is not None:
            raise ValueError(f'layout="tokens" flattens the tokens: leave split_dim={self.split_dim} out')
        return layout_for(self.shape, self.ranks, self._options[0], self.split_dim, self.channels)

    def _exact(self, x):
        return lax.psum(x, self.axes)

    def _rows(self, x):
        return self.layout.cut(x)

    def _send(self, rows, state, observe, keys):
        codec, options = self._options
        message, seen, _ = super()._send(rows, state, observe, keys)
        message, seen_sum = codecs.reduce(
            message, codec, state[:, ALPHA], rows.dtype, observe=observe, key=keys[1], **options
        )
        return lax.all_gather(message, self.axes, to="invarying"), seen, seen_sum

    def _decode(self, message, state, residual):
        return super()._decode(message, state[1:], residual)

    def _join(self, rows):
        return self.layout.join(rows)


class _PerRank(Operation):
    """What the operations share that cut `axis` into one part per rank and send each part as one flat row."""

    @property
    def layout(self) -> Layout:
        """One row per rank."""
        flat = self.ranks, math.prod(self.shape) // self.ranks
        return layout_for(flat, self.ranks, self._options[0], 0, self.channels)

    @property
    def channels(self) -> int:
        """Distance of a block's neighbours in a part."""
        return self._options[0].channels(self.part)

    @property
    def part(self) -> tuple[int, ...]:
        """Shape of one part, with the split axis kept."""
        return (*self.shape[: self.axis], self.shape[self.axis] // self.ranks, *self.shape[self.axis + 1 :])

    def _rows(self, x):
        return self.layout.cut(_parts_first(x, self.axis, self.ranks).reshape(self.ranks, -1))


class ReduceScatter(_PerRank):
    """One hop: encode, all-to-all, decode and sum; rank r keeps part r of `axis`."""

    def _exact(self, x):
        return lax.psum_scatter(x, self.axes, scatter_dimension=self.axis, tiled=self.tiled)

    def _decode(self, message, state, residual):
        codec, options = self._options
        return codecs.decode_sum(message, codec, state[0, ALPHA], self.dtype, channels=self.channels, **options)

    def _join(self, rows):
        result = rows.reshape(-1)[: math.prod(self.part)].reshape(self.part)
        return result if self.tiled else jnp.squeeze(result, self.axis)

    def transposed(self, codec: Codec | None) -> "AllGather":
        """Return the operation on cotangents."""
        shape = self.part if self.tiled else (*self.shape[: self.axis], *self.shape[self.axis + 1 :])
        return self._changed(AllGather, shape=shape, codec=codec)


class AllToAll(_PerRank):
    """One hop: encode one message per destination, all-to-all, decode."""

    def _exact(self, x):
        moved = lax.all_to_all(_to_bits(x), self.axes, self.axis, self.concat_axis, tiled=self.tiled)
        return _from_bits(moved, self.dtype)

    def _join(self, rows):
        parts = rows[..., : math.prod(self.part)].reshape(self.ranks, *self.part)
        c = self.concat_axis
        if not self.tiled:
            return jnp.moveaxis(jnp.squeeze(parts, self.axis + 1), 0, c)
        shape = (*self.part[:c], self.ranks * self.part[c], *self.part[c + 1 :])
        return jnp.moveaxis(parts, 0, c).reshape(shape)

    def transposed(self, codec: Codec | None) -> "AllToAll":
        """Return the operation on cotangents: source and destination axes swap."""
        shape = list(self.part if self.tiled else self.shape)
        if self.tiled:
            shape[self.concat_axis] *= self.ranks
        else:
            shape.insert(self.concat_axis, shape.pop(self.axis))
        return replace(self, shape=tuple(shape), codec=codec, axis=self.concat_axis, concat_axis=self.axis)


class _Whole(Operation):
    """What the operations share that send the whole local tensor as one flat row."""

    @property
    def layout(self) -> Layout:
        """One row."""
        return layout_for(self.shape, 1, self._options[0], channels=self.channels)

    def _rows(self, x):
        return self.layout.cut(x)[0]


class AllGather(_Whole):
    """One hop: encode, all-gather, decode; the local tensors are joined along `axis`."""

    @property
    def _to(self) -> str:
        return "invarying" if self.invariant else "varying"

    def _exact(self, x):
        gathered = lax.all_gather(_to_bits(x), self.axes, axis=self.axis, tiled=self.tiled, to=self._to)
        return _from_bits(gathered, self.dtype)

    def _exchange(self, message):
        return lax.all_gather(message, self.axes, to=self._to)

    def _join(self, rows):
        parts = rows[:, : math.prod(self.shape)].reshape(self.ranks, *self.shape)
        d = self.axis
        moved = jnp.moveaxis(parts, 0, d)
        if not self.tiled:
            return moved
        return moved.reshape(*self.shape[:d], self.ranks * self.shape[d], *self.shape[d + 1 :])

    def own_part(self, ct):
        size = self.shape[self.axis] if self.tiled else 1
        start = lax.axis_index(self.axes) * size
        part = lax.dynamic_slice_in_dim(compat.vary(ct, self.axes), start, size, self.axis)
        return part if self.tiled else jnp.squeeze(part, self.axis)

    def transposed(self, codec: Codec | None) -> ReduceScatter:
        """Return the operation on cotangents of a varying result."""
        d = self.axis
        gathered = (self.ranks * self.shape[d], *self.shape[d + 1 :]) if self.tiled else (self.ranks, *self.shape[d:])
        return self._changed(ReduceScatter, shape=(*self.shape[:d], *gathered), codec=codec)


class Permute(_Whole):
    """One hop: encode, collective permute, decode; ranks that receive nothing get zeros."""

    def _exact(self, x):
        # Inside a loop XLA:GPU's collective-permute-motion swaps the permute and the bitcast and then fails to verify.
        received = lax.optimization_barrier(lax.ppermute(_to_bits(x), self.axes, self.perm))
        return _from_bits(received, self.dtype)

    def _exchange(self, message):
        return lax.ppermute(message, self.axes, self.perm)

    def _join(self, rows):
        return self.layout.join(rows[None])

    def transposed(self, codec: Codec | None) -> "Permute":
        """Return the operation on cotangents: the inverse permutation."""
        return replace(self, codec=codec, perm=tuple((b, a) for a, b in self.perm))


def _parts_first(x: jax.Array, axis: int, ranks: int) -> jax.Array:
    shape = (*x.shape[:axis], ranks, x.shape[axis] // ranks, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def _total(seen: tuple, count: float) -> jax.Array:
    """Add the chunks' observations of one hop and fill in the count, zeros where nothing was observed."""
    if seen[0] is None:
        return jnp.zeros(SLOTS, jnp.float32)
    total = seen[0]
    for other in seen[1:]:
        total = total + other
    return total.at[COUNT].set(count)


def _to_bits(x: jax.Array) -> jax.Array:
    # XLA:CPU moves 16-bit floats as 32-bit ones.
    return lax.bitcast_convert_type(x, jnp.uint16) if _is_half(x.dtype) else x


def _from_bits(x: jax.Array, dtype) -> jax.Array:
    return lax.bitcast_convert_type(x, dtype) if _is_half(dtype) else x


def _is_half(dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 2
