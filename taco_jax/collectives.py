"""The differentiable collectives: shaped like `jax.lax`, compressed in each direction by a codec of its own.

How they are differentiated stands in `taco_jax.differentiation`.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from taco_jax import compat
from taco_jax.config import Compression, as_compression
from taco_jax.differentiation import PAYLOAD_NAME, STATS_NAME, Call, Scales, differentiable, enter, pair
from taco_jax.operations import AllGather, AllReduce, AllToAll, Permute, ReduceScatter

Axes = str | tuple[str, ...]


def save_payloads():
    """Return the `jax.checkpoint` policy that keeps compressed messages and recomputes everything else."""
    return jax.checkpoint_policies.save_only_these_names(PAYLOAD_NAME, STATS_NAME)


def psum(
    x: Any,
    axis_name: Axes,
    *,
    compression: Compression | str | None = "taco_block",
    scales: Scales = None,
    key: jax.Array | None = None,
    split_dim: int | None = None,
    residual: Any = None,
    name: str | None = None,
    axis_index_groups: None = None,
) -> Any:
    """Sum `x` over mesh axes as `jax.lax.psum` does, with compressed messages.

    y = decode(all_gather(encode(sum_r decode(all_to_all(encode(x_r)))))), equal bits on every rank; 2 (n-1)/n bytes per
    value. Integers, messages under `min_bytes` and groups of one rank go through `lax.psum` exactly.

    Args:
        x: pytree of arrays, per shard, any shape; f32, bf16 or f16 are compressed.
        axis_name: mesh axis or axes; several axes form one group in row-major order of the names.
        compression: a preset name, a `Compression`, or None (exact).
        scales: state of the site, f32[2, 2, 5] from `init_scales`, or a `SitePair`; required by adaptive codecs. With
            other codecs it only collects observations.
        key: of `jax.random`, equal on all ranks, for codecs with `rounding="stochastic"` and nothing else: each rank,
            hop, direction and leaf has bits of its own. Equal keys give equal bits, so pass another each step.
        split_dim: split this axis over the ranks and merge none, instead of flattening. Under partial-manual
            `shard_map` XLA gathers the axes it partitions itself around any all-to-all; make them manual instead.
        residual: pytree like `x` (shape and dtype of each leaf), equal on all ranks, that is added to the sum where the
            messages are decoded: in f32, with the one rounding of the result, and in the same pass over memory.
        name: site name, seen in profiles, HLO metadata and the communication table.
        axis_index_groups: None; groups within an axis are not offered.

    Returns:
        A pytree like `x`, invariant over `axis_name`.

    Raises:
        ValueError: for float64, an adaptive codec without scales, scales that vary over `axis_name`, a key that is
            missing or of no use, an array that varies over some of the axes only, and a residual of another shape or
            dtype, or that varies over the axes.
        NotImplementedError: for `axis_index_groups`.
    """
    more = () if residual is None else (residual,)
    return _map(
        _psum, "psum", x, axis_name, compression, scales, key, name, axis_index_groups, *more, split_dim=split_dim
    )


def pmean(x: Any, axis_name: Axes, **options) -> Any:
    """Average `x` over mesh axes: `psum` divided by the group's size. Options as for `psum`."""
    total = psum(x, axis_name, **options)
    return jax.tree.map(lambda leaf: leaf / lax.axis_size(axis_name), total)


def pvary(
    x: Any,
    axis_name: Axes,
    *,
    compression: Compression | str | None = "taco_block",
    scales: Scales = None,
    key: jax.Array | None = None,
    split_dim: int | None = None,
    name: str | None = None,
) -> Any:
    """Return `x` itself, marked as varying over `axis_name`; its cotangents are summed with compressed messages.

    Megatron's f, the entry of a column-parallel layer; under `check_vma=False` the identity both ways (see
    `taco_jax.differentiation`). Args and Raises as for `psum`; `compression.backward` is what counts.
    """
    return _map(_pvary, "pvary", x, axis_name, compression, scales, key, name, None, split_dim=split_dim)


def psum_scatter(
    x: Any,
    axis_name: Axes,
    *,
    scatter_dimension: int = 0,
    tiled: bool = False,
    compression: Compression | str | None = "taco_block",
    scales: Scales = None,
    key: jax.Array | None = None,
    name: str | None = None,
    axis_index_groups: None = None,
) -> Any:
    """Sum over the group and keep one part per rank, as `jax.lax.psum_scatter`; backward is a compressed all-gather.

    Args:
        x: pytree of arrays, per shard; `scatter_dimension` must be a multiple of the group's size (equal to it unless
            `tiled`).
        axis_name: mesh axis or axes.
        scatter_dimension: axis that is split.
        tiled: keep the split axis (True) or drop it (False).
        compression: as for `psum`.
        scales: as for `psum`.
        key: as for `psum`.
        name: as for `psum`.
        axis_index_groups: as for `psum`.

    Raises:
        ValueError, NotImplementedError: as for `psum`, and for a `scatter_dimension` that does not divide.
    """
    return _map(
        _one_hop, "psum_scatter", x, axis_name, compression, scales, key, name, axis_index_groups,
        kind=ReduceScatter, axis=scatter_dimension, tiled=tiled,
    )  # fmt: skip


