"""The options of XLA that the training step is compiled with on GPUs, so that messages travel behind kernels."""

import os
import re
from pathlib import Path

from jax.sharding import Mesh

_GPU_OPTIONS: dict[str, bool | int] = {
    # XLA would join the all-gathers of a message's chunks again; then none travels while another is decoded. Smaller
    # ones, such as those of the scales, are still joined.
    "xla_gpu_all_gather_combine_threshold_bytes": 65536,
    # Without it XLA waits for each message where it starts it; some versions leave it off.
    "xla_gpu_enable_latency_hiding_scheduler": True,
}
_FLAG = re.compile(r"--(xla_\w+)")


def step_options(mesh: Mesh) -> dict[str, bool | int]:
    """Return the options to compile the step with on a mesh, in this process's environment."""
    return gpu_options(mesh.devices.flat[0].platform, os.environ.get("XLA_FLAGS", ""))


def gpu_options(platform: str, xla_flags: str) -> dict[str, bool | int]:
    """Return the options to compile the step with: those that matter on GPUs and that the user has not set.

    Args:
        platform: of the mesh's devices, as JAX names it; anything but a GPU gets none.
        xla_flags: the environment's XLA_FLAGS: flags, or the path of a file with flags.
    """
    if platform not in ("gpu", "cuda", "rocm"):
        return {}
    chosen = _FLAG.findall(_flags(xla_flags))
    return {name: value for name, value in _GPU_OPTIONS.items() if name not in chosen}


def describe(options: dict[str, bool | int]) -> str:
    """Return the options as the flags that would set them."""
    return " ".join(f"--{name}={str(value).lower()}" for name, value in options.items())


def _flags(xla_flags: str) -> str:
    # XLA takes what begins with no dash for the name of a file.
    if xla_flags and not xla_flags.lstrip().startswith("-") and Path(xla_flags).is_file():
        return Path(xla_flags).read_text()
    return xla_flags
