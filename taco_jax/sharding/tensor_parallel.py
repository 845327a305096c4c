"""Communication between the devices that share a layer: as the object the models receive, and for models under `jit`.

`row_parallel` and `column_parallel` are for programs that XLA partitions (`jax.jit` with shardings): each is a matrix
product in a `shard_map` of its own. Every mesh axis is manual in it: around an all-to-all or an all-gather XLA gathers
whatever it still partitions by itself (`lax`'s own collectives too), which sends the other axes' data as well.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from taco_jax import compat
from taco_jax.collectives import Axes, psum, pvary
from taco_jax.config import Compression
from taco_jax.scales import SitePair
from taco_jax.sharding.rules import mesh_axes

_WHOLE = P()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """Messages between the devices of one mesh axis, compressed as asked; a pytree whose leaves are the scales.

    Attributes:
        scales: site -> `taco_jax.scales.SitePair`, needed by adaptive codecs and observed with any; None without.
        axis_name: mesh axis that the layers are sharded over.
        compression: how the sites send.
    """

    scales: Mapping[str, Any] | None = None
    axis_name: str = dataclasses.field(default="tp", metadata={"static": True})
    compression: Compression = dataclasses.field(default=Compression(None, None), metadata={"static": True})

    def enter(self, x: jax.Array, site: str) -> jax.Array:
        """Return `x` as input of sharded weights; its cotangent is summed over the axis (Megatron's f)."""
        return pvary(x, self.axis_name, compression=self.compression, scales=self._scales(site), name=site)

    def leave(self, y: jax.Array, site: str) -> jax.Array:
        """Return the sum of `y` over the axis, for outputs of sharded weights (Megatron's g)."""
        return psum(y, self.axis_name, compression=self.compression, scales=self._scales(site), name=site)

    def sum(self, x: jax.Array) -> jax.Array:
        """Return the exact sum over the axis."""
        return psum(x, self.axis_name, compression=None, name="vocabulary")

    def max(self, x: jax.Array) -> jax.Array:
        """Return the maximum over the axis; no gradient passes."""
        with jax.named_scope("taco.pmax.vocabulary.forward"):
            return lax.pmax(lax.stop_gradient(x), self.axis_name)

    def index(self) -> jax.Array:
        """Return this device's position on the axis."""
        return lax.axis_index(self.axis_name)

    @property
    def size(self) -> int:
        """Number of devices on the axis."""
        return lax.axis_size(self.axis_name)

    def with_scales(self, scales: Mapping[str, Any] | None) -> "TensorParallel":
        """Return the same communication with other scales."""
        return dataclasses.replace(self, scales=scales)

    def select(self, sites: Iterable[str]) -> "TensorParallel":
        """Return the same communication with the scales of `sites` only."""
        return self if self.scales is None else self.with_scales({site: self.scales[site] for site in sites})

    def _scales(self, site: str) -> Any:
        return None if self.scales is None else self.scales[site]


class SingleDevice:
    """Communication of a model that one device holds whole: nothing."""

    size = 1

    def enter(self, x: jax.Array, site: str) -> jax.Array:
        """Return `x`."""
        return x

    def leave(self, y: jax.Array, site: str) -> jax.Array:
        """Return `y`."""
        return y

    def sum(self, x: jax.Array) -> jax.Array:
        """Return `x`."""
        return x

    def max(self, x: jax.Array) -> jax.Array:
        """Return `x` without its gradient."""
        return lax.stop_gradient(x)

    def index(self) -> int:
        """Return 0."""
        return 0


jax.tree_util.register_static(SingleDevice)


def row_parallel(
    x: jax.Array,
    kernel: jax.Array,
    axis_name: Axes = "tp",
    *,
    batch_spec: P = _WHOLE,
    replicated_axes: tuple[str, ...] = (),
    mesh: Mesh | AbstractMesh | None = None,
    compression: Compression | str | None = "taco_block",
    scales: jax.Array | None = None,
    name: str | None = None,
) -> jax.Array:
    """Multiply by a kernel whose rows are split over `axis_name`, adding the parts with compressed messages.

    y = psum_r(x_r @ kernel_r); the cotangents of x and kernel need no communication over `axis_name`. Shapes are
    global: call it in `jax.jit`, outside `shard_map`. A bias is added to the result, once.

    Args:
        x: [*batch, K, ...], split over `batch_spec` and, along K, over `axis_name`.
        kernel: [K, ..., N], all but the last axis are contracted; K is split over `axis_name`.
        axis_name: mesh axis or axes of the tensor parallelism.
        batch_spec: how the batch axes of x are split, such as `P("dp")` or `P(("dp", "fsdp"), "sp")`.
        replicated_axes: other mesh axes, over which x is the same; every axis of more than one device must be named
            in one of the three arguments, because x would be gathered over an axis that is forgotten.
        mesh: None takes the one of `jax.set_mesh`.
        compression: as for `psum`; forward is what counts. Size and `min_bytes` are those of one device's message.
        scales: f32[2, 2, 5] of the site, replicated. Its cotangent is the observation, already added over the mesh:
            `update_scales(..., axis_name=None)`.
        name: site name, as for `psum`.

    Returns:
        [*batch, N], split over `batch_spec` and equal on all ranks of `axis_name`.

    Raises:
        ValueError: for shapes that do not fit or divide, no mesh, a mesh axis that is not named, an axis that is manual
            already, a `SitePair`, and as for `psum`.
    """
    layer = _layer("row_parallel", name, axis_name, batch_spec, replicated_axes, mesh, scales)
    contracted = kernel.ndim - 1
    batch = layer.batch(x, kernel, contracted, split=0)

    def multiply(x, kernel, scales):
        y = jnp.tensordot(x, kernel, contracted)
        return psum(y, axis_name, compression=compression, scales=scales, name=name)

    return layer.map(multiply, (P(*batch, axis_name), P(axis_name)), P(*batch))(x, kernel, scales)


def column_parallel(
    x: jax.Array,
    kernel: Any,
    axis_name: Axes = "tp",
    *,
    batch_spec: P = _WHOLE,
    replicated_axes: tuple[str, ...] = (),
    mesh: Mesh | AbstractMesh | None = None,
    compression: Compression | str | None = "taco_block",
    scales: jax.Array | None = None,
    name: str | None = None,
) -> Any:
    """Multiply by kernels whose columns are split over `axis_name`; the cotangent of x travels compressed.

    y_r = x @ kernel_r, ct_x = psum_r(ct_y_r @ kernel_r^T). Kernels of the same x, such as those of query, key and
    value, belong in one call: they share one message.

    Args:
        x: [*batch, K], split over `batch_spec` and equal on all ranks of `axis_name`.
        kernel: array [K, N, ...], or a pytree of them; N is split over `axis_name`.
        axis_name: as for `row_parallel`.
        batch_spec: as for `row_parallel`.
        replicated_axes: as for `row_parallel`.
        mesh: as for `row_parallel`.
        compression: as for `psum`; backward is what counts.
        scales: as for `row_parallel`; both may have the same site.
        name: site name, as for `psum`.

    Returns:
        [*batch, N, ...] like `kernel`, split over `batch_spec` and, along N, over `axis_name`.

    Raises:
        ValueError: as for `row_parallel`.
    """
    layer = _layer("column_parallel", name, axis_name, batch_spec, replicated_axes, mesh, scales)
    batch, *_ = [layer.batch(x, leaf, 1, split=1) for leaf in jax.tree.leaves(kernel)]

    def multiply(x, kernel, scales):
        x = pvary(x, axis_name, compression=compression, scales=scales, name=name)
        return jax.tree.map(lambda leaf: jnp.tensordot(x, leaf, 1), kernel)

    return layer.map(multiply, (P(*batch), P(None, axis_name)), P(*batch, axis_name))(x, kernel, scales)


@dataclasses.dataclass(frozen=True)
class _Layer:
    """One call on global arrays: what labels it, how it is split, and the axes that become manual in it."""

    label: str
    axes: tuple[str, ...]
    batch_spec: P
    mesh: Mesh | AbstractMesh
    manual: frozenset[str]

    def batch(self, x: jax.Array, kernel: jax.Array, contracted: int, split: int) -> tuple:
        """Return the spec's entries for the batch axes of x, after checking both shapes."""
        ndim = x.ndim - contracted
        if contracted < 1 or ndim < 0 or kernel.ndim <= split or x.shape[ndim:] != kernel.shape[:contracted]:
            raise ValueError(
                f"{self.label}: x{list(x.shape)} and kernel{list(kernel.shape)} do not fit: "
                f"{list(x.shape[max(ndim, 0) :])} of x meets {list(kernel.shape[:contracted])}"
            )
        if len(self.batch_spec) > ndim:
            raise ValueError(f"{self.label}: {self.batch_spec} has more entries than x has batch axes, {ndim}")
        batch = (*self.batch_spec, *(None,) * (ndim - len(self.batch_spec)))
        self._check_divides(f"kernel{list(kernel.shape)}", kernel.shape[split], P(self.axes))
        for size, entry in zip(x.shape, batch, strict=False):
            self._check_divides(f"x{list(x.shape)}", size, P(entry))
        return batch

    def _check_divides(self, what: str, size: int, spec: P) -> None:
        axes = {axis: self.mesh.shape[axis] for axis in mesh_axes(spec)}
        if size % math.prod(axes.values()):
            raise ValueError(f"{self.label}: an axis of {what} has {size} elements, which {axes} does not divide")

    def map(self, f, in_specs: tuple[P, P], out_specs: P):
        """Return `f(x, kernel, scales)` on global arrays."""
        specs, axes = (*in_specs, P()), set(self.manual)
        return jax.shard_map(f, mesh=self.mesh, in_specs=specs, out_specs=out_specs, axis_names=axes)


def _layer(op: str, name: str | None, axis_name, batch_spec, replicated_axes, mesh, scales) -> _Layer:
    label = f"{op} {name or 'unnamed'!r}"
    mesh = _mesh_here(label, mesh)
    if not isinstance(batch_spec, P):
        raise ValueError(f'{label}: batch_spec must be a PartitionSpec such as P("dp"), got {batch_spec!r}')
    if isinstance(scales, SitePair):
        raise ValueError(f"{label}: a SitePair belongs inside shard_map; here scales is the site's f32[2, 2, 5]")
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    named = (*axes, *mesh_axes(batch_spec), *replicated_axes)
    if unknown := [axis for axis in named if axis not in mesh.shape]:
        raise ValueError(f"{label}: the mesh has no axis {unknown}, it has {dict(mesh.shape)}")
    if twice := sorted({axis for axis in named if named.count(axis) > 1}):
        raise ValueError(f"{label}: {twice} stand twice in axis_name, batch_spec and replicated_axes")
    around = tuple(getattr(mesh, "manual_axes", ()))
    # JAX cannot lower the gradient of a checked shard_map inside another one, of lax.psum either.
    if around and (compat.is_checked(around) or set(around) & set(named)):
        raise ValueError(
            f"{label}: it is for code outside shard_map, and {around} are manual here; inside, make all axes manual "
            "and call taco_jax.psum and taco_jax.pvary (under check_vma=False it nests, if no manual axis is named)"
        )
    manual = frozenset(mesh.axis_names) - set(around)
    if forgotten := {axis: size for axis, size in mesh.shape.items() if axis in manual - set(named) and size > 1}:
        raise ValueError(
            f"{label}: over mesh axes {forgotten} x would be gathered; name them in batch_spec, such as "
            f"P({tuple(forgotten)}), or in replicated_axes if x is the same on all their devices"
        )
    return _Layer(label, axes, batch_spec, mesh, manual)


def _mesh_here(label: str, mesh: Mesh | AbstractMesh | None) -> Mesh | AbstractMesh:
    """Return the mesh of the context, which knows the manual axes, or else the one given."""
    context = jax.sharding.get_abstract_mesh()
    if context.empty:
        if mesh is None:
            raise ValueError(f"{label}: no mesh; pass mesh=, or call it under jax.set_mesh(mesh)")
        return mesh
    if mesh is not None and mesh.shape != context.shape:
        raise ValueError(f"{label}: the mesh {dict(mesh.shape)} is not that of the context, {dict(context.shape)}")
    return context
