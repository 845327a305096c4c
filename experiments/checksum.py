"""A checksum of arrays that no mesh changes: what was saved is what is restored, bit for bit."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def checksums(tree: Any, unpadded: Any = None) -> jax.Array:
    """Return u32[leaves], the checksum of every array.

    c = sum_i (2 i + 1) w_i mod 2^32 over the words w_i of an array, i in row-major order of the global array. The
    factors are odd, so every change of a single word, which any bit flip is, changes c; integer sums do not depend on
    the mesh. Zeros that pad an array at the end of an axis change nothing if `unpadded` gives the shape without them.

    Args:
        tree: global arrays with elements of one, two or four bytes.
        unpadded: tree of what has the shapes without padding; None for the arrays' own.
    """
    shapes = tuple(leaf.shape for leaf in jax.tree.leaves(tree if unpadded is None else unpadded))
    return _checksums(jax.tree.leaves(tree), shapes)


# Its compilation costs more than the few times it runs.
@functools.partial(jax.jit, static_argnums=1, compiler_options={"xla_backend_optimization_level": 0})
def _checksums(leaves: list[jax.Array], shapes: tuple[tuple[int, ...], ...]) -> jax.Array:
    sums = [_checksum(leaf, shape) for leaf, shape in zip(leaves, shapes, strict=True)]
    return jnp.stack(sums) if sums else jnp.zeros(0, jnp.uint32)


def _checksum(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    words = lax.bitcast_convert_type(x, _WORDS[x.dtype.itemsize]).astype(jnp.uint32)
    # Positions from one iota per axis: a reshape to one axis would gather a sharded array.
    position = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(shape):
        position = position * jnp.uint32(size) + lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    return jnp.sum((2 * position + 1) * words, dtype=jnp.uint32)


def region_checksum(values: np.ndarray, start: Sequence[int], shape: Sequence[int]) -> int:
    """Return what a region of an array adds to its checksum, mod 2^32: regions that cover the array sum up to it.

    Args:
        values: the region's elements, of one, two or four bytes.
        start: index in the array of the region's first element.
        shape: of the array, without padding.
    """
    words = np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}").astype(np.uint32, copy=False)
    sums = words[None]  # arrays to the end: numpy warns of scalars that overflow
    positions = np.zeros(1, np.uint32)  # sum of i w_i, as far as the axes are summed over
    stride = 1
    for first, size in zip(reversed(start), reversed(shape), strict=True):
        index = np.arange(first, first + sums.shape[-1], dtype=np.uint32)
        positions = positions.sum(-1, dtype=np.uint32) + np.uint32(stride) * (sums @ index)
        sums = sums.sum(-1, dtype=np.uint32)
        stride = stride * size % 2**32
    return (int(sums[0]) + 2 * int(positions[0])) % 2**32
