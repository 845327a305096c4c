"""Communication between the devices that share a layer, as the object the models receive."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from jax import lax

from taco_jax.collectives import psum, pvary
from taco_jax.config import Compression


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
