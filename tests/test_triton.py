"""The Triton kernels, interpreted on the CPU, against the plain implementation: the same bytes, the same values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import P, mesh, spmd

import taco_jax
from taco_jax import codec as codecs
from taco_jax.config import Codec
from taco_jax.pallas import registry, triton

TACO = Codec("e4m3", 128, "block", "adaptive")
PLAIN = Codec("e4m3", 128, None, "adaptive")
BOTH = ("xla", "triton_interpret")
NAN = 0x7F

encode = jax.jit(functools.partial(codecs.encode, observe=True), static_argnums=1, static_argnames="implementation")
decode = jax.jit(codecs.decode, static_argnums=(1, 3), static_argnames="implementation")
decode_sum = jax.jit(codecs.decode_sum, static_argnums=(1, 3), static_argnames="implementation")
reduce = jax.jit(
    functools.partial(codecs.reduce, observe=True), static_argnums=(1, 3), static_argnames="implementation"
)


def assert_same_bytes(got, expected):
    """Equal bytes; a NaN may have either sign."""
    got, expected = np.asarray(got), np.asarray(expected)
    unsigned = [np.where((b & NAN) == NAN, NAN, b) for b in (got, expected)]
    np.testing.assert_array_equal(*unsigned)


def assert_same_values(got, expected):
    """Equal bits; NaN equals NaN."""
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(expected, np.float32))


def compare(x, codec, alpha=1.0):
    """Encode with both and decode each payload with the other; returns the payload."""
    alpha = jnp.float32(alpha)
    (plain, plain_seen), (fused, fused_seen) = (encode(x, codec, alpha, implementation=name) for name in BOTH)
    assert_same_bytes(fused, plain)
    np.testing.assert_allclose(fused_seen, plain_seen, rtol=2e-5, atol=1e-30)
    assert_same_values(
        decode(plain, codec, alpha, x.dtype, implementation="triton_interpret"),
        decode(fused, codec, alpha, x.dtype, implementation="xla"),
    )
    return plain


@pytest.mark.parametrize(
    ("dtype", "codec"), [(jnp.bfloat16, TACO), (jnp.float16, TACO), (jnp.bfloat16, PLAIN)], ids=["bf16", "f16", "plain"]
)
def test_every_16_bit_pattern(dtype, codec):
    patterns = np.arange(1 << 16, dtype=np.uint16)
    shuffled = np.random.default_rng(0).permutation(patterns)
    for bits in (patterns, shuffled):
        for alpha in (1.0, 2.0**-20, 2.0**100):
            compare(jnp.asarray(bits.view(dtype).reshape(512, 128)), codec, alpha)


@pytest.mark.parametrize(
    ("rows", "dtype"), [(1, jnp.bfloat16), (3, jnp.float32), (33, jnp.float16), (257, jnp.bfloat16)]
)
def test_tiles_that_are_not_full(rows, dtype):
    """A tile has 64 rows of 128."""
    compare(jnp.asarray(np.random.default_rng(rows).standard_normal((rows, 128)) * 4, dtype), TACO)


@pytest.mark.parametrize("block", [32, 512])
def test_blocks_and_leading_axes(block):
    values = np.random.default_rng(block).integers(-8, 9, (2, 3, 2 * block))
    payload = compare(jnp.asarray(values, jnp.bfloat16), Codec("e4m3", block, "block", "adaptive"), 0.5)
    assert payload.shape == values.shape


def test_f32_extremes():
    """Subnormal values, values whose product with alpha overflows, saturated and non-finite ones."""
    x = np.random.default_rng(2).standard_normal((64, 128)).astype(np.float32)
    x = np.clip(x, -1.9, 1.9) * np.ldexp(np.float32(1), np.linspace(-149, 127, 64).astype(int)[:, None])
    x[5, 7], x[9, 0], x[11, 127], x[13] = np.nan, np.inf, -np.inf, 0.0
    x[17] = -0.0
    for alpha in (2.0**-126, 1.0, 2.0**120):
        compare(jnp.asarray(x), TACO, alpha)


@pytest.mark.parametrize(("ranks", "dtype"), [(3, jnp.float32), (8, jnp.bfloat16)])
def test_sums(ranks, dtype):
    """All byte values, NaN among them, in rank order; ratios of alphas beyond what f32 divides."""
    random = np.random.default_rng(ranks)
    messages = random.integers(0, 256, (ranks, 33, 128), np.uint8)
    messages[:, 8:] &= 0xBF  # smaller than 2, hence without NaN
    messages = jnp.asarray(messages)
    for alphas in ((1.0, 1.0), (2.0, 0.25), (2.0**-100, 2.0**100), (2.0**100, 2.0**-100)):
        alphas = jnp.asarray(alphas, jnp.float32)
        (plain, plain_seen), (fused, fused_seen) = (
            reduce(messages, TACO, alphas, jnp.bfloat16, implementation=name) for name in BOTH
        )
        assert_same_bytes(fused, plain)
        np.testing.assert_allclose(fused_seen, plain_seen, rtol=2e-5, atol=1e-30)
    plain, fused = (decode_sum(messages, TACO, jnp.float32(0.5), dtype, implementation=name) for name in BOTH)
    assert_same_values(fused, plain)


def test_all_reduce_forward_and_backward():
    """The whole two-hop all-reduce on four devices, its gradient (an all-reduce too) and the observation."""
    on = mesh(tp=4)
    x = jnp.asarray(np.random.default_rng(3).standard_normal((4, 40, 96)), jnp.bfloat16)
    weights = jnp.asarray(np.random.default_rng(4).standard_normal((40, 96)), jnp.float32)
    scales = taco_jax.init_scales({"mlp": "taco"})["mlp"]
    results = []
    for name in BOTH:
        compression = taco_jax.Compression.named("taco", min_bytes=0, implementation=name)

        def loss(x, scales, compression=compression):
            y = taco_jax.psum(x[0], "tp", compression=compression, scales=scales, name="mlp")
            return jnp.vdot(y.astype(jnp.float32), weights), y

        step = spmd(
            jax.value_and_grad(loss, argnums=(0, 1), has_aux=True),
            on, (P("tp"), P()), ((P(), P()), (P("tp"), P("tp"))), check_vma=False,
        )  # fmt: skip
        results.append(step(x, scales))
    ((_, plain), (plain_grad, plain_seen)), ((_, fused), (fused_grad, fused_seen)) = results
    assert_same_values(fused, plain)
    assert_same_values(fused_grad, plain_grad)
    np.testing.assert_allclose(fused_seen, plain_seen, rtol=2e-5)
    assert np.asarray(plain_seen).any(axis=-1).all(), "every direction and hop is observed"


def test_every_kernel_is_named():
    def all_reduce(x, scales):
        compression = taco_jax.Compression.named("taco", min_bytes=0, implementation="triton_interpret")
        return taco_jax.psum(x, "tp", compression=compression, scales=scales)

    mapped = spmd(all_reduce, mesh(tp=4), (P("tp"), P()), P(), check_vma=False)
    text = str(jax.make_jaxpr(mapped)(jnp.zeros((8, 128)), taco_jax.init_scales({"": "taco"})[""]))
    assert all(f"taco_{kernel}" in text for kernel in ("encode", "reduce", "decode"))


def test_a_name_never_falls_back():
    for codec, reason in (
        (Codec("e5m2", 128, "block", "adaptive"), "e5m2"),
        (Codec("e4m3", 128, "block"), "adaptive"),
        (Codec("e4m3", 256, "block", "paper"), "not 'paper'"),
    ):
        with pytest.raises(NotImplementedError, match=f"'triton': .*{reason}"):
            registry.resolve("triton", codec, jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="float64"):
        registry.resolve("triton", TACO, np.dtype("float64"))
    with pytest.raises(ValueError, match="'cuda'; there are triton, mosaic_gpu, xla, triton_interpret"):
        registry.resolve("cuda", TACO, jnp.bfloat16)


def test_without_a_name_the_cpu_gets_the_plain_implementation():
    assert registry.resolve(None, TACO, jnp.bfloat16).__name__ == "taco_jax.pallas.xla"


@pytest.mark.parametrize(("capability", "reason"), [("8.0", "8.9"), ("gfx942", "NVIDIA"), ("", "NVIDIA")])
def test_devices_without_the_conversion(capability, reason):
    assert reason in triton.device_unsupported_reason(capability)


def test_devices_with_the_conversion():
    assert [triton.device_unsupported_reason(c) for c in ("8.9", "9.0", "10.0", "12.0")] == [None] * 4


def test_axes_left_to_xla():
    """XLA would gather them around each kernel."""

    def all_reduce(x, scales):
        compression = taco_jax.Compression.named("taco", min_bytes=0, implementation="triton")
        return taco_jax.psum(x, "tp", compression=compression, scales=scales, split_dim=0)

    mapped = spmd(all_reduce, mesh(dp=2, tp=4), (P("tp"), P()), P(), axis_names={"tp"})
    with pytest.raises(NotImplementedError, match="partitions itself, .*dp"):
        jax.eval_shape(mapped, jnp.zeros((16, 128)), taco_jax.init_scales({"": "taco"})[""])
