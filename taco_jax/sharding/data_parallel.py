"""Sums over the replicas of sharded values, inside `jax.shard_map`: gradients once a step, and their global norm."""

import collections
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from taco_jax.sharding.rules import mesh_axes


def sum_replicas(tree: Any, specs: Any, axes: Any) -> Any:
    """Return the exact sum of every leaf over those of `axes` that its `PartitionSpec` does not shard over.

    Args:
        tree: leaves per shard, varying over `axes`.
        specs: tree of `PartitionSpec`.
        axes: mesh axes over which the leaves are partial sums: a frozenset for all, or a tree of them.
    """
    if isinstance(axes, frozenset):
        axes = jax.tree.map(lambda _: axes, tree)
    return jax.tree.map(lambda x, spec, axes: lax.psum(x, _others(spec, axes)), tree, specs, axes)


def global_norm(tree: Any, specs: Any) -> tuple[jax.Array, jax.Array]:
    """Return the L2 norm of the global arrays, every element counted once, and what each leaf adds to its square.

    ||g||^2 = sum over leaves of the psum of the local squares over the axes the leaf is sharded on; leaves that are
    sharded on the same axes share one psum.

    Returns:
        f32[] and f32[leaves], the same on all ranks.
    """
    leaves, specs = jax.tree.leaves(tree), jax.tree.leaves(specs, is_leaf=_is_spec)
    groups: dict[tuple[str, ...], list[int]] = collections.defaultdict(list)
    for index, (_, spec) in enumerate(zip(leaves, specs, strict=True)):
        groups[tuple(sorted(mesh_axes(spec)))].append(index)
    total, squares = jnp.float32(0), [jnp.float32(0)] * len(leaves)
    for axes, indices in groups.items():
        parts = jnp.stack([jnp.sum(jnp.square(leaves[index].astype(jnp.float32))) for index in indices])
        sums = jnp.concatenate([jnp.sum(parts)[None], parts])
        sums = lax.psum(sums, axes) if axes else sums
        total += sums[0]
        for index, square in zip(indices, sums[1:], strict=True):
            squares[index] = square
    return jnp.sqrt(total), jnp.stack(squares)


def _others(spec: P, axes: frozenset[str]) -> tuple[str, ...]:
    return tuple(sorted(axes.difference(mesh_axes(spec))))


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)
