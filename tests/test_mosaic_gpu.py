"""The kernels for Mosaic GPU, interpreted with the race detector, against the plain implementation and float64."""

import functools

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
NAN = 0x7F
ROWS = 4 * 64 + 5
"""Two programs of three steps, where the last tile is cut and the one behind it is empty."""
ACCUMULATED = 2.0**-22
"""Rounding of a sum of 128 values of any order, relative to their length."""

HALF_A_STEP = 2.0**-8
"""Of bf16, relative."""

needs_mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="Mosaic GPU's kernels need JAX 0.12")

encode = jax.jit(functools.partial(codecs.encode, observe=True), static_argnums=1, static_argnames="implementation")
decode = jax.jit(codecs.decode, static_argnums=(1, 3), static_argnames="implementation")
decode_sum = jax.jit(codecs.decode_sum, static_argnums=(1, 3), static_argnames="implementation")
reduce = jax.jit(
    functools.partial(codecs.reduce, observe=True), static_argnums=(1, 3), static_argnames="implementation"
)


@pytest.fixture(autouse=True)
def two_programs(monkeypatch):
    """So that small arrays take several steps of the pipeline."""
    monkeypatch.setattr(mosaic_gpu, "_PROGRAMS", 2)


def assert_within_one_step(got, expected, share):
    """At most this share of the codes differs, and by one step; NaN stays NaN."""
    got, expected = np.asarray(got), np.asarray(expected)
    unknown = (expected & NAN) == NAN
    np.testing.assert_array_equal((got & NAN) == NAN, unknown)
    place = [np.where(b & 0x80, -1, 1) * (b & NAN).astype(int) for b in (got, expected)]
    steps = np.where(unknown, 0, np.abs(place[0] - place[1]))
    assert steps.max() <= 1
    assert (steps > 0).mean() <= share


def compare(x, alpha, share):
    """Encode with both."""
    (plain, plain_seen), (fused, fused_seen) = (encode(x, TACO, jnp.float32(alpha), implementation=i) for i in BOTH)
    assert_within_one_step(fused, plain, share)
    np.testing.assert_allclose(fused_seen, plain_seen, rtol=1e-4, atol=1e-30)
    return fused


@needs_mosaic
def test_integers_give_the_same_bytes():
    values = np.random.default_rng(0).integers(-8, 9, (ROWS, 128))
    for alpha in (1.0, 0.125):
        compare(jnp.asarray(values, jnp.bfloat16), alpha, share=0.0)


@needs_mosaic
def test_gaussian_values_and_rows_without_a_tile_of_their_own():
    values = np.random.default_rng(1).standard_normal((ROWS, 128)) * np.exp2(np.arange(ROWS) % 9)[:, None]
    payload = compare(jnp.asarray(values, jnp.bfloat16), 0.25, share=1e-4)
    assert payload.shape == values.shape


@needs_mosaic
def test_every_bf16_pattern():
    """NaN and infinity spread over their block and no further; the largest values stay finite."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    for bits in (patterns, np.random.default_rng(0).permutation(patterns)):
        for alpha in (1.0, 2.0**-124, 2.0**100):
            compare(jnp.asarray(bits.view(jnp.bfloat16).reshape(512, 128)), alpha, share=1e-4)


@needs_mosaic
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_decoded_sums_are_those_of_float64(ranks):
    """Each rank is rotated by itself; the sum is rounded to bf16 once."""
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
def test_decoding_integers_gives_the_same_bits():
    codes = np.random.default_rng(5).integers(-8, 9, (ROWS, 128)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    plain, fused = (decode(codes, TACO, jnp.float32(2.0), jnp.bfloat16, implementation=name) for name in BOTH)
    np.testing.assert_array_equal(np.asarray(fused, np.float32), np.asarray(plain, np.float32))


@needs_mosaic
@pytest.mark.parametrize("ranks", [3, 32])
def test_reduced_bytes_are_the_same(ranks):
    """All byte values, in rank order; ratios of alphas beyond what f32 divides."""
    random = np.random.default_rng(ranks)
    messages = random.integers(0, 256, (ranks, 69, 128), np.uint8)
    messages[:, 8:] &= 0xBF
    for alphas in ((2.0, 0.25), (2.0**-100, 2.0**100), (2.0**100, 2.0**-100)):
        (plain, plain_seen), (fused, fused_seen) = (
            reduce(messages, TACO, jnp.asarray(alphas, jnp.float32), jnp.bfloat16, implementation=name) for name in BOTH
        )
        assert_within_one_step(fused, plain, share=0.0)
        np.testing.assert_allclose(fused_seen, plain_seen, rtol=2e-5, atol=1e-30)


@needs_mosaic
def test_both_hops_of_integers():
    """What an all-reduce computes, on one device: the interpreter takes no second device while a kernel runs."""
    alphas, ranks = jnp.asarray((1.0, 0.5), jnp.float32), 3
    x = jnp.asarray(np.random.default_rng(3).integers(-4, 5, (ranks, ROWS, 128)), jnp.bfloat16)
    results = []
    for name in BOTH:
        messages = jnp.stack([encode(part, TACO, alphas[0], implementation=name)[0] for part in x])
        message, _ = reduce(messages, TACO, alphas, jnp.bfloat16, implementation=name)
        results.append((message, decode(message, TACO, alphas[1], jnp.bfloat16, implementation=name)))
    (plain, expected), (fused, got) = results
    np.testing.assert_array_equal(fused, plain)
    lengths = np.linalg.norm(np.asarray(expected, np.float64), axis=-1, keepdims=True)
    error = np.abs(np.asarray(got, np.float64) - np.asarray(expected, np.float64))
    assert (error <= 2 * HALF_A_STEP * np.abs(np.asarray(expected, np.float64)) + ACCUMULATED * lengths).all()
    assert (error == 0).mean() > 0.999


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


@pytest.mark.parametrize(("capability", "name"), [("9.0", "triton"), ("10.0", "triton"), ("8.0", "xla")])
def test_without_a_name_triton_comes_first(capability, name):
    assert registry._first_supported(TACO, jnp.dtype(jnp.bfloat16), "gpu", capability, ()) == name
