"""The two-hop all-reduce and the reduce-scatter with the Mosaic GPU kernels, compiled for an H200 without one.

Needs what `test_gpu_aot` needs. wgmma exists on sm_90a only: for a B200 the implementation declines.
"""

import re
import tempfile
from pathlib import Path

import jax
import pytest
from gpu_aot import process, ptx
from test_gpu_aot import BF16_MESSAGE, RANKS

from experiments.hlo import read_collectives

pytestmark = [
    pytest.mark.gpu_aot,
    pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="Mosaic GPU's kernels need JAX 0.12"),
]

RESOURCES = {
    # Registers of a thread (at most, with ptxas 13.0) and bytes of shared memory of a program of 128 threads.
    "taco_encode": (256, 100352),
    "taco_reduce": (128, 38912),
    "taco_decode": (128, 114688),
    "taco_decode of 8 ranks": (128, 114688),
}
SM_REGISTERS, SM_SHARED, SM_RESERVED, THREADS = 64 * 1024, 228 * 1024, 1024, 128
VALUES_PER_THREAD = {"taco_encode": 64, "taco_reduce": 16, "taco_decode": 64, "taco_decode of 8 ranks": 64}
WGMMA = r"wgmma\.mma_async\.sync\.aligned\.m64n128k16\.f32\.bf16\.bf16$"
TMA_IN = r"cp\.async\.bulk\.tensor\.\dd\.shared::cta\.global\.mbarrier"
TMA_OUT = r"cp\.async\.bulk\.(tensor\.\dd\.)?global\.shared::cta\.bulk_group"
"""Reduce's tiles are contiguous and leave without a descriptor."""


@pytest.fixture(scope="module")
def h200() -> tuple[str, dict[str, ptx.Kernel], dict[str, int]]:
    """HLO of the all-reduce; its kernels and the reduce-scatter's sum, and their shared memory, by name."""
    process.require_compiler()
    program, kernels, shared = _compiled("gpu_aot.two_hop")
    _, other_kernels, other_shared = _compiled("gpu_aot.scatter")
    kernels["taco_decode of 8 ranks"] = other_kernels["taco_decode"]
    shared["taco_decode of 8 ranks"] = other_shared["taco_decode"]
    return program, kernels, shared


def _compiled(program: str) -> tuple[str, dict[str, ptx.Kernel], dict[str, int]]:
    """Return the HLO, and by name the kernels and their bytes of shared memory."""
    with tempfile.TemporaryDirectory() as folder:  # the compiler's dump of its passes has 60 MB
        process.run(program, "h200", f"{folder}/program.hlo", "mosaic_gpu", MOSAIC_GPU_DUMP_TO=folder)
        kernels = {k.name.removesuffix("_mosaic_gpu_kernel"): k for k in ptx.read_kernels(Path(folder), "taco_")}
        shared = {
            path.name.rpartition("_")[0]: int(re.search(r"smem_scratch_bytes=(\d+)", path.read_text())[1])
            for path in Path(folder).glob("taco_*.resources.txt")
        }
        return Path(folder, "program.hlo").read_text(), kernels, shared


def test_both_hops_are_uint8_and_half_of_bf16(h200):
    found = read_collectives(h200[0], {"tp": RANKS})
    assert [(c.op, c.dtype, c.count) for c in found] == [("all-to-all", "u8", 1), ("all-gather", "u8", 1)]
    assert sum(c.bytes_per_step for c in found) * 2 == 2 * (RANKS - 1) / RANKS * BF16_MESSAGE


def test_nothing_but_the_kernels_and_the_hops_touches_the_tensor(h200):
    program = h200[0]
    entry = program[program.index("\nENTRY ") :]
    assert entry.count('custom_call_target="mosaic_gpu_v2"') == 3
    others = [line for line in entry.splitlines() if any(f" {op}(" in line for op in ("fusion", "copy", "transpose"))]
    assert all("fusion(%param.6)" in line and "f32[2,2,5]" not in line for line in others), others


@pytest.mark.parametrize("name", RESOURCES)
def test_two_programs_fit_a_multiprocessor_without_spills(h200, name):
    kernel, shared = h200[1][name], h200[2][name]
    assert kernel.arch == "sm_90a"
    assert (kernel.stack, kernel.spill_stores, kernel.spill_loads) == (0, 0, 0)
    assert kernel.count(r"(ld|st)\.local") == 0
    registers, expected = RESOURCES[name]
    assert kernel.registers <= registers
    assert shared == expected
    assert 2 * registers * THREADS <= SM_REGISTERS
    assert 2 * (shared + SM_RESERVED) <= SM_SHARED


@pytest.mark.parametrize("name", RESOURCES)
def test_tma_moves_the_tensor(h200, name):
    """Threads touch global memory for the alphas and the slots of the observation only."""
    kernel = h200[1][name]
    assert kernel.count(TMA_IN) >= 2
    assert kernel.count(TMA_OUT) == 1
    assert kernel.count(r"ld\.global") <= 2
    assert kernel.count(r"st\.global") == (0 if "decode" in name else 5)


@pytest.mark.parametrize("name", RESOURCES)
def test_the_tensor_cores_rotate(h200, name):
    """128 x 128 in steps of 16, and no transform in reduce."""
    assert h200[1][name].count(WGMMA) == (0 if name == "taco_reduce" else 8)


def test_the_hardware_converts(h200):
    _, kernels, _ = h200
    for name in ("taco_encode", "taco_reduce"):
        assert kernels[name].count(r"cvt\.rn\.satfinite\.e4m3x2\.f32$") == VALUES_PER_THREAD[name] // 2
    for name in ("taco_decode", "taco_decode of 8 ranks"):
        assert kernels[name].count(r"cvt\.rn\.f16x2\.e4m3x2$") == VALUES_PER_THREAD[name] // 2
    assert kernels["taco_reduce"].count(r"cvt\.rn\.f16x2\.e4m3x2$") >= RANKS * VALUES_PER_THREAD["taco_reduce"] // 2


def test_nan_survives_every_clamp(h200):
    """By the minimum and maximum that keep it, or by being put back."""
    for name, kernel in h200[1].items():
        clamps = 2 if name == "taco_encode" else 1
        assert kernel.count(r"min\.NaN\.f32") >= clamps * VALUES_PER_THREAD[name]
        assert kernel.count(r"min\.f32") == kernel.count(r"max\.f32") == 0


def test_subnormal_values_are_kept_and_divisions_are_exact(h200):
    for kernel in h200[1].values():
        assert kernel.count(r".*\.ftz") == 0
        assert kernel.count(r".*\.approx") == 0
