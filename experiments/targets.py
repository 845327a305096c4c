"""Devices that do not exist: a mesh of GPUs to compile for, described by files inside JAX's CUDA plugin.

The process must have JAX_PLATFORMS=cpu: the plugin then answers for the compiler and looks for no driver.
"""

import importlib.metadata
import importlib.util
import math
import mmap
from pathlib import Path

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

_DEVICES = {
    "a100": b"NVIDIA A100-SXM4-80GB",
    "h100": b"NVIDIA H100 80GB HBM3",
    "h200": b"NVIDIA H200 141GB HBM3e",
    "b200": b"NVIDIA B200",
}


GPUS = tuple(_DEVICES)
CAPABILITIES = {"a100": "8.0", "h100": "9.0", "h200": "9.0", "b200": "10.0"}
"""Compute capability of each, as JAX spells it."""


def missing_compiler() -> str | None:
    """Return why nothing can be compiled for GPUs here, on one line that says what to install; None if it can."""
    version = jax.lib.__version__
    install = f'pip install --no-deps "jax-cuda13-plugin=={version}" "jax-cuda13-pjrt=={version}"'
    if plugin_library() is None:
        return f"JAX's CUDA compiler is not installed: {install}"
    plugin = importlib.metadata.version("jax-cuda13-plugin")
    if plugin != version:
        return f"jax-cuda13-plugin {plugin} does not fit jaxlib {version}: {install}"
    if target_config("h200") is None:
        return f"jax-cuda13-plugin {plugin} carries no description of GPUs (0.12.0.1 does; it needs Python 3.12)"
    return None


def plugin_library() -> Path | None:
    """Return the shared library of the CUDA plugin, None if no plugin is installed."""
    if importlib.util.find_spec("jax_plugins") is None:
        return None
    spec = importlib.util.find_spec("jax_plugins.xla_cuda13")
    return Path(spec.origin).with_name("xla_cuda_plugin.so") if spec and spec.origin else None


def target_config(gpu: str) -> str | None:
    """Return the text of the GpuTargetConfigProto of a GPU, as the plugin carries it; None if this plugin does not."""
    library = plugin_library()
    assert library is not None
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        name = data.find(b'device_description_str: "' + _DEVICES[gpu] + b'"')
        start, end = data.rfind(b"gpu_device_info {", 0, name), data.find(b"\0", name)
        if name < 0 or start < 0:
            return None
        text = data[start:end].decode("ascii")
    assert text.count("{") == text.count("}"), text
    return text


def mesh(gpu: str, sizes: dict[str, int]) -> Mesh:
    """Return a mesh of GPUs of one host, to lower and compile for; nothing can run on it."""
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name=gpu,
        target_config=target_config(gpu),
        topology=f"1x1x{math.prod(sizes.values())}",
    )
    devices: np.ndarray = np.array(topology.devices).reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
