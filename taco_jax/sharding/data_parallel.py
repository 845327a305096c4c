"""Sums over the replicas of sharded values, inside `jax.shard_map`: gradients once a step, and their global norm."""

import collections
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from taco_jax.sharding.rules import mesh_axes


def sum_replicas(tree: Any, specs: Any, axes: tuple[str, ...]) -> Any:
    """Return the exact sum of every leaf over those of `axes` that its `PartitionSpec` does not shard over.

    Args:
        tree: leaves per shard, varying over `axes`.
        specs: tree of `PartitionSpec`.
        axes: mesh axes over which the leaves are partial sums.
    """
    return jax.tree.map(lambda x, spec: lax.psum(x, _others(spec, axes)), tree, specs)


def global_norm(tree: Any, specs: Any) -> jax.Array:
    """Return the L2 norm of the global arrays, f32, the same on all ranks: every element counts once.

    ||g||^2 = sum over leaves of the psum of the local squares over the axes the leaf is sharded on; leaves that are
    sharded on the same axes share one psum.
    """
    squares: dict[tuple[str, ...], list[jax.Array]] = collections.defaultdict(list)
    for leaf, spec in zip(jax.tree.leaves(tree), jax.tree.leaves(specs, is_leaf=_is_spec), strict=True):
        squares[tuple(sorted(mesh_axes(spec)))].append(jnp.sum(jnp.square(leaf.astype(jnp.float32))))
    total = jnp.float32(0)
    for axes, parts in squares.items():
        part = jnp.sum(jnp.stack(parts))
        total += lax.psum(part, axes) if axes else part
    return jnp.sqrt(total)


def _others(spec: P, axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if axis not in mesh_axes(spec))


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)
