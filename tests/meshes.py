"""Meshes of emulated devices, per-rank views of a result, and the collectives of a compiled program."""

import math
import re
from collections import Counter

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

P = PartitionSpec
_COLLECTIVE = re.compile(
    r"= (?P<type>.*?) (?P<op>all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)(?:-start)?\("
)


def mesh(**sizes: int) -> Mesh:
    """Mesh of the first devices with Auto axes, e.g. mesh(dp=2, tp=4)."""
    count = math.prod(sizes.values())
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=jax.devices()[:count])


def spmd(f, on: Mesh, in_specs, out_specs, check_vma: bool = True, **options):
    """Jitted shard_map of f."""
    mapped = jax.shard_map(f, mesh=on, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma, **options)
    return jax.jit(mapped)


def copies(x: jax.Array) -> list[np.ndarray]:
    """What each device holds of a replicated array."""
    return [np.asarray(shard.data) for shard in x.addressable_shards]


def assert_equal_on_all_ranks(tree) -> None:
    """Replicated leaves have the same bytes on every device."""
    for leaf in jax.tree.leaves(tree):
        first, *others = (copy.tobytes() for copy in copies(leaf))
        assert all(other == first for other in others)


def collectives(compiled_text: str) -> Counter:
    """Count (operation, element type) of the collectives in optimised HLO; a tuple counts once."""
    found: Counter = Counter()
    for match in _COLLECTIVE.finditer(compiled_text):
        types = set(re.findall(r"([a-z]+[0-9]*[a-z0-9]*)\[", match["type"]))
        assert len(types) == 1, match.group()
        found[match["op"], types.pop()] += 1
    return found
