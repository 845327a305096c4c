"""Stochastic rounding, keyed by `jax.random`, and seeded signs: unbiased, replayable, and refused where of no use."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from codec_cases import FP8, INT8, gaussian
from jax.sharding import PartitionSpec as P
from meshes import mesh

import taco_jax
from taco_jax import Codec, Compression
from taco_jax import codec as codecs

RANKS, KEYS = 4, 64
STOCHASTIC = {
    "int8": Codec("int8", 128, "block", rounding="stochastic"),
    "int4": Codec("int4", 32, rounding="stochastic"),
    "e4m3": Codec("e4m3", rounding="stochastic"),
    "e3m4": Codec("e3m4", 64, "block", rounding="stochastic", signs=1),
    "taco": Codec("e4m3", 128, "block", "adaptive", rounding="stochastic"),
}
every_codec = pytest.mark.parametrize("codec", STOCHASTIC.values(), ids=STOCHASTIC)


@functools.cache
def round_trips(codec):
    """x, and decode(encode(x)) with each of KEYS keys."""
    x = gaussian(8192, seed=21)
    keys = jax.random.split(jax.random.key(0), KEYS)
    return x, np.asarray(jax.jit(jax.vmap(lambda key: codecs.round_trip(x, codec, key=key)))(keys), np.float64)


@every_codec
def test_the_mean_over_keys_is_the_value(codec):
    """Errors of independent keys average out: 10 log10(keys) dB, which rounding to nearest would not gain."""
    x, trips = round_trips(codec)
    one = np.mean([oracles.snr_db(x, trip) for trip in trips[:8]])
    assert abs(oracles.snr_db(x, trips.mean(0)) - one - 10 * np.log10(KEYS)) <= 0.5
    nearest = oracles.round_trip(x, Codec(**{**vars(codec), "rounding": "nearest"}), 2.0)
    # The variance of a uniform remainder is 1/6 of a squared step, not 1/12.
    assert abs(oracles.snr_db(x, nearest) - one - 10 * np.log10(2)) <= 0.6


@pytest.mark.parametrize("codec", [STOCHASTIC["int4"], STOCHASTIC["e4m3"]], ids=["int4", "e4m3"])
def test_a_value_goes_to_one_of_its_two_neighbours(codec):
    x, trips = round_trips(codec)
    _, s = oracles.encode(x, codec)
    z, q = oracles.blocks(x, codec) / s, oracles.blocks(trips, codec) / s
    unit = oracles.step(z, codec.format)
    down, up = np.floor(z / unit) * unit, np.ceil(z / unit) * unit
    assert ((q == down) | (q == up)).all()
    share = (q > down).mean(0)[up > down]
    expected = ((z - down) / unit)[up > down]
    # Binomial: five standard deviations of each value, and of all.
    assert (np.abs(share - expected) <= 5 * np.sqrt(expected * (1 - expected) / KEYS) + 0.01).mean() >= 0.999
    assert abs(np.mean(share - expected)) <= 5 * 0.5 / np.sqrt(KEYS * share.size)


@every_codec
def test_equal_keys_give_equal_bytes(codec):
    x = gaussian(1024, seed=22)
    encode = jax.jit(codecs.encode, static_argnums=1)
    one, again, other = (encode(x, codec, jnp.float32(2.0), key=jax.random.key(k))[0] for k in (1, 1, 2))
    chex.assert_trees_all_equal(one, again)
    assert 0.2 < np.mean(np.asarray(one) != np.asarray(other)) < 0.9


def test_what_the_format_holds_exactly_stays():
    """Grid points, the maximum among them, have no remainder."""
    codec = Codec("int4", 32, rounding="stochastic")
    x = np.resize(np.arange(-7, 8), 256).astype(np.float32)
    for k in range(8):
        chex.assert_trees_all_equal(codecs.round_trip(jnp.asarray(x), codec, key=jax.random.key(k)), x)


def test_keys_are_wanted_where_they_are_used_and_refused_elsewhere():
    x = jnp.ones(128)
    with pytest.raises(ValueError, match="rounding='stochastic': a key of jax.random is .*; none is given"):
        codecs.round_trip(x, STOCHASTIC["int8"])
    with pytest.raises(ValueError, match="rounding='nearest': .* one is given, which nothing would use"):
        codecs.round_trip(x, FP8, key=jax.random.key(0))
    two = mesh(tp=2)
    for compression, key in ((Compression(STOCHASTIC["int8"], None), None), ("fp8", jax.random.key(0))):
        psum = functools.partial(taco_jax.psum, axis_name="tp", compression=compression, key=key, name="site")
        with pytest.raises(ValueError, match="psum 'site': a co.* key=.*"):
            jax.eval_shape(jax.shard_map(psum, mesh=two, in_specs=P("tp"), out_specs=P()), x)


@pytest.mark.parametrize("typed", [True, False])
def test_an_all_reduce_is_unbiased_replayable_and_differentiable(typed):
    """Forward and backward, each hop and rank with bits of its own."""
    codec = STOCHASTIC["int8"]
    compression = Compression(codec, codec, min_bytes=0)
    x, ct = gaussian(RANKS, 4096, seed=23), gaussian(RANKS, 4096, seed=24)

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh(tp=RANKS), in_specs=(P("tp"), P("tp"), P()), out_specs=(P(), P()))
    def run(x, ct, key):
        def both(x):
            total = taco_jax.psum(x[0], "tp", compression=compression, key=key, name="sum")
            copy = taco_jax.pvary(total, "tp", compression=compression, key=jax.random.fold_in(key, 9), name="copy")
            return total, copy

        (total, copy), pullback = jax.vjp(both, x)
        # The cotangent of `copy` is the compressed sum over the ranks; that of psum hands it to each rank's x.
        (back,) = pullback((jnp.zeros_like(total), ct[0] + 0 * copy))
        return total, taco_jax.pmean(back[0], "tp", compression=None)

    make = jax.random.key if typed else jax.random.PRNGKey
    results = [tuple(map(np.asarray, run(x, ct, make(k)))) for k in (0, *range(24))]
    chex.assert_trees_all_equal(results[0], results[1])
    for which, exact in ((0, x.sum(0)), (1, ct.sum(0))):
        samples = np.stack([r[which] for r in results[1:]]).astype(np.float64)
        one = np.mean([oracles.snr_db(exact, sample) for sample in samples])
        assert 36 <= one <= 39
        assert abs(oracles.snr_db(exact, samples.mean(0)) - one - 10 * np.log10(24)) <= 0.7


def test_signs_protect_a_constant_block():
    """A constant rotates into one value, which int4 then holds at the cost of nothing; with signs it is spread."""
    x = np.full(1024, 3.3, np.float32)
    y, z = (
        np.asarray(codecs.round_trip(jnp.asarray(x), Codec("int8", 128, "block", signs=signs))) for signs in (None, 7)
    )
    assert oracles.snr_db(x, y) > 45 and oracles.snr_db(x, z) > 35
    assert np.unique(y).size == 1 < np.unique(z).size
    # What meets a row of the matrix leaves one large value and hides the rest; signs make it ordinary.
    spiky = x + gaussian(1024, seed=25)
    small = [
        oracles.snr_db(spiky - 3.3, np.asarray(codecs.round_trip(jnp.asarray(spiky), codec)) - np.float32(3.3))
        for codec in (INT8, Codec("int8", 128, "block", signs=7))
    ]
    assert small[1] > small[0] + 5
