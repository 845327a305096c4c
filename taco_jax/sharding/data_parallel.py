"""Sums over the replicas of sharded values, inside `jax.shard_map`: gradients once a step, and their global norm."""

import collections
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from taco_jax.sharding.rules import mesh_axes


def sum_replicas(tree: Any, specs: Any, axes: Any) -> Any:
    """Return the exact sum of every leaf over those of `axes` that its `PartitionSpec` does not shard over.

    Args:
        tree: leaves per shard, varying over `axes`.
        specs: tree of `PartitionSpec`.
        axes: tree of the mesh axes (a frozenset) over which the leaves are partial sums.
    """
    return jax.tree.map(lambda x, spec, axes: lax.psum(x, _others(spec, axes)), tree, specs, axes)


def global_norm(tree: Any, specs: Any) -> tuple[jax.Array, jax.Array]:
    """Return the L2 norm of the global arrays, every element counted once, and what each leaf adds to its square.

    ||g||^2 = sum over leaves of the local squares, added over the axes the leaf is sharded on; all share one psum, to
    which only the first replica of a leaf adds.

    Returns:
        f32[] and f32[leaves], the same on all ranks.
    """
    leaves, specs = jax.tree.leaves(tree), jax.tree.leaves(specs, is_leaf=_is_spec)
    groups: dict[tuple[str, ...], list[int]] = collections.defaultdict(list)
    for index, (_, spec) in enumerate(zip(leaves, specs, strict=True)):
        groups[tuple(sorted(mesh_axes(spec)))].append(index)
    every_axis = tuple(sorted(set().union(*groups)))
    packed = []
    for axes, indices in groups.items():
        parts = jnp.stack([jnp.sum(jnp.square(leaves[index].astype(jnp.float32))) for index in indices])
        packed.append(_once(jnp.concatenate([jnp.sum(parts)[None], parts]), set(every_axis).difference(axes)))
    sums = jnp.concatenate(packed)
    sums = lax.psum(sums, every_axis) if every_axis else sums
    total, squares = jnp.float32(0), [jnp.float32(0)] * len(leaves)
    ends = np.cumsum([len(part) for part in packed])
    for indices, part in zip(groups.values(), jnp.split(sums, ends[:-1]), strict=True):
        total += part[0]
        for index, square in zip(indices, part[1:], strict=True):
            squares[index] = square
    return jnp.sqrt(total), jnp.stack(squares)


def _once(x: jax.Array, replicated: Iterable[str]) -> jax.Array:
    """Return x on the first of the devices along the axes over which it is replicated, zeros on the others."""
    for axis in sorted(replicated):
        x = jnp.where(lax.axis_index(axis) == 0, x, jnp.zeros_like(x))
    return x


def _others(spec: P, axes: frozenset[str]) -> tuple[str, ...]:
    return tuple(sorted(axes.difference(mesh_axes(spec))))


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)
