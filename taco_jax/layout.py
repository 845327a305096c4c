"""How a tensor is cut into the rows that ranks exchange, and put together again; padding stays inside."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from taco_jax.config import Codec


@dataclass(frozen=True)
class Layout:
    """Cut a local tensor of `shape` into `parts` rows of whole blocks.

    With `split_dim` None all axes are flattened: rows are [parts, C]. Otherwise that axis alone is split and no axes
    are merged, rows are [parts, *shape with shape[split_dim] / parts, the last axis padded to whole blocks].
    A row of one token after another is cut between groups of `block` tokens: `unit` is the values of such a group.
    """

    shape: tuple[int, ...]
    parts: int
    unit: int
    split_dim: int | None = None

    @property
    def part_size(self) -> int:
        """Length of a part along `split_dim` (rounded up)."""
        assert self.split_dim is not None
        return math.ceil(self.shape[self.split_dim] / self.parts)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of one part, unpadded along the last axis."""
        assert self.split_dim is not None
        return (*self.shape[: self.split_dim], self.part_size, *self.shape[self.split_dim + 1 :])

    @property
    def columns(self) -> int:
        """Length of a row's last axis, a multiple of the unit."""
        size = math.ceil(math.prod(self.shape) / self.parts) if self.split_dim is None else self.part_shape[-1]
        return math.ceil(size / self.unit) * self.unit

    def cut(self, x: jax.Array) -> jax.Array:
        """Return the rows [parts, ..., columns] of `x`."""
        if self.split_dim is None:
            flat = x.reshape(-1)
            return jnp.pad(flat, (0, self.parts * self.columns - flat.size)).reshape(self.parts, self.columns)
        d = self.split_dim
        x = _pad_to(x, d, self.parts * self.part_size)
        x = x.reshape(*self.shape[:d], self.parts, self.part_size, *self.shape[d + 1 :])
        return _pad_to(jnp.moveaxis(x, d, 0), -1, self.columns)

    def join(self, rows: jax.Array) -> jax.Array:
        """Return the tensor whose rows are given; inverse of `cut`."""
        if self.split_dim is None:
            return rows.reshape(-1)[: math.prod(self.shape)].reshape(self.shape)
        d = self.split_dim
        x = jnp.moveaxis(rows[..., : self.part_shape[-1]], 0, d)
        x = x.reshape(*self.shape[:d], self.parts * self.part_size, *self.shape[d + 1 :])
        return jax.lax.slice_in_dim(x, 0, self.shape[d], axis=d)

    def pieces(self, chunks: int) -> tuple[slice, ...]:
        """Return at most `chunks` slices of whole units that cover a row's last axis."""
        units = self.columns // self.unit
        count = max(1, min(chunks, units))
        edges = [units * i // count * self.unit for i in range(count + 1)]
        return tuple(slice(a, b) for a, b in zip(edges, edges[1:], strict=False))


def layout_for(
    shape: tuple[int, ...], parts: int, codec: Codec, split_dim: int | None = None, channels: int = 1
) -> Layout:
    """Return the layout of a message of this codec; `split_dim` may count from the end.

    Raises:
        ValueError: for a `split_dim` that does not exist, and for so few tokens that the padding of `layout="tokens"`
            would send more than it saves.
    """
    if split_dim is not None:
        if not -len(shape) <= split_dim < len(shape):
            raise ValueError(f"split_dim={split_dim} is out of range for shape {shape}")
        split_dim %= len(shape)
    found = Layout(tuple(shape), parts, codec.block * channels, split_dim)
    if channels > 1 and parts * found.columns >= 2 * math.prod(shape):
        tokens = math.prod(shape) // channels
        raise ValueError(
            f'layout="tokens": {tokens} tokens for {parts} ranks are padded to {parts * found.columns // channels}, '
            f'whole blocks of {codec.block} each, which saves nothing; use a smaller block or layout="hidden"'
        )
    return found


def _pad_to(x: jax.Array, axis: int, size: int) -> jax.Array:
    axis %= x.ndim
    missing = size - x.shape[axis]
    return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)]) if missing else x
