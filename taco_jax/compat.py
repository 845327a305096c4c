"""The only place that knows how JAX versions differ in typing values by the mesh axes they vary over."""

from collections.abc import Iterable

import jax
from jax import lax
from jax.typing import DTypeLike


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Return the mesh axes over which `x` may differ between devices (empty under `check_vma=False`)."""
    kind = getattr(jax.typeof(x), "manual_axis_type", None)
    return frozenset(kind.varying) if kind is not None else frozenset()


def is_checked(axes: tuple[str, ...]) -> bool:
    """Whether the enclosing `shard_map` tracks varying axes (`check_vma=True`)."""
    return all(axis in varying_axes(lax.axis_index(axis)) for axis in axes)


def vary(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Mark `x` as varying over `axes` too; axes it already varies over are left alone (lax.pcast refuses them)."""
    missing = tuple(axis for axis in axes if axis not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def vary_alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Mark the arrays as varying over the axes that any of them varies over, as a `pallas_call` wants its operands."""
    axes = sorted(frozenset().union(*map(varying_axes, arrays)))
    return tuple(vary(x, axes) for x in arrays)


def shape_like(shape: tuple[int, ...], dtype: DTypeLike, x: jax.Array) -> jax.ShapeDtypeStruct:
    """Return the description of a `pallas_call`'s result that varies over the axes `x` varies over."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).manual_axis_type)


def automatic_axes() -> tuple[str, ...]:
    """Return the mesh axes of more than one device that XLA partitions by itself where this is traced."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(axis for axis in mesh.auto_axes if mesh.shape[axis] > 1)