def all_gather(
    x: Any,
    axis_name: Axes,
    *,
    axis: int = 0,
    tiled: bool = False,
    to: str = "varying",
    compression: Compression | str | None = "taco_block",
    scales: Scales = None,
    key: jax.Array | None = None,
    name: str | None = None,
    axis_index_groups: None = None,
) -> Any:
    """Join the ranks' arrays along `axis`, as `jax.lax.all_gather`; backward is a compressed reduce-scatter.

    Args:
        x: pytree of arrays, per shard.
        axis_name: mesh axis or axes.
        axis: position of the new axis, or of the joined one if `tiled`.
        tiled: concatenate instead of stack.
        to: `"varying"`, or `"invarying"`: the result counts as equal on all ranks and the backward pass takes this
            rank's slice without communication.
        compression: as for `psum`.
        scales: as for `psum`.
        key: as for `psum`.
        name: as for `psum`.
        axis_index_groups: as for `psum`.

    Raises:
        ValueError, NotImplementedError: as for `psum`, and for another `to`.
    """
    if to not in ("varying", "invarying"):
        raise ValueError(f"to must be 'varying' or 'invarying', got {to!r}")
    return _map(
        _one_hop, "all_gather", x, axis_name, compression, scales, key, name, axis_index_groups,
        kind=AllGather, axis=axis, tiled=tiled, invariant=to == "invarying",
    )  # fmt: skip


def all_to_all(
    x: Any,
    axis_name: Axes,
    *,
    split_axis: int,
    concat_axis: int,
    tiled: bool = False,
    compression: Compression | str | None = "taco_block",
    scales: Scales = None,
    key: jax.Array | None = None,
    name: str | None = None,
    axis_index_groups: None = None,
) -> Any:
    """Exchange parts between ranks, as `jax.lax.all_to_all`; backward swaps the axes.

    Args and Raises as for `psum`; `split_axis` must be a multiple of the group's size (equal to it unless `tiled`).
    """
    return _map(
        _one_hop, "all_to_all", x, axis_name, compression, scales, key, name, axis_index_groups,
        kind=AllToAll, axis=split_axis, concat_axis=concat_axis, tiled=tiled,
    )  # fmt: skip


def ppermute(
    x: Any,
    axis_name: str,
    *,
    perm: Any,
    compression: Compression | str | None = "taco_block",
    scales: Scales = None,
    key: jax.Array | None = None,
    name: str | None = None,
) -> Any:
    """Send `x` along (source, destination) pairs, as `jax.lax.ppermute`; backward is the inverse permutation.

    Args and Raises as for `psum`.
    """
    perm = tuple((int(a), int(b)) for a, b in perm)
    return _map(_one_hop, "ppermute", x, axis_name, compression, scales, key, name, None, kind=Permute, perm=perm)


def _map(one, op: str, x, axis_name, compression, scales, key, name, axis_index_groups, *more, **options):
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    compression = as_compression(compression)
    site = name or "unnamed"
    if "." in site or "/" in site:
        raise ValueError(f"a site name holds no '.' and no '/', got {site!r}")
    if axis_index_groups is not None:
        raise NotImplementedError(f"{op} {site!r}: axis_index_groups are not offered; give the groups a mesh axis")
    if compression.is_adaptive and scales is None:
        raise ValueError(
            f"{op} {site!r}: an adaptive codec needs scales=init_scales({{{site!r}: compression}})[{site!r}], "
            'or use a stateless preset such as "taco_block"'
        )
    if compression.is_stochastic != (key is not None):
        wanted = "needs key=, of jax.random" if key is None else "has no use for key="
        kind = "a codec that rounds stochastically" if key is None else "a compression that rounds to nearest"
        raise ValueError(f"{op} {site!r}: {kind} {wanted}")
    index = itertools.count()

    def one_leaf(leaf, *others):
        own = None if key is None else jax.random.fold_in(key, next(index))
        return one(op, site, jnp.asarray(leaf), axes, compression, scales, own, *others, **options)

    return jax.tree.map(one_leaf, x, *more)


