"""The device mesh: its size as text, its devices (emulated on a CPU where they are too few), its axes."""

import contextlib
import math
import os
import re

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AXES = ("dp", "pp", "tp")
"""Data, pipeline and tensor parallel axis, the slowest first: tp runs over neighbouring devices."""

_EMULATION_FLAGS = {
    # XLA:CPU aborts when one of many emulated devices is 40 s late at a collective.
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds": 100,
    "--xla_cpu_collective_call_terminate_timeout_seconds": 1200,
}


def parse_mesh(text: str) -> dict[str, int]:
    """Read a mesh such as `"dp4,pp4,tp8"`; any order, a missing axis is 1, one may be -1 (the rest of the devices).

    Returns:
        The size of each axis of `AXES`, in that order.

    Raises:
        ValueError: if the text is no mesh, saying what one looks like.
    """
    sizes = dict.fromkeys(AXES, 1)
    seen = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*([a-z]+)(-?\d+)\s*", part)
        if not match or match[1] not in AXES:
            raise ValueError(f"cannot read {part!r} in mesh {text!r}; write axes with commas between, as dp4,pp4,tp8")
        axis, size = match[1], int(match[2])
        if axis in seen:
            raise ValueError(f"mesh {text!r} names {axis} twice")
        if size < 1 and size != -1:
            raise ValueError(f"mesh {text!r}: {axis} must be 1 or more, or -1 for the rest of the devices, got {size}")
        seen.add(axis)
        sizes[axis] = size
    if list(sizes.values()).count(-1) > 1:
        raise ValueError(f"mesh {text!r}: only one axis may be -1")
    return sizes


def format_mesh(sizes: dict[str, int]) -> str:
    """Return the text that `parse_mesh` reads."""
    return ",".join(f"{axis}{sizes[axis]}" for axis in AXES)


def resolve_sizes(sizes: dict[str, int], num_devices: int) -> dict[str, int]:
    """Replace the axis of size -1, if there is one, by what is left of `num_devices`.

    Raises:
        ValueError: if the other axes do not divide the devices.
    """
    others = math.prod(size for size in sizes.values() if size != -1)
    if -1 not in sizes.values():
        return sizes
    if num_devices % others:
        raise ValueError(f"mesh {format_mesh(sizes)} needs a multiple of {others} devices, has {num_devices}")
    return {axis: num_devices // others if size == -1 else size for axis, size in sizes.items()}


def emulate_devices(count: int) -> None:
    """Emulate `count` devices in this process if JAX runs on a CPU; once JAX has started, nothing happens.

    Existing XLA_FLAGS are kept. An accelerator's devices are never replaced by emulated ones.
    """
    platforms = jax.config.jax_platforms
    if platforms and "cpu" not in platforms.split(","):
        return
    _append_emulation_flags()
    with contextlib.suppress(RuntimeError):  # JAX has started
        jax.config.update("jax_num_cpu_devices", max(count, jax.config.jax_num_cpu_devices))


def ensure_devices(count: int) -> None:
    """Emulate `count` devices if JAX runs on a CPU and has not started; then check that there are that many.

    Among several processes each emulates its share.

    Raises:
        ValueError: if there are fewer devices, with both numbers.
    """
    if count > 1 and not jax.distributed.is_initialized():
        emulate_devices(count)
    have = jax.device_count()
    if have < count:
        platform = jax.devices()[0].platform
        reason = "; CPU devices can only be emulated before JAX starts" if platform == "cpu" else ""
        raise ValueError(f"not enough devices: needs {count}, has {have} ({platform}){reason}")


def make_mesh(sizes: dict[str, int]) -> Mesh:
    """Return a mesh over the first devices with `AxisType.Auto` axes ("dp", "pp", "tp"), tp on the fastest ones.

    Args:
        sizes: size of each axis, as `parse_mesh` returns it.

    Raises:
        ValueError: if there are too few devices and they cannot be emulated.
    """
    if -1 in sizes.values():
        sizes = resolve_sizes(sizes, jax.device_count())
    shape = tuple(sizes[axis] for axis in AXES)
    count = math.prod(shape)
    ensure_devices(count)
    devices = np.array(jax.devices()[:count]).reshape(shape)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _append_emulation_flags() -> None:
    flags = os.environ.get("XLA_FLAGS", "")
    extra = [f"{name}={value}" for name, value in _EMULATION_FLAGS.items() if name not in flags]
    os.environ["XLA_FLAGS"] = " ".join([*flags.split(), *extra])
