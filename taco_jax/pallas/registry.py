"""Which implementation serves a codec; the name of an implementation is the name of its file."""

import functools
import importlib
import logging
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from taco_jax import compat
from taco_jax.config import Codec

IMPLEMENTATIONS = ("triton", "triton_sm80", "mosaic_gpu", "xla")
"""In order of preference."""
BY_NAME_ONLY = ("triton_interpret", "triton_sm80_interpret", "mosaic_gpu_interpret")
"""For tests, never chosen."""

_registered: dict[str, Any] = {}
_log = logging.getLogger("taco_jax")


def register(name: str, module: Any) -> None:
    """Let `module` run messages under a name of its own, by which alone it is chosen: for experiments.

    Args:
        name: as `Compression.implementation` gives it.
        module: a module, or an object, with the functions of `taco_jax.pallas.xla`: `encode`, `decode`, `decode_sum`,
            `reduce` and `unsupported_reason`. What it sends has the size that `taco_jax.wire` computes from the codec.

    Raises:
        ValueError: if the name is an implementation's or something else is registered under it.
    """
    if name in IMPLEMENTATIONS + BY_NAME_ONLY or _registered.get(name, module) is not module:
        raise ValueError(f"{name!r} is the name of another implementation")
    _registered[name] = module


def registered() -> tuple[str, ...]:
    """Return the names given to `register`."""
    return tuple(_registered)


def resolve(implementation: str | None, codec: Codec, dtype: DTypeLike) -> Any:
    """Return the module that runs the codec on values of `dtype`.

    Args:
        implementation: a name from `IMPLEMENTATIONS` or `BY_NAME_ONLY`, or a registered one, which never falls back
            (and may be compiled for devices that this process does not have); None takes the first that serves the
            codec on the default backend's devices and logs the choice once.
        codec: format of the messages.
        dtype: type of the values.

    Raises:
        ValueError: for an unknown name.
        NotImplementedError: if the named implementation cannot serve the codec, with its reason.
    """
    if implementation is None:
        return _load(_first_supported(codec, jnp.dtype(dtype), *_device(), compat.automatic_axes()))
    names = IMPLEMENTATIONS + BY_NAME_ONLY + registered()
    if implementation not in names:
        raise ValueError(f"no implementation is called {implementation!r}; there are {', '.join(names)}")
    module = _load(implementation)
    platform, capability = _device()
    if platform == "gpu":
        reason = unsupported_reason(implementation, codec, dtype, platform, capability)
    else:
        reason = module.unsupported_reason(codec, jnp.dtype(dtype))
    if reason is not None:
        raise NotImplementedError(f"implementation {implementation!r}: {reason}")
    return module


def unsupported_reason(
    implementation: str, codec: Codec, dtype: DTypeLike, platform: str, capability: str
) -> str | None:
    """Return why an implementation does not serve the codec on a device, or None.

    Args:
        implementation: a name from `IMPLEMENTATIONS` or `BY_NAME_ONLY`, or a registered one.
        codec: format of the messages.
        dtype: type of the values.
        platform: as JAX names it: "gpu", "tpu" or "cpu".
        capability: compute capability of a GPU as JAX spells it, e.g. "9.0" or "gfx942".
    """
    module = _load(implementation)
    reason = None
    if hasattr(module, "device_unsupported_reason"):
        reason = module.device_unsupported_reason(codec, capability if platform == "gpu" else "")
    return reason or module.unsupported_reason(codec, jnp.dtype(dtype))


def choose(codec: Codec, dtype: DTypeLike, platform: str, capability: str) -> tuple[str, dict[str, str]]:
    """Return the first implementation that serves the codec on a device, and why each one before it does not."""
    reasons: dict[str, str] = {}
    for name in IMPLEMENTATIONS:
        reason = unsupported_reason(name, codec, dtype, platform, capability)
        if reason is None:
            return name, reasons
        reasons[name] = reason
    raise AssertionError("xla serves every codec on every device")


def _load(name: str) -> Any:
    if name in _registered:
        return _registered[name]
    return importlib.import_module(f"taco_jax.pallas.{name}")


@functools.cache
def _device() -> tuple[str, str]:
    device = jax.devices()[0]
    return device.platform, str(getattr(device, "compute_capability", ""))


@functools.cache
def _first_supported(
    codec: Codec, dtype: jnp.dtype, platform: str, capability: str, automatic_axes: tuple[str, ...]
) -> str:
    name, reasons = choose(codec, dtype, platform, capability)
    if platform == "gpu" and name == "xla":
        refused = "; ".join(f"{other} is not used: {reason}" for other, reason in reasons.items())
        _log.warning("taco_jax: %s", refused)
    _log.info("taco_jax: %s %s on %s runs on implementation %s", codec.format, codec.scale, platform, name)
    return name
