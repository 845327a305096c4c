"""The sum of the ranks' messages, coded again or not, and what is observed of both hops, against the oracle."""

import chex
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from codec_cases import (
    ADAPTIVE,
    ALL,
    COLUMNS,
    FP8,
    HALF_STEP,
    INT8,
    ONE,
    ONES,
    PAPER,
    RANKS,
    ROUNDING,
    STATELESS,
    TACO,
    assert_within_budget,
    decode,
    decode_sum,
    encode,
    every_codec,
    every_stateless_codec,
    gaussian,
    ranks,
    reduce,
    sums,
)


@every_codec
def test_the_sum_is_that_of_the_decoded_parts(codec):
    parts = gaussian(RANKS, COLUMNS, seed=12)
    messages, _ = encode(parts, codec, ONE)
    total = np.asarray(decode_sum(messages, codec, ONE, jnp.float32), np.float64)
    decoded = np.asarray(decode(messages, codec, ONE, jnp.float32), np.float64)
    chex.assert_trees_all_close(total, decoded.sum(0), atol=RANKS * ROUNDING * np.abs(decoded).max(), rtol=0)


def test_the_sum_is_taken_in_rank_order():
    """(2^24 + 1) + 1 is 2^24 in float32, 1 + 1 + 2^24 is not."""
    for order, expected in (((2.0**24, 1, 1), 2.0**24), ((1, 1, 2.0**24), 2.0**24 + 2)):
        once, _ = sums(ranks(*order), STATELESS["e8m0"])
        assert (once == np.float32(expected)).all()


@pytest.mark.parametrize(("parts", "total"), [((448, 18), 466), ((200, 200, 200, 200), 800)])
@every_codec
def test_sums_beyond_the_format_do_not_overflow(codec, parts, total):
    alphas = (2.0**-4, 2.0**-5) if codec.scale == "adaptive" else (1.0, 1.0)
    once, twice = sums(ranks(*parts), codec, alphas)
    relative = HALF_STEP[codec.format] * (2 if codec.format.startswith("int") else 1)
    assert (np.abs(once - total) <= relative * total).all()
    assert (np.abs(twice - total) <= 2 * relative * total).all()


@every_stateless_codec
def test_reduce_equals_the_oracle(codec):
    """The scales of the ranks span three decades; a block differs if its scale or one of its codes does."""
    parts = gaussian(RANKS, COLUMNS, seed=13) * np.float32(10.0) ** np.arange(-3, 1, dtype=np.float32)[:, None]
    _, twice = sums(parts, codec)
    q, s = oracles.encode(parts, codec)
    exact = oracles.decode(*oracles.code((q * s).sum(0), codec), codec)
    assert np.sum(oracles.block_errors(exact, twice, codec) > ROUNDING * np.abs(exact).max()) <= 1
    assert_within_budget(oracles.rows(oracles.rotate((q * s).sum(0), codec)), twice, codec)


@every_stateless_codec
def test_the_largest_part_does_not_hide_the_others(codec):
    """Each part's error is relative to its own maximum, not to that of the group."""
    parts = gaussian(RANKS, COLUMNS, seed=13) * np.float32(10.0) ** np.arange(-3, 1, dtype=np.float32)[:, None]
    parts[3] = 0
    parts[3, :] = np.resize([2.0**10, -(2.0**10)], COLUMNS)
    messages, _ = encode(parts, codec, ONE)
    for row, part in zip(np.asarray(decode(messages, codec, ONE, jnp.float32)), parts, strict=True):
        least = {"e4m3": 29, "e5m2": 24, "e3m4": 35, "int8": 40, "int6": 28, "int4": 17}
        assert oracles.snr_db(part, row) >= least[codec.format]


@every_stateless_codec
def test_sums_of_huge_rotated_values_stay_finite(codec):
    """q * s of a rotated 2.5e38 exceeds float32, though the sum of the ranks does not."""
    once, twice = sums(ranks(0, 2.5e38, -0.5e38), codec)
    chex.assert_trees_all_close(once, np.full(COLUMNS, 2e38, np.float32), rtol=2.0**-3)
    chex.assert_trees_all_close(twice, np.full(COLUMNS, 2e38, np.float32), rtol=2.0**-2)


@every_stateless_codec
def test_sums_beyond_float32_are_clamped(codec):
    for y in sums(ranks(3e38, 3e38, 3e38, 3e38), codec):
        chex.assert_tree_all_finite(y)
        assert (y >= 3e38).all()


