"""The second half of the suite for every implementation: the values that users reported, extremes and collectives."""

import functools

import contract
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from codec_cases import INT8, TACO, TACO_BLOCK
from contract_parameters import ALL, served
from meshes import P, mesh, spmd

import taco_jax
from taco_jax import Compression
from taco_jax import codec as codecs
from taco_jax.config import Codec
from taco_jax.pallas import mosaic_gpu, registry

ONE_DEVICE = {"mosaic_gpu_interpret": "its interpreter takes one device at a time (compiled for eight: gpu_aot)"}
"""Collectives are not tried with them."""


@pytest.fixture(autouse=True)
def two_programs(monkeypatch):
    """So that small arrays take several steps of the pipeline."""
    monkeypatch.setattr(mosaic_gpu, "_PROGRAMS", 2)


def gaussian(block: int) -> np.ndarray:
    return np.random.default_rng(7).standard_normal(block).clip(-2, 2)


def field_blocks(block: int) -> dict[str, np.ndarray]:
    """One block for each situation that users reported; float64."""
    resize = lambda *values: np.resize(np.asarray(values, np.float64), block)  # noqa: E731
    tiny = {f"N2-{amax}": gaussian(block) / np.abs(gaussian(block)).max() * amax for amax in (1e-38, 1e-40, 1e-45)}
    spoiled = {f"N8-{bad}": np.where(np.arange(block) == 5, bad, gaussian(block)) for bad in (np.nan, np.inf, -np.inf)}
    return {
        "ordinary": gaussian(block),
        "N1": np.zeros(block),
        **tiny,
        "N3": gaussian(block) * 2.0**-30,
        "N4": resize(448, 463, 464, 465, 480, 3e38),
        "N5-448": resize(448, 1, -3),
        "N5-large": resize(448 * 2.0**60, 2.0**60),
        **spoiled,
        "N9-2.5e38": resize(2.5e38),
        "N9-3e38": resize(3e38),
    }


@served(ALL)
def test_field_cases_of_one_message(implementation, codec, dtype):
    blocks = field_blocks(codec.block)
    with np.errstate(over="ignore"):
        x = np.stack(list(blocks.values())).astype(np.float32).astype(jnp.dtype(dtype))
    x = x.reshape(1, -1)
    message, _ = contract.call("encode", codec, dtype, implementation, x)
    decoded, _ = contract.call("decode", codec, dtype, implementation, message)
    y = dict(zip(blocks, np.asarray(decoded, np.float64).reshape(len(blocks), codec.block), strict=True))
    x = dict(zip(blocks, x.reshape(len(blocks), codec.block).astype(np.float64), strict=True))
    rows = codec.scale == "block" or codec.hadamard
    for name, block in y.items():
        if name.startswith("N8"):
            assert np.isnan(block).all() if rows else np.isnan(block).sum() == 1
        else:
            assert np.isfinite(block).all()
    np.testing.assert_array_equal(y["N1"], 0)
    step = {"e4m3": 2.0**-4, "e5m2": 2.0**-3, "int8": 1 / 254}[codec.format]
    if codec.scale == "block" or not codec.hadamard:
        np.testing.assert_allclose(y["N5-448"][0], 448, rtol=2 * step if codec.hadamard else 0)
    for name in ("N2-1e-38", "N2-1e-40", "N2-1e-45"):
        # Two scales of 2^-126 are as near as a value of that size can be told.
        assert (np.abs(y[name]) <= np.abs(x[name]).max() + 2 * codec.qmax * oracles.SMALLEST_SCALE).all()
    if codec.scale == "adaptive":
        return
    np.testing.assert_array_equal(y["N3"] * 2.0**30, y["ordinary"])
    for name in ("N9-2.5e38", "N9-3e38", "N5-large"):
        assert (
            oracles.snr_db(x[name] * 2.0**-64, y[name] * 2.0**-64) >= {"e4m3": 20, "e5m2": 15, "int8": 35}[codec.format]
        )


