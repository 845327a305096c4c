"""Every collective in its variants, called alike in `jax.lax` and in `taco_jax`."""

from jax import lax

import taco_jax
from taco_jax import Codec, Compression

EXACT = Codec("e4m3", 32, scale_dtype="e8m0")
"""Loses nothing of integers up to 16: a layout mistake of any collective shows as a different number."""


def compression(codec, **options):
    """The same codec in both directions, for messages of any size."""
    return Compression(codec, codec, **{"min_bytes": 0, **options})


def cases(ranks: int) -> dict[str, tuple[str, dict]]:
    """name -> (function, options) for x of shape [2 * ranks, ranks, 3] per shard."""
    ring = [(r, (r + 1) % ranks) for r in range(ranks)]
    return {
        "psum": ("psum", {}),
        "pmean": ("pmean", {}),
        "psum_scatter": ("psum_scatter", {"scatter_dimension": 1}),
        "psum_scatter-tiled": ("psum_scatter", {"scatter_dimension": 0, "tiled": True}),
        "psum_scatter-tiled-1": ("psum_scatter", {"scatter_dimension": 1, "tiled": True}),
        "all_gather": ("all_gather", {}),
        "all_gather-3": ("all_gather", {"axis": 3}),
        "all_gather-tiled": ("all_gather", {"axis": 0, "tiled": True}),
        "all_gather-tiled-2": ("all_gather", {"axis": 2, "tiled": True}),
        "all_gather-invarying": ("all_gather", {"axis": 1, "to": "invarying"}),
        "all_gather-invarying-tiled": ("all_gather", {"axis": 1, "tiled": True, "to": "invarying"}),
        "all_to_all": ("all_to_all", {"split_axis": 1, "concat_axis": 0}),
        "all_to_all-2": ("all_to_all", {"split_axis": 1, "concat_axis": 2}),
        "all_to_all-tiled": ("all_to_all", {"split_axis": 0, "concat_axis": 2, "tiled": True}),
        "all_to_all-tiled-same": ("all_to_all", {"split_axis": 0, "concat_axis": 0, "tiled": True}),
        "ppermute": ("ppermute", {"perm": ring}),
        "ppermute-open": ("ppermute", {"perm": ring[:-1]}),
    }


def is_invariant(name: str) -> bool:
    """Whether all ranks hold the same result."""
    return name in ("psum", "pmean") or "invarying" in name


def call_lax(name: str, x, axis="tp"):
    """The collective of that name, exact."""
    function, options = cases(lax.axis_size(axis))[name]
    return getattr(lax, function)(x, axis, **options)


def call_taco(name: str, x, axis="tp", **options):
    """The collective of that name, with compression and the like as given."""
    function, more = cases(lax.axis_size(axis))[name]
    return getattr(taco_jax, function)(x, axis, **more, **options)
