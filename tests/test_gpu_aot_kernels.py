"""Every Triton kernel, compiled for each GPU on a machine without one; `test_gpu_aot.py` says what that needs."""

import pytest
from gpu_aot import kernels, process, resources

from taco_jax.config import INTEGERS, Codec
from taco_jax.pallas.triton_kernels import WARPS, Tiling

pytestmark = pytest.mark.gpu_aot

ROOM = 16
"""Registers below the table that call for a tighter table."""
UPDATE = "PYTHONPATH=tests:. python -m gpu_aot.resources --write"


@pytest.fixture(scope="module", params=process.ARCHITECTURES)
def compiled(request, tmp_path_factory):
    """The GPU, and {(codec, operation): its kernel and cost}."""
    process.require_compiler()
    return request.param, resources.compile_all(request.param, tmp_path_factory.mktemp(request.param))


def test_registers_hold_everything(compiled):
    gpu, found = compiled
    for name, (kernel, _) in found.items():
        assert kernel.arch == process.ARCHITECTURES[gpu], name
        assert (kernel.stack, kernel.spill_stores, kernel.spill_loads) == (0, 0, 0), name
        assert kernel.count(r"(ld|st)\.local") == 0, name


def test_no_kernel_needs_more_than_the_table_says(compiled, capsys):
    """Of registers, whose number decides how many programs run at once, and of shared memory."""
    gpu, found = compiled
    allowed = resources.read_table()[gpu]
    assert allowed.keys() == found.keys(), f"the table has other kernels: {UPDATE}"
    worse = [
        f"{gpu} {name}: {f.cost}, at most {allowed[name]}" for name, f in found.items() if f.cost.exceeds(allowed[name])
    ]
    assert not worse, "\n".join([*worse, f"if that is the price of something: {UPDATE}"])
    better = [name for name, f in found.items() if f.cost.registers < allowed[name].registers - ROOM]
    if better:
        with capsys.disabled():
            print(f"\n{gpu}: {better} need over {ROOM} registers less than the table says: {UPDATE}")


def values_per_thread(codec: Codec, gpu: str) -> int:
    tiling = Tiling(codec, 1 << 20, 1 << 10, integer_casts=kernels.casts_with_integers(codec, gpu))
    return tiling.rows * codec.block // (32 * WARPS)


def test_every_access_to_the_tensor_has_16_bytes(compiled):
    """And each byte moves once. The other accesses are to scales, alphas and the observation, at most 4 bytes each.

    Packed blocks of 32 have pieces of 8 bytes, which is how much of their messages moves at once.
    """
    gpu, found = compiled
    for name, (kernel, _) in found.items():
        codec, operation = kernels.CODECS[name[0]], name[1]
        values = values_per_thread(codec, gpu)
        message = values * codec.value_bits // 8
        messages = {"encode": 0, "decode": message, "decode_residual": message}.get(operation, kernels.RANKS * message)
        reads = {"encode": 2 * values, "decode_residual": 2 * values}.get(operation, 0)
        moved = {
            "ld": (reads, messages),
            "st": (2 * values, 0) if operation.startswith("decode") else (0, message),
        }
        halves = codec.value_bits < 8 and codec.block == 32
        for direction, (tensor, payload) in moved.items():
            wide = kernel.count(rf"{direction}\.global\.(v4\.b32|v2\.b64)$")
            half = kernel.count(rf"{direction}\.global\.(v2\.b32|b64)$")
            assert (wide * 16, half * 8) == ((tensor, payload) if halves else (tensor + payload, 0)), (name, direction)
            assert kernel.count(rf"{direction}\.global\.\w*\.?(b128|v4\.b16|v8)") == 0, (name, direction)


def test_the_hardware_converts(compiled):
    """Two values with one instruction; there is none for integers and on GPUs before sm_89."""
    gpu, found = compiled
    for name, (kernel, _) in found.items():
        codec, operation = kernels.CODECS[name[0]], name[1]
        packed = kernel.count(r"cvt\.[\w.]*(e4m3|e5m2)")
        if codec.format in INTEGERS or kernels.casts_with_integers(codec, gpu):
            assert packed == 0, name
            continue
        pairs = values_per_thread(codec, gpu) // 2
        if operation in ("encode", "reduce"):
            assert kernel.count(rf"cvt\.rn\.satfinite\.{codec.format}x2\.f32$") >= pairs, name
        if operation != "encode":
            ranks = kernels.RANKS if operation in ("reduce", "decode_sum") else 1
            assert kernel.count(rf"cvt\.rn\.f16x2\.{codec.format}x2$") >= pairs * ranks, name


def test_subnormal_values_are_kept(compiled):
    """As plain jnp keeps them on a GPU; else the two implementations' bytes differ."""
    _, found = compiled
    assert all(kernel.count(r".*\.ftz") == 0 for kernel, _ in found.values())
