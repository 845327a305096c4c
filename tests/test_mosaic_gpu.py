"""What is particular to the Mosaic GPU kernels; `test_contract.py` has what every implementation must do."""

import functools

import contract
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracles
import pytest

from taco_jax import codec as codecs
from taco_jax.config import Codec
from taco_jax.pallas import mosaic_gpu, registry

TACO = Codec("e4m3", 128, "block", "adaptive")
BOTH = ("xla", "mosaic_gpu_interpret")
ROWS = 4 * 64 + 5
"""Two programs of three steps, where the last tile is cut and the one behind it is empty."""
ACCUMULATED = 2.0**-22
"""Rounding of a sum of 128 values of any order, relative to their length."""

HALF_A_STEP = 2.0**-8
"""Of bf16, relative."""

needs_mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="Mosaic GPU's kernels need JAX 0.12")

decode_sum = jax.jit(codecs.decode_sum, static_argnums=(1, 3), static_argnames="implementation")
reduce = jax.jit(
    functools.partial(codecs.reduce, observe=True), static_argnums=(1, 3), static_argnames="implementation"
)


@pytest.fixture(autouse=True)
def two_programs(monkeypatch):
    """So that small arrays take several steps of the pipeline."""
    monkeypatch.setattr(mosaic_gpu, "_PROGRAMS", 2)


@needs_mosaic
def test_decoded_sums_are_those_of_float64():
    """Each rank is rotated by itself; the sum is rounded to bf16 once."""
    ranks = 8
    messages = np.random.default_rng(ranks).integers(0, 256, (ranks, ROWS, 128), np.uint8)
    messages[:, 3:] &= 0xBF  # smaller than 2, hence without NaN
    got = decode_sum(messages, TACO, jnp.float32(4.0), jnp.bfloat16, implementation="mosaic_gpu_interpret")
    codes = messages.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    exact = codes.sum(0) @ oracles.hadamard(128) / np.sqrt(128) / 4
    lengths = np.sqrt((codes**2).sum((0, 2)))[:, None] / 4
    error = np.abs(np.asarray(got, np.float64) - exact)
    unknown = np.isnan(exact)
    np.testing.assert_array_equal(np.isnan(np.asarray(got, np.float64)), unknown)
    assert unknown.any(axis=1).sum() >= 1
    assert (unknown | (error <= HALF_A_STEP * np.abs(exact) + ranks * ACCUMULATED * lengths)).all()


@needs_mosaic
def test_reduced_bytes_of_many_ranks_are_the_same():
    """All byte values, in rank order, in smaller tiles; ratios of alphas beyond what f32 divides."""
    ranks = 32
    random = np.random.default_rng(ranks)
    messages = random.integers(0, 256, (ranks, 69, 128), np.uint8)
    messages[:, 8:] &= 0xBF
    for alphas in ((2.0, 0.25), (2.0**-100, 2.0**100), (2.0**100, 2.0**-100)):
        (plain, plain_seen), (fused, fused_seen) = (
            reduce(messages, TACO, jnp.asarray(alphas, jnp.float32), jnp.bfloat16, implementation=name) for name in BOTH
        )
        contract.assert_same(fused, plain, TACO)
        np.testing.assert_allclose(fused_seen, plain_seen, rtol=contract.OBSERVED_TOLERANCE, atol=1e-30)


@needs_mosaic
def test_a_name_never_falls_back():
    for codec, reason in (
        (Codec("e5m2", 128, "block", "adaptive"), "e5m2"),
        (Codec("e4m3", 128, "block"), "adaptive"),
        (Codec("e4m3", 256, "block", "adaptive"), "256"),
        (Codec("e4m3", 128, None, "adaptive"), "None"),
    ):
        with pytest.raises(NotImplementedError, match=f"'mosaic_gpu': .*{reason}"):
            registry.resolve("mosaic_gpu", codec, jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="bf16 only, not for float16"):
        registry.resolve("mosaic_gpu", TACO, jnp.float16)


@needs_mosaic
def test_more_messages_than_one_copy_reads():
    with pytest.raises(NotImplementedError, match="at most 256 messages, not 300"):
        jax.eval_shape(lambda q, a: mosaic_gpu.reduce(q, TACO, a, observe=False),
                       jax.ShapeDtypeStruct((300, 2, 128), jnp.uint8), jnp.ones(2))  # fmt: skip


@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="this JAX has what the kernels need")
def test_older_jax_is_told():
    with pytest.raises(NotImplementedError, match="'mosaic_gpu': it needs JAX 0.12, this is"):
        registry.resolve("mosaic_gpu", TACO, jnp.bfloat16)


@pytest.mark.parametrize(("capability", "reason"), [("8.9", "wgmma"), ("10.0", "wgmma"), ("gfx942", "NVIDIA")])
def test_devices_without_wgmma(capability, reason):
    assert reason in mosaic_gpu.device_unsupported_reason(TACO, capability)


def test_hopper_has_wgmma():
    assert mosaic_gpu.device_unsupported_reason(TACO, "9.0") is None


@pytest.mark.parametrize(("capability", "name"), [("9.0", "triton"), ("10.0", "triton"), ("8.0", "triton_sm80")])
def test_without_a_name_triton_comes_first(capability, name):
    assert registry._first_supported(TACO, jnp.dtype(jnp.bfloat16), "gpu", capability, ()) == name