@served(ALL)
def test_field_cases_of_sums(implementation, codec, dtype):
    """N16: sums beyond the format's maximum; N8: the NaN of one rank."""
    parts = np.zeros((4, 1, 4 * codec.block), jnp.dtype(dtype))
    first, second, third, fourth = (slice(i * codec.block, (i + 1) * codec.block) for i in range(4))
    parts[0, :, first], parts[1, :, first] = 448, 18
    parts[:, :, second] = 200
    parts[2, 0, third.start + 3] = np.nan
    parts[0, :, fourth], parts[3, :, fourth] = 3.5, -3.5
    alphas = jnp.asarray([2.0**-4, 2.0**-5], jnp.float32)
    options = {"implementation": implementation}

    def both(parts):
        messages, _ = codecs.encode(parts, codec, alphas[0], **options)
        message, _ = codecs.reduce(messages, codec, alphas, parts.dtype, **options)
        once = codecs.decode_sum(messages, codec, alphas[0], parts.dtype, **options)
        return once, codecs.decode(message, codec, alphas[1], parts.dtype, **options)

    relative = {"e4m3": 2.0**-4, "e5m2": 2.0**-3, "int8": 1 / 127}[codec.format]
    for hops, y in enumerate(contract.compiled(both, implementation)(parts), start=1):
        y = np.asarray(y, np.float32)[0]
        np.testing.assert_allclose(y[first], 466, rtol=hops * relative)
        np.testing.assert_allclose(y[second], 800, rtol=hops * relative)
        bad = slice(None) if codec.scale == "block" or codec.hadamard else 3
        assert np.isnan(y[third][bad]).all()
        np.testing.assert_array_equal(y[fourth], 0)


@served(contract.OTHERS, {"taco": TACO, "taco_block": TACO_BLOCK}, slower=())
def test_extremes(implementation, codec, dtype):
    """Subnormal values, values whose product with alpha overflows, saturated and non-finite ones."""
    x = np.random.default_rng(2).standard_normal((64, 128)).astype(np.float32)
    x = np.clip(x, -1.9, 1.9) * np.ldexp(np.float32(1), np.linspace(-149, 127, 64).astype(int)[:, None])
    x[5, 7], x[9, 0], x[11, 127], x[13] = np.nan, np.inf, -np.inf, 0.0
    x[17] = -0.0
    x = jnp.asarray(x, dtype)
    plain, fused = (
        contract.compiled(functools.partial(codecs.encode, codec=codec, observe=True, implementation=i), i)
        for i in ("xla", implementation)
    )
    for alpha in (2.0**-126, 1.0, 2.0**120):
        (expected, seen), (got, also) = (encode(x, alpha=jnp.float32(alpha)) for encode in (plain, fused))
        contract.assert_encoded(got, expected, codec, implementation)
        np.testing.assert_allclose(also, seen, rtol=contract.OBSERVED_TOLERANCE, atol=1e-30)