@every_codec
def test_parts_that_cancel_exactly_sum_to_zero(codec):
    part = gaussian(COLUMNS, seed=14)
    for y in sums(ranks(part, -part), codec):
        chex.assert_trees_all_equal(y, np.zeros(COLUMNS, np.float32))


@every_codec
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_non_finite_part_marks_its_block_of_the_sum(codec, bad):
    """As published the block of that rank counts as zeros."""
    parts = gaussian(RANKS, COLUMNS, seed=15)
    clean = sums(parts, codec)
    parts[1, codec.block + 5] = bad
    marked = np.arange(COLUMNS) // codec.block == 1
    if not codec.hadamard and codec.scale == "adaptive":
        marked = np.arange(COLUMNS) == codec.block + 5
    if codec.scale == "paper":
        without = np.where(np.isfinite(parts).reshape(RANKS, -1, codec.block).all(-1).repeat(codec.block, -1), parts, 0)
        chex.assert_trees_all_equal(sums(parts, codec), sums(without, codec))
        return
    for y, z in zip(sums(parts, codec), clean, strict=True):
        chex.assert_trees_all_equal(np.isnan(y), marked)
        chex.assert_trees_all_equal(y[~marked], z[~marked])


@pytest.mark.parametrize("codec", [TACO, ADAPTIVE, INT8, FP8, PAPER], ids=["taco", "adaptive", "int8", "fp8", "paper"])
def test_observations_of_both_hops(codec):
    """Sum of squares, saturated and squared error of z = alpha x, in float64 by the oracle."""
    alpha, after = 2.0, 0.5
    parts = gaussian(RANKS, COLUMNS, seed=16)
    if codec.scale == "adaptive":
        parts[0, 7] = {"e4m3": 3000.0, "e5m2": 30000.0}[codec.format]
    messages, seen = encode(parts, codec, jnp.float32(alpha))
    _, seen_sum = reduce(messages, codec, jnp.asarray([alpha, after], jnp.float32), jnp.float32)
    y = oracles.rotate(oracles.blocks(parts, codec), codec)
    q, s = oracles.code(y, codec, alpha)
    total = (q * s).sum(0)
    for observed, values, unit in ((seen, y, alpha), (seen_sum, total, after)):
        chex.assert_shape(observed, (5,))
        squares, count, saturated, nonfinite, noise = map(float, observed)
        limit = codec.qmax if codec.scale == "adaptive" else np.inf
        q, s = oracles.code(values, codec, unit)
        chex.assert_trees_all_close(squares, np.square((values * unit).clip(-limit, limit)).sum(), rtol=1e-4)
        chex.assert_trees_all_close(noise, np.square((values - q * s) * unit).sum(), rtol=1e-2)
        assert saturated == (np.abs(values / s) > codec.qmax * 1.0001).sum()
        assert (saturated > 0) == (codec.scale == "adaptive" and unit == alpha)
        # The collective, which knows the unpadded size, fills in the count.
        assert count == nonfinite == 0


@pytest.mark.parametrize("codec", [TACO, INT8, PAPER], ids=["taco", "int8", "paper"])
def test_observations_count_non_finite_values_and_leave_them_out(codec):
    x = gaussian(RANKS, COLUMNS, seed=17)
    x[0, 3], x[1, 200], x[1, 201] = np.nan, np.inf, -np.inf
    _, seen = encode(x, codec, ONE)
    chex.assert_tree_all_finite(seen)
    assert float(seen[3]) == 3
    assert 0 < float(seen[0]) <= np.square(x[np.isfinite(x)], dtype=np.float64).sum() * 1.0001


@pytest.mark.parametrize("magnitude", [1e-37, 1e-25, 1e25, 1e38])
def test_observations_of_extreme_values_are_usable(magnitude):
    """Squares of such values leave float32: the sum stays finite, and above zero so that alpha can follow."""
    parts = (gaussian(RANKS, COLUMNS, seed=18).clip(-2, 2) * magnitude).astype(np.float32)
    for codec in ALL.values():
        messages, seen = encode(parts, codec, ONE)
        _, seen_sum = reduce(messages, codec, ONES, jnp.float32)
        chex.assert_tree_all_finite((seen, seen_sum))
        assert seen[0] > 0
        zeros, nothing = encode(np.zeros_like(parts), codec, ONE)
        assert nothing[0] == 0 and reduce(zeros, codec, ONES, jnp.float32)[1][0] == 0