def _psum(op, site, x, axes, compression, scales, key, residual=None, *, split_dim):
    if residual is not None:
        residual = jnp.asarray(residual)
        if (residual.shape, residual.dtype) != (x.shape, x.dtype):
            given, wanted = (f"{a.dtype.name}{list(a.shape)}" for a in (residual, x))
            raise ValueError(f"{op} {site!r}: the residual is {given}, the array {wanted}; they must be alike")
        if compat.is_checked(axes) and (shared := sorted(compat.varying_axes(residual) & set(axes))):
            raise ValueError(f"{op} {site!r}: the residual varies over {shared}; it must be equal on all ranks")
    with jax.named_scope(f"taco.{op}.{site}.forward"):
        if not _varies(x, axes, op, site):
            x = compat.vary(x, axes)
        if _is_exact(x, axes, compression):
            total = checkpoint_name(lax.psum(x, axes), PAYLOAD_NAME)
            return total if residual is None else total + residual
    options = _options(x, axes, compression, split_dim=split_dim)
    forward = AllReduce(codec=compression.forward, **options)
    backward = None if compat.is_checked(axes) else AllReduce(codec=compression.backward, **options)
    call = Call(forward, backward, op, site, scales is not None)
    return differentiable(call, x, scales, key, residual)


def _pvary(op, site, x, axes, compression, scales, key, *, split_dim):
    if not compat.is_checked(axes):
        return x
    varying = sorted(compat.varying_axes(x) & set(axes))
    if varying:
        raise ValueError(f"pvary {site!r}: the array varies over {varying} already; it must be equal on all ranks")
    exact = _is_exact(x, axes, compression)
    options = _options(x, axes, compression, split_dim=split_dim)
    operation = AllReduce(codec=None if exact else compression.backward, **options)
    call = Call(operation, operation, op, site, scales is not None)
    return enter(call, x, *pair(call, x, scales), key)


def _one_hop(op, site, x, axes, compression, scales, key, *, kind, axis=0, concat_axis=0, perm=(), **options):
    _varies(x, axes, op, site)
    x = compat.vary(x, axes)
    if kind is AllGather:
        axis = _axis(op, site, axis, x.ndim if options["tiled"] else x.ndim + 1)
    elif kind is not Permute:
        axis, concat_axis = (_axis(op, site, a, x.ndim) for a in (axis, concat_axis))
        _check_split(op, site, x.shape, axis, lax.axis_size(axes), options["tiled"])
    exact = _is_exact(x, axes, compression)
    codec = None if exact else compression.forward
    operation = kind(
        codec=codec, axis=axis, concat_axis=concat_axis, perm=perm, **_options(x, axes, compression), **options
    )
    slices = operation.invariant and compat.is_checked(axes)
    backward = None if slices else operation.transposed(None if exact else compression.backward)
    return differentiable(Call(operation, backward, op, site, scales is not None), x, scales, key)


def _options(x: jax.Array, axes: tuple[str, ...], compression: Compression, **more) -> dict[str, Any]:
    return {
        "axes": axes, "shape": x.shape, "dtype": x.dtype, "chunks": compression.chunks,
        "implementation": compression.implementation, **more,
    }  # fmt: skip


def _varies(x: jax.Array, axes: tuple[str, ...], op: str, site: str) -> bool:
    """Return whether `x` varies over the axes (all or none); True where JAX does not track it."""
    if not compat.is_checked(axes):
        return True
    varying = compat.varying_axes(x) & set(axes)
    if varying and varying != set(axes):
        raise ValueError(
            f"{op} {site!r} over {axes}: the array varies over {tuple(sorted(varying))} only; "
            "summing its replicas is a mistake more often than not, so reduce over those axes or pcast it first"
        )
    return bool(varying)


def _is_exact(x: jax.Array, axes: tuple[str, ...], compression: Compression) -> bool:
    if x.dtype == jnp.float64 and not compression.is_exact:
        raise ValueError('float64 is not compressed (a float32 sum would lose it); cast it or use compression="none"')
    if not jnp.issubdtype(x.dtype, jnp.floating) or compression.is_exact or x.size == 0:
        return True
    return lax.axis_size(axes) == 1 or x.size * x.dtype.itemsize < compression.min_bytes


def _axis(op: str, site: str, axis: int, ndim: int) -> int:
    if not -ndim <= axis < ndim:
        raise ValueError(f"{op} {site!r}: axis {axis} is out of range for {ndim} axes")
    return axis % ndim


def _check_split(op: str, site: str, shape: tuple[int, ...], axis: int, ranks: int, tiled: bool) -> None:
    size = shape[axis]
    if size % ranks if tiled else size != ranks:
        wanted = f"a multiple of {ranks}" if tiled else f"{ranks} (or pass tiled=True)"
        raise ValueError(f"{op} {site!r}: axis {axis} of shape {shape} must be {wanted}, the size of the group")