@served(contract.OTHERS, {"taco": TACO, "fp8-32": Codec("e4m3", 32)})
def test_sums_of_arbitrary_messages(implementation, codec, dtype):
    """All bytes, NaN and scales that no encoder writes among them; ratios of alphas beyond what f32 divides."""
    case = contract.Case("reduce", "bfloat16", 128 * 33, "", codec.format, codec.block, codec.hadamard, 5)
    random = np.random.default_rng(8)
    messages = random.integers(
        0, 256, (case.ranks, 1, case.columns * (codec.block + codec.scale_bytes) // codec.block), np.uint8
    )
    messages[..., 8 * 128 : case.columns] &= 0xBF  # smaller than 2, hence without NaN
    if codec.scale_bytes:
        messages[..., case.columns + 1 :: 2] &= 0x7F  # scales are positive
    plain, fused = (
        contract.compiled(
            functools.partial(codecs.reduce, codec=codec, dtype=jnp.dtype(dtype), observe=True, implementation=i), i
        )
        for i in ("xla", implementation)
    )
    for alphas in ((1.0, 1.0), (2.0, 0.25), (2.0**-100, 2.0**100), (2.0**100, 2.0**-100)):
        alphas = jnp.asarray(alphas, jnp.float32)
        (expected, seen), (got, also) = (reduce(messages, alphas=alphas) for reduce in (plain, fused))
        contract.assert_same(got, expected, codec)
        np.testing.assert_allclose(also, seen, rtol=contract.OBSERVED_TOLERANCE, atol=1e-30)


def all_reduce(x, **options):
    return taco_jax.psum(x, "tp", **options)


def reduce_scatter(x, **options):
    return taco_jax.psum_scatter(x, "tp", scatter_dimension=0, tiled=True, **options)


@pytest.mark.parametrize(
    "implementation",
    [
        pytest.param(i, marks=[pytest.mark.skip(reason=f"{i}: {ONE_DEVICE[i]}")] if i in ONE_DEVICE else [])
        for i in contract.OTHERS
    ],
)
@pytest.mark.parametrize(("collective", "preset"), [
    (all_reduce, "taco"),
    (reduce_scatter, "int8"),
    pytest.param(all_reduce, "int8", marks=pytest.mark.slow),
    pytest.param(reduce_scatter, "taco", marks=pytest.mark.slow),
])  # fmt: skip
def test_collectives_forward_and_backward(collective, preset, implementation):
    """On four devices: psum, whose gradient is a psum, psum_scatter, whose gradient is an all_gather."""
    on, random = mesh(tp=4), np.random.default_rng(3)
    x = jnp.asarray(random.standard_normal((4, 8, 96)), jnp.bfloat16)
    weights = jnp.asarray(random.standard_normal((8, 96)), jnp.float32)
    scales = taco_jax.init_scales({"mlp": preset})["mlp"]
    result = P() if collective is all_reduce else P("tp")
    results = []
    for name in ("xla", implementation):
        compression = Compression.named(preset, min_bytes=0, implementation=name)

        def loss(x, scales, compression=compression):
            y = collective(x[0], compression=compression, scales=scales, name="mlp")
            return jnp.vdot(y.astype(jnp.float32), weights[: len(y)]), y

        step = spmd(
            jax.value_and_grad(loss, argnums=(0, 1), has_aux=True),
            on, (P("tp"), P()), ((P(), result), (P("tp"), P("tp"))), check_vma=False,
        )  # fmt: skip
        results.append(contract.compiled(step, name)(x, scales))
    ((_, plain), (plain_grad, plain_seen)), ((_, fused), (fused_grad, fused_seen)) = results
    for got, expected in ((fused, plain), (fused_grad, plain_grad)):
        assert got.dtype == expected.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(expected, np.float32))
        assert np.asarray(got, np.float32).any()
    np.testing.assert_allclose(fused_seen, plain_seen, rtol=contract.OBSERVED_TOLERANCE)
    hops = slice(None) if collective is all_reduce else 0
    assert np.asarray(plain_seen).reshape(4, 2, 2, 5)[:, :, hops].any(axis=-1).all(), "all is observed"


@pytest.mark.parametrize(("capability", "codec", "name"), [
    ("8.0", TACO, "triton_sm80"), ("8.0", INT8, "triton"), ("7.5", INT8, "xla"), ("9.0", TACO_BLOCK, "triton"),
])  # fmt: skip
def test_older_gpus_get_the_plain_implementation_with_one_warning(capability, codec, name, caplog):
    registry._first_supported.cache_clear()
    for _ in range(2):
        assert registry._first_supported(codec, jnp.dtype(jnp.bfloat16), "gpu", capability, ()) == name
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (name == "xla")
    assert all("triton is not used" in text and capability in text for text in warnings)
