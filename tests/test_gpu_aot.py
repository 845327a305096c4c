"""The two-hop all-reduce with the Triton kernels, compiled for a GPU on a machine without one.

Needs JAX's CUDA 13 plugin of the installed jaxlib's version (0.12 or later: older ones carry no descriptions of GPUs),
without its dependencies, and an assembler:

    pip install --no-deps "jax-cuda13-plugin==$jaxlib" "jax-cuda13-pjrt==$jaxlib"
    pip install --no-deps nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88    # unless CUDA 13 is installed
    pytest -m gpu_aot

With TACO_REQUIRE_GPU_AOT set, a missing part is a failure instead of a skip.
"""

import re

import pytest
from gpu_aot import process, ptx

from experiments.hlo import read_collectives

pytestmark = pytest.mark.gpu_aot

RANKS = 8
BF16_MESSAGE = 8192 * 4096 * 2
"""Bytes of one shard in `gpu_aot.two_hop`."""
VALUES_PER_THREAD = 64
"""Of a tile of 8192 values, with 4 warps."""
SCALAR_LOADS, SCALAR_STORES = 2, 5
"""The alphas, and the slots of the observation."""


@pytest.fixture(scope="module")
def h200(tmp_path_factory) -> tuple[str, dict[str, ptx.Kernel]]:
    """HLO of the program and its kernels by name."""
    process.require_compiler()
    folder = tmp_path_factory.mktemp("h200")
    process.run("gpu_aot.two_hop", "h200", str(folder / "program.hlo"), **process.dumping_ptx(folder))
    kernels = {kernel.name: kernel for kernel in ptx.read_kernels(folder, "taco_")}
    return (folder / "program.hlo").read_text(), kernels


def test_both_hops_are_uint8_and_half_of_bf16(h200):
    program, _ = h200
    found = read_collectives(program, {"tp": RANKS})
    assert [(c.op, c.dtype, c.count, c.site, c.direction) for c in found] == [
        ("all-to-all", "u8", 1, "mlp", "forward"),
        ("all-gather", "u8", 1, "mlp", "forward"),
    ]
    bf16 = 2 * (RANKS - 1) / RANKS * BF16_MESSAGE
    assert sum(c.bytes_per_step for c in found) * 2 == bf16


def test_nothing_but_the_kernels_and_the_hops_touches_the_tensor(h200):
    """No copy, cast or padding beside the three passes of the design."""
    program, kernels = h200
    entry = program[program.index("\nENTRY ") :]
    assert entry.count('custom_call_target="__gpu$xla.gpu.triton"') == len(kernels) == 3
    others = [line for line in entry.splitlines() if any(f" {op}(" in line for op in ("fusion", "copy", "transpose"))]
    assert all("f32[2,2,5]" in line or "%param.3" in line for line in others), others


@pytest.mark.parametrize("name", ["taco_encode", "taco_reduce", "taco_decode"])
def test_registers_hold_everything(h200, name):
    kernel = h200[1][name]
    assert kernel.arch == "sm_90a"
    assert (kernel.stack, kernel.spill_stores, kernel.spill_loads) == (0, 0, 0)
    assert kernel.count(r"(ld|st)\.local") == 0
    limit = 192 if name == "taco_reduce" else 128
    assert kernel.registers <= limit


@pytest.mark.parametrize(
    ("name", "loads", "stores"),
    [
        ("taco_encode", 2 * VALUES_PER_THREAD, VALUES_PER_THREAD),
        ("taco_reduce", RANKS * VALUES_PER_THREAD, VALUES_PER_THREAD),
        ("taco_decode", VALUES_PER_THREAD, 2 * VALUES_PER_THREAD),
    ],
)
def test_every_access_to_the_tensor_has_16_bytes(h200, name, loads, stores):
    """And each byte moves once: the bytes of a thread are those of its values."""
    kernel = h200[1][name]
    for direction, size, scalars in (("ld", loads, SCALAR_LOADS), ("st", stores, SCALAR_STORES)):
        wide = kernel.count(rf"{direction}\.global\.(v4\.b32|v2\.b64)$")
        assert wide * 16 == size
        assert kernel.count(rf"{direction}\.global") - wide <= scalars


def test_the_hardware_converts(h200):
    _, kernels = h200
    for name in ("taco_encode", "taco_reduce"):
        assert kernels[name].count(r"cvt\.rn\.satfinite\.e4m3x2\.f32$") >= VALUES_PER_THREAD // 2
    for name in ("taco_reduce", "taco_decode"):
        assert kernels[name].count(r"cvt\.rn\.f16x2\.e4m3x2$") >= VALUES_PER_THREAD // 2


def test_nan_is_put_back_after_every_clamp(h200):
    """A GPU's min and max drop it; interpreted, they keep it, so no other test would see it go missing."""
    clamps = {"taco_encode": 2, "taco_reduce": 1, "taco_decode": 1}
    for name, count in clamps.items():
        selections = re.findall(r"selp\.f32.*0f7FC00000", h200[1][name].text)
        assert len(selections) >= count * VALUES_PER_THREAD


def test_subnormal_values_are_kept(h200):
    """As plain jnp keeps them on a GPU; else the two implementations' bytes differ."""
    assert all(kernel.count(r".*\.ftz") == 0 for kernel in h200[1].values())
