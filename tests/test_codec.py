"""One message against the float64 oracle: the invariants that a codec keeps on one device."""

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracles
import pytest
from codec_cases import (
    ADAPTIVE,
    ALL,
    COLUMNS,
    FP8,
    INT4,
    INT6,
    INT8,
    ONE,
    PAPER,
    RANKS,
    ROUNDING,
    STATELESS,
    TACO,
    TACO_BLOCK,
    a_few_codecs,
    assert_within_budget,
    decode,
    encode,
    every_codec,
    every_stateless_codec,
    gaussian,
    trip,
    wire_scales,
)

from taco_jax import codec as codecs
from taco_jax import snr_db
from taco_jax.config import Codec
from taco_jax.scales import alpha_for

round_trip = jax.jit(codecs.round_trip, static_argnums=1)


@pytest.mark.parametrize(
    ("codec", "expected"),
    [
        (FP8, 31.8),
        (TACO_BLOCK, 31.7),
        (Codec("e5m2", 256, "block"), 25.7),
        (INT8, 43.8),
        (INT6, 31.6),
        (INT4, 18.6),
        (Codec("int4", 32, "block"), 20.3),
        (Codec("e3m4"), 37.9),
        (Codec("int6", 128, "block", signs=3), 31.6),
        (PAPER, 31.6),
        (TACO, 31.5),
        (Codec("e4m3", scale="adaptive"), 31.5),
    ],
)
def test_snr_of_gaussian_values(codec, expected):
    """Measured independently of this code, in float64."""
    x = gaussian(1 << 17)
    y = round_trip(x, codec)
    assert abs(oracles.snr_db(x, y) - expected) <= 0.3
    assert abs(float(snr_db(jnp.asarray(x), y)) - oracles.snr_db(x, y)) <= 0.01


def test_a_rotation_helps_integers_and_spreads_the_error_of_floats():
    """8 of 1024 channels times 50: int8 gains; e4m3 loses on the ordinary channels of an outlier's block."""
    x = gaussian(RANKS, COLUMNS)
    x[:, ::128] *= 50
    assert oracles.snr_db(x, trip(x, INT8)) >= 43 > 5 + oracles.snr_db(x, trip(x, STATELESS["int8-plain"]))
    ordinary = np.arange(COLUMNS) % 128 != 0
    kept, spread = (oracles.snr_db(x[:, ordinary], trip(x, codec)[:, ordinary]) for codec in (FP8, TACO_BLOCK))
    assert kept >= 31 and spread <= 20


