"""Compile for a GPU in a process of its own: a failure in LLVM or ptxas ends it, and XLA reads once where to dump."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import targets
from gpu_aot import ptx

ARCHITECTURES = {"h200": "sm_90a", "h100": "sm_90a", "b200": "sm_100a", "a100": "sm_80"}
"""What the PTX for each GPU is written for."""
_TESTS = Path(__file__).parents[1]


def require_compiler() -> None:
    """Skip the test, or fail it with TACO_REQUIRE_GPU_AOT set, where nothing can be compiled for GPUs."""
    reason = targets.missing_compiler()
    if reason is None and ptx.find_ptxas() is None:
        reason = "there is no ptxas: install the wheels nvidia-cuda-nvcc and nvidia-nvvm, or CUDA 13"
    if reason:
        (pytest.fail if os.environ.get("TACO_REQUIRE_GPU_AOT") else pytest.skip)(reason)


def run(*command: str, timeout: float = 300, **environment: str) -> None:
    """Run `python -m *command`, which may import the tests' programs, with more environment variables.

    Raises:
        RuntimeError: if it fails, with the end of what it wrote.
    """
    paths = [str(_TESTS), str(_TESTS.parent), os.environ.get("PYTHONPATH", "")]
    settings = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths), **environment}
    python = [sys.executable, "-m", *command]
    done = subprocess.run(python, env=settings, capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-4000:]}")


def dumping_ptx(folder: Path) -> dict[str, str]:
    """Return the environment in which XLA leaves the PTX of its kernels in a folder."""
    return {"XLA_FLAGS": f"--xla_dump_to={folder} --xla_dump_emitter_re=^ptx$"}