@every_codec
def test_messages_equal_the_oracles(codec):
    """Float32 may put a value on the other side of a tie, or a scale within 2^-20 of the next: one of each at most."""
    x = gaussian(RANKS, COLUMNS, seed=3)
    message, _ = encode(x, codec, ONE)
    expected = oracles.message(x, codec)
    chex.assert_equal_shape([message, expected])
    other, layout = np.zeros((RANKS, COLUMNS // codec.block), bool), (codec.format, codec.block)
    if codec.scale != "adaptive":
        scales, exact = wire_scales(message, codec), wire_scales(expected, codec)
        other = np.abs(scales - exact) > (ROUNDING * exact if codec.scale == "paper" else 0)
    assert other.sum() <= 1
    codes, exact_codes = (
        oracles.blocks(oracles.payload_codes(np.asarray(m)[:, : COLUMNS * codec.value_bits // 8], *layout), codec)
        for m in (message, expected)
    )
    assert np.sum((codes != exact_codes)[~other]) <= 1
    decoded = decode(message, codec, ONE, jnp.float32)
    assert_within_budget(x, decoded, codec)
    assert abs(oracles.snr_db(x, decoded) - oracles.snr_db(x, oracles.round_trip(x, codec))) <= 0.02


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("codec", [Codec("e4m3", scale="adaptive"), ADAPTIVE], ids=["e4m3", "e5m2"])
def test_every_16_bit_pattern_is_cast_as_ml_dtypes_does(dtype, codec):
    """One cast from float32 after the clamp: casting by way of bfloat16 or float16 rounds twice."""
    x = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    message, _ = encode(x, codec, ONE)
    finite = np.isfinite(x.astype(np.float32))
    exact = np.clip(x[finite].astype(np.float32), -codec.qmax, codec.qmax)
    expected = exact.astype(oracles.FLOAT8[codec.format]).view(np.uint8)
    chex.assert_trees_all_equal(np.asarray(message)[finite], expected)
    assert np.isnan(np.asarray(decode(message, codec, ONE, jnp.float32))[~finite]).all()


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_ties_and_their_neighbours_are_cast_as_ml_dtypes_does(format):
    codec = Codec(format, 32, scale="adaptive")
    grid = np.arange(256, dtype=np.uint8).view(oracles.FLOAT8[format]).astype(np.float32)
    grid = np.unique(grid[np.isfinite(grid)])
    ties = (grid[1:] + grid[:-1]) / 2
    x = np.concatenate([ties, np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf))])
    x = oracles.pad(x, 32)
    message, _ = encode(x, codec, ONE)
    chex.assert_trees_all_equal(np.asarray(message), oracles.payload_bytes(oracles.to_grid(x, format), format))
    chex.assert_trees_all_equal(np.asarray(message), x.astype(oracles.FLOAT8[format]).view(np.uint8))


@every_codec
def test_a_zero_block_is_exact_and_alone(codec):
    x = gaussian(4 * codec.block)
    with_zeros = x.copy()
    with_zeros[codec.block : 2 * codec.block] = 0
    y, z = trip(x, codec), trip(with_zeros, codec)
    inside = np.arange(x.size) // codec.block == 1
    chex.assert_trees_all_equal(z[inside], np.zeros(codec.block, np.float32))
    chex.assert_trees_all_equal(z[~inside], y[~inside])


@every_codec
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_value_marks_its_block_only(codec, bad):
    """Without a transform and without block scales a value has no block: it alone becomes NaN. As published: zeros."""
    x = gaussian(4 * codec.block)
    y = trip(x, codec)
    x[2 * codec.block + 3] = bad
    z = trip(x, codec)
    marked = np.zeros(x.size, bool)
    marked[2 * codec.block : 3 * codec.block] = codec.hadamard is not None or codec.scale == "block"
    marked[2 * codec.block + 3] = True
    assert (z[marked] == 0).all() if codec.scale == "paper" else np.isnan(z[marked]).all()
    chex.assert_trees_all_equal(z[~marked], y[~marked])


@every_stateless_codec
@pytest.mark.parametrize("amax", [1e-38, 1e-40, 1e-45])
def test_the_smallest_numbers_stay_finite_and_small(codec, amax):
    x = (gaussian(codec.block) / 4).clip(-1, 1)
    x[0] = 1
    y = trip((x.astype(np.float64) * amax).astype(np.float32), codec)
    chex.assert_tree_all_finite(y)
    # Half a step above amax at most, a step being that of the smallest scale.
    assert np.abs(y.astype(np.float64)).max() <= amax + 0.5 * oracles.SMALLEST_SCALE


@every_stateless_codec
def test_finite_stays_finite(codec):
    """e4m3 casts 465 to NaN, and the rotation of a block of 2.5e38 exceeds float32."""
    for amax in (448, 463, 464, 465, 480, 57344, 61440, 65536, 2.5e38, 3e38):
        x = np.full(4 * codec.block, amax, np.float32)
        x[codec.block :: 2] *= -0.3
        y = trip(x, codec)
        chex.assert_tree_all_finite(y)
        assert_within_budget(x, y, codec)


@pytest.mark.parametrize("codec", [TACO, ADAPTIVE], ids=["taco", "adaptive"])
def test_an_alpha_far_too_large_clips_and_stays_finite(codec):
    for amax in (448, 463, 464, 465, 480, 1e30, 3e38):
        y = trip(np.full(codec.block, amax, np.float32), codec, 2.0**20)
        chex.assert_tree_all_finite(y)
        assert (y > 0).all() and (y <= amax).all()


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@a_few_codecs
def test_the_largest_number_of_the_dtype_stays_finite(codec, dtype):
    """Rounding up would otherwise leave the type's range."""
    largest = ml_dtypes.finfo(dtype).max.astype(np.float32)
    x = np.full((RANKS, COLUMNS), largest)
    alpha = alpha_for(jnp.asarray(x))
    y = np.asarray(decode(encode(x, codec, alpha)[0], codec, alpha, jnp.dtype(dtype)))
    assert y.dtype == dtype and np.isfinite(y.astype(np.float32)).all()
    assert_within_budget(x, y.astype(np.float64), codec, float(alpha))


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_power_of_two_scales_return_their_maximum_exactly(format):
    """qmax * 2^k has the scale 2^k; one step above it needs the next."""
    codec = Codec(format, 32, scale_dtype="e8m0")
    exponents = np.arange(-118, 112)
    x = np.zeros((exponents.size, 2, 32), np.float32)
    x[:, 0, 0] = np.ldexp(codec.qmax, exponents)
    x[:, 1, 1] = np.ldexp(codec.qmax * (1 + 2.0**-7), exponents)
    message, _ = encode(x.reshape(exponents.size, 64), codec, ONE)
    assert (np.asarray(message)[:, 64:] == np.stack([exponents, exponents + 1], -1) + 127).all()
    y = np.asarray(decode(message, codec, ONE, jnp.float32)).reshape(x.shape)
    chex.assert_trees_all_equal(y[:, 0], x[:, 0])
    assert (np.abs(y[:, 1] - x[:, 1]) <= 2.0**-4 * x[:, 1]).all()


@every_stateless_codec
def test_no_scale_is_rounded_below_the_maximum(codec):
    x = gaussian(RANKS, COLUMNS, seed=5)
    message, _ = encode(x, codec, ONE)
    scales = wire_scales(message, codec)
    slack = 1.0 if codec.scale == "paper" else {"bf16": 1 + 2.0**-7, "e8m0": 2.0}[codec.scale_dtype]
    amax = np.abs(oracles.rotate(oracles.blocks(x, codec), codec)).max(-1)
    assert (scales * codec.qmax * (1 + 2.0**-19) >= amax).all()
    assert (scales * codec.qmax <= amax * slack * (1 + 2.0**-19)).all()


@every_stateless_codec
def test_error_does_not_depend_on_the_unit(codec):
    """Bit for bit, until scales or values leave float32's normal range at an amax of about 1e-36.

    As published only within rounding: alpha, with its eps and its limits, is no power of two, but it cancels.
    """
    x = gaussian(COLUMNS, seed=7)
    x /= np.abs(x).max()
    y = trip(x, codec)
    scaled = [np.ldexp(trip(np.ldexp(x, k), codec), -k) for k in (-100, -30, 30, 100)]
    if codec.scale == "paper":
        assert any((z != y).any() for z in scaled)
        assert all(abs(oracles.snr_db(x, z) - oracles.snr_db(x, y)) <= 0.02 for z in scaled)
    else:
        chex.assert_trees_all_equal(y, *scaled)
    # e3m4 and the integers have scales closer to the maximum, which must stay above the smallest one.
    tiny = np.ldexp(x, {"int8": -118, "int6": -116, "int4": -114, "e3m4": -114}.get(codec.format, -119))
    # The octave that the maximum falls into moves e4m3 by up to 0.7 dB, and values under 2^-126 are flushed.
    assert oracles.snr_db(tiny, trip(tiny, codec)) >= oracles.snr_db(x, y) - 0.8


@pytest.mark.parametrize("codec", [TACO, ADAPTIVE], ids=["taco", "adaptive"])
def test_adaptive_error_does_not_depend_on_the_unit(codec):
    """The alpha that the state would settle on moves with the data, so the payload is the same."""
    x = gaussian(COLUMNS, seed=8)
    y = np.asarray(round_trip(x, codec))
    for k in (-100, -70, -30, 30, 70, 120):
        scaled = np.ldexp(x, k)
        z = np.asarray(round_trip(scaled, codec))
        # Near the bottom of the range the smallest values are flushed.
        chex.assert_trees_all_close(np.ldexp(z, -k), y, rtol=0, atol=0 if k > -100 else 2.0**-20)


def test_small_gradients_keep_their_precision():
    """A floor such as 1e-4 or 1e-12 in a scale would erase them."""
    x = gaussian(COLUMNS, seed=9)
    x *= np.float32(2e-9) / np.abs(x).max()
    larger = np.ldexp(x, 30)
    for codec in STATELESS.values():
        tolerance = 2.0**-20 if codec.scale == "paper" else 0
        chex.assert_trees_all_close(np.ldexp(trip(x, codec), 30), trip(larger, codec), rtol=tolerance, atol=tolerance)
    alpha = alpha_for(jnp.asarray(x))
    chex.assert_trees_all_equal(np.ldexp(trip(x, TACO, alpha), 30), trip(larger, TACO, alpha * 2.0**-30))


@pytest.mark.parametrize("shape", [(1,), (127,), (129,), (1000,), (2, 896), (3, 1600), (1, 3584), (13696,), (6283,)])
def test_any_size_keeps_shape_and_dtype(shape):
    x = gaussian(*shape, dtype=ml_dtypes.bfloat16)
    y = round_trip(x, TACO_BLOCK)
    chex.assert_shape(y, shape)
    assert y.dtype == jnp.bfloat16
    assert oracles.snr_db(x, y) >= 25


@every_codec
def test_padding_never_enters_a_scale(codec):
    """A last, incomplete block decodes as if it were a message of its own; empty arrays pass."""
    x = gaussian(codec.block + 5)
    y = np.asarray(round_trip(x, codec, 1.0))
    chex.assert_trees_all_equal(y, trip(x, codec))
    chex.assert_trees_all_equal(y[codec.block :], trip(x[codec.block :], codec))
    chex.assert_shape(codecs.round_trip(jnp.zeros((0, 8)), codec), (0, 8))


@a_few_codecs
def test_observing_and_repeating_change_no_byte(codec):
    x = gaussian(RANKS, COLUMNS, seed=11)
    observed, _ = encode(x, codec, ONE)
    again, _ = encode(x, codec, ONE)
    unobserved, seen = jax.jit(codecs.encode, static_argnums=1)(x, codec, ONE)
    assert seen is None
    chex.assert_trees_all_equal(observed, again, unobserved)


@hypothesis.settings(max_examples=30, deadline=None, database=None)
@hypothesis.given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=64))
def test_any_finite_values_stay_within_the_budget(values):
    x = np.resize(np.asarray(values, np.float32), 256)
    x[np.abs(x) < 2.0**-126] = 0
    for codec in ALL.values():
        if codec.scale == "adaptive":
            continue
        y = trip(x, codec)
        chex.assert_tree_all_finite(y)
        length = np.linalg.norm(oracles.blocks(x, codec), axis=-1)
        # Steps of the smallest scale, and values that leave the normal range on the way.
        floor = 8 * codec.block**0.5 * oracles.SMALLEST_SCALE
        budget = oracles.error_budget(x, codec) * (1 + 2.0**-10) + length * ROUNDING + floor
        assert (oracles.block_errors(x, y, codec) <= budget).all()
