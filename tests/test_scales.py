"""What is observed of the messages, and how the scales follow."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from codec_cases import COLUMNS, INT8, RANKS, TACO, decode, encode, gaussian, reduce
from collective_cases import compression
from jax import lax
from meshes import P, assert_equal_on_all_ranks, mesh, spmd

import taco_jax
from taco_jax import Codec, SitePair
from taco_jax.scales import alpha_for

ALPHA, MEAN_SQUARE, UPDATES, SKIPPED, MEAN_ERROR = range(5)
SUM_SQUARES, COUNT, SATURATED, NONFINITE, SUM_ERROR = range(5)


def state(alphas=1.0):
    """A fresh state with these alphas [2, 2] (direction, hop)."""
    return taco_jax.init_scales({"a": "taco"})["a"].at[..., ALPHA].set(jnp.asarray(alphas, jnp.float32))


def seen(mean_square, count=1000.0, saturated=0.0, nonfinite=0.0, error=0.0):
    """The same observation in every direction and hop."""
    slots = jnp.asarray([mean_square * count, count, saturated, nonfinite, error * count], jnp.float32)
    return jnp.broadcast_to(slots, (2, 2, 5))


update = jax.jit(lambda state, seen: taco_jax.update_scales({"a": state}, {"a": seen}, axis_name=None))


def follow(state, *observations):
    for observation in observations:
        new, _ = update(state, observation)
        state = new["a"]
    return np.array(state)


def follow_values(state, rms, steps):
    """As `follow`, of values with this root mean square."""
    for _ in range(steps):
        state = follow(state, seen((state[0, 0, ALPHA] * rms) ** 2))
    return state


def observe_by_oracle(xs, codec, alphas):
    """[2 hops, 5] of one all-reduce of xs[n, size]: every rank's message, and the sum's parts."""
    rows = oracles.pad(np.asarray(xs, np.float64), codec.block * len(xs))
    q, s = oracles.encode(rows, codec, alphas[0])
    hops = [oracles.rotate(oracles.blocks(rows, codec), codec), (q * s).sum(0)]
    observed = []
    for values, alpha, count in zip(hops, alphas, (xs.size, xs[0].size), strict=True):
        q, s = oracles.code(values, codec, alpha)
        z = (values * alpha).clip(-codec.qmax, codec.qmax)
        saturated = (np.abs(values * alpha) > codec.qmax * 1.0001).sum()
        observed.append([np.square(z).sum(), count, saturated, 0, np.square((values - q * s) * alpha).sum()])
    return np.asarray(observed)


def test_observation_is_that_of_the_oracle():
    """Forward by psum, backward by pvary, over dp replicas; the plain array and the pair see the same."""
    codec, alphas = TACO, np.array([[2.0, 1.0], [0.5, 0.25]])
    options = {"compression": compression(codec, chunks=2), "name": "site"}
    size, dp, tp = 1000, 2, 3

    def loss(scales, x, w, ct):
        h = taco_jax.pvary(x, "tp", scales=scales, **options) * w
        return jnp.vdot(taco_jax.psum(h, "tp", scales=scales, **options), ct)

    def observe(scales, x, w, ct):
        x, w, ct = x[0], w[0], ct[0]
        plain = jax.grad(loss)(scales, x, w, ct)
        states, probes = taco_jax.split_scales({"a": scales}, ("dp", "tp"))
        local = jax.grad(lambda probe: loss(SitePair(states["a"], probe), x, w, ct))(probes["a"])
        _, metrics = taco_jax.update_scales({"a": scales}, {"a": local}, axis_name=("dp", "tp"))
        updates = [
            taco_jax.update_scales({"a": scales}, {"a": seen}, axis_name=("dp", "tp"))[0]["a"]
            for seen in (plain, local)
        ]
        return plain, lax.psum(local, ("dp", "tp")), updates, metrics

    x, w, ct = gaussian(dp, size), gaussian(dp * tp, size, seed=1), gaussian(dp, size, seed=2)
    w[1, 5] = 40000.0
    call = spmd(observe, mesh(dp=dp, tp=tp), (P(), P("dp"), P(("dp", "tp")), P("dp")), P())
    plain, pair, updates, metrics = call(state(alphas), x, w, ct)
    assert_equal_on_all_ranks((plain, pair, updates, metrics))
    chex.assert_trees_all_close(plain, pair, rtol=1e-5)
    chex.assert_trees_all_close(*updates, rtol=1e-5)
    w = w.reshape(dp, tp, size)
    forward = sum(observe_by_oracle(x[d] * w[d], codec, alphas[0]) for d in range(dp))
    backward = sum(observe_by_oracle(ct[d] * w[d], codec, alphas[1]) for d in range(dp))
    for observed, expected in zip(np.asarray(pair), (forward, backward), strict=True):
        assert expected[0, COUNT] == dp * tp * size and expected[1, COUNT] == dp * size
        chex.assert_trees_all_equal(observed[:, SATURATED : NONFINITE + 1], expected[:, SATURATED : NONFINITE + 1])
        # A rank's share of the sum is 333 1/3 values.
        chex.assert_trees_all_close(observed[:, COUNT], expected[:, COUNT], rtol=1e-6)
        chex.assert_trees_all_close(observed[:, SUM_SQUARES], expected[:, SUM_SQUARES], rtol=1e-4)
        chex.assert_trees_all_close(observed[:, SUM_ERROR], expected[:, SUM_ERROR], rtol=2e-2)
    assert pair[0, 0, SATURATED] > 0
    chex.assert_trees_all_close(
        float(metrics["saturation"]), float(pair[..., SATURATED].sum() / pair[..., COUNT].sum()), rtol=1e-5
    )


def test_one_hop_collectives_fill_one_hop_and_block_codecs_observe_too():
    """Both directions of each; the SNR read from the observation is that of the result."""
    x = gaussian(4, 8, 512)
    codec = compression(INT8)
    calls = {
        "psum_scatter": lambda x, s: taco_jax.psum_scatter(x, "tp", tiled=True, compression=codec, scales=s),
        "all_gather": lambda x, s: taco_jax.all_gather(x, "tp", compression=codec, scales=s),
        "all_to_all": lambda x, s: taco_jax.all_to_all(
            x, "tp", split_axis=0, concat_axis=0, tiled=True, compression=codec, scales=s
        ),
        "ppermute": lambda x, s: taco_jax.ppermute(
            x, "tp", perm=[(i, (i + 1) % 4) for i in range(4)], compression=codec, scales=s
        ),
    }
    scales = taco_jax.init_scales(dict.fromkeys(calls, codec))
    ct = gaussian(4 * x.size, seed=1)

    def observe(scales, x):
        def loss(scales):
            y = {name: call(x[0], scales[name]).reshape(-1) for name, call in calls.items()}
            return sum(jnp.vdot(part, ct[: part.size]) for part in y.values())

        seen = jax.grad(loss)(scales)
        return seen, taco_jax.update_scales(scales, seen, axis_name="tp")

    seen, (new, metrics) = spmd(observe, mesh(tp=4), (P(), P("tp")), P())(scales, x)
    for name, observed in seen.items():
        sizes = {"psum_scatter": (x.size, x.size / 4), "all_gather": (x.size, 4 * x.size)}
        expected = sizes.get(name, (x.size, x.size))
        assert [float(count) for count in observed[:, 0, COUNT]] == list(expected), name
        assert not np.asarray(observed)[:, 1].any() and not np.asarray(observed)[..., NONFINITE].any()
        chex.assert_trees_all_close(float(observed[0, 0, SUM_SQUARES]), float(np.square(x).sum()), rtol=1e-4)
        for label in ("forward", "backward"):
            assert abs(float(metrics[f"snr_{label}/{name}"]) - 43.8) <= 1.0
        chex.assert_trees_all_equal(new[name][:, 1], scales[name][:, 1])
        assert (new[name][:, 0, UPDATES] == 1).all()


def test_init_gives_a_state_to_compressed_sites_only():
    sites = {"mlp": "taco", "head": "none", "int8": "int8"}
    scales = taco_jax.init_scales(sites, stack=(3,))
    assert sorted(scales) == ["int8", "mlp"]
    chex.assert_shape(list(scales.values()), (3, 2, 2, 5))
    expected = np.zeros((3, 2, 2, 5), np.float32)
    expected[..., ALPHA] = 1
    chex.assert_trees_all_equal(np.asarray(scales["mlp"]), expected)


@pytest.mark.parametrize("rms", [1e-30, 1e-3, 0.9, 1.0, 3.0, 1e5])
def test_the_first_observation_sets_alpha(rms):
    new = follow(state(), seen(max(rms**2, 2.0**-120)))
    alpha = new[0, 0, ALPHA]
    assert np.frexp(alpha)[0] == 0.5
    assert 2**0.5 <= alpha * max(rms, 2.0**-60) <= 2**1.5 * (1 + 1e-6)
    assert (new[..., UPDATES] == (rms >= 2.0**-60)).all()
    # The average is in the unit of the alpha that goes with it.
    chex.assert_trees_all_close(new[0, 0, MEAN_SQUARE], (alpha * max(rms, 2.0**-60)) ** 2, rtol=1e-5)


def test_alpha_stays_within_the_hysteresis_and_follows_the_average_beyond():
    settled = follow(state(), seen(4.0))
    assert settled[0, 0, ALPHA] == 1.0
    within = follow(settled, *[seen(4.0 * 2**1.4)] * 30)
    assert within[0, 0, ALPHA] == 1.0 and within[0, 0, UPDATES] == 31
    once = follow(settled, seen(4.0 * 2**6))
    chex.assert_trees_all_close(once[0, 0, MEAN_SQUARE] / once[0, 0, ALPHA] ** 2, 0.9 * 4 + 0.1 * 4 * 2**6, rtol=1e-5)
    beyond = follow_values(settled, 1.0, steps=60)
    assert beyond[0, 0, ALPHA] == 2.0
    chex.assert_trees_all_close(beyond[0, 0, MEAN_SQUARE], 4.0, rtol=0.01)


def test_saturation_and_vanishing_are_followed_at_once():
    settled = follow(state(), *[seen(4.0)] * 20)
    assert follow(settled, seen(4.0 * 2**8))[0, 0, ALPHA] == 2.0**-2
    assert follow(settled, seen(4.0 * 2**8, saturated=1))[0, 0, ALPHA] == 2.0**-4
    assert follow(settled, seen(4.0 * 2**-16))[0, 0, ALPHA] == 1.0
    assert follow(settled, seen(4.0 * 2**-24))[0, 0, ALPHA] == 2.0**12
    bottom = follow(settled, seen(2.0**-120))
    assert bottom[0, 0, ALPHA] == 2.0**61
    # How much too small is seen with the next alpha only, which is then taken at once.
    assert follow(bottom, seen(4.0 * 2**-12))[0, 0, ALPHA] == 2.0**67


@pytest.mark.parametrize(
    "observation",
    [seen(4.0 * 2**12, nonfinite=1), seen(np.inf), seen(np.nan), seen(4.0, error=np.nan)],
    ids=["nonfinite", "inf", "nan", "error"],
)
def test_a_non_finite_observation_is_skipped_and_counted(observation):
    settled = follow(state(), seen(4.0))
    skipped = follow(settled, observation)
    settled[..., SKIPPED] += 1
    chex.assert_trees_all_equal(skipped, settled)


@pytest.mark.parametrize("observation", [seen(0.0), seen(0.0, count=0.0)], ids=["zeros", "nothing"])
def test_zeros_and_silence_change_nothing(observation):
    settled = follow(state(), seen(4.0))
    chex.assert_trees_all_equal(follow(settled, observation), settled)


def test_sites_directions_and_hops_follow_on_their_own():
    observation = seen(4.0).at[1, 0, SUM_SQUARES].mul(2.0**10).at[0, 1, NONFINITE].set(1)
    new, metrics = update(state(), observation)
    alphas = np.asarray(new["a"][..., ALPHA])
    chex.assert_trees_all_equal(alphas, np.array([[1.0, 1.0], [2.0**-5, 1.0]], np.float32))
    assert new["a"][0, 1, SKIPPED] == 1 and new["a"][0, 0, SKIPPED] == 0
    assert float(metrics["nonfinite"]) == 1


@pytest.mark.parametrize("magnitude", [1e-37, 1e-30, 1e-20, 1e-10, 1.0, 1e10, 1e20, 1e30, 1e37])
@pytest.mark.parametrize("codec", [TACO, Codec("e5m2", 64, scale="adaptive")], ids=["taco", "e5m2"])
def test_alpha_finds_any_magnitude_and_the_error_is_the_same(codec, magnitude):
    """From a blind alpha of 1, by observations alone: a power of two, and the SNR that unit values have."""
    parts = (gaussian(RANKS, COLUMNS, seed=1).clip(-3, 3) * magnitude).astype(np.float32)
    current = state()
    for _ in range(20):
        alphas = current[0, :, ALPHA]
        messages, first = encode(parts, codec, alphas[0])
        message, second = reduce(messages, codec, alphas, jnp.float32)
        both = jnp.stack([first.at[COUNT].set(parts.size), second.at[COUNT].set(COLUMNS)])
        new, _ = update(current, jnp.stack([both, both]))
        current = new["a"]
        if np.array_equal(current[0, :, ALPHA], alphas):
            break
    else:
        pytest.fail(f"alpha still moves: {current[0, :, ALPHA]}")
    assert (np.frexp(np.asarray(current[..., ALPHA]))[0] == 0.5).all()
    decoded = decode(message, codec, alphas[1], jnp.float32)
    low, high = {"e4m3": (27.5, 29.5), "e5m2": (21.5, 23.5)}[codec.format]
    # Near the bottom of float32 the values themselves lose bits.
    assert low - (magnitude < 1e-36) <= oracles.snr_db(parts.astype(np.float64).sum(0), decoded) <= high


def test_alpha_for_brings_the_rms_to_the_target():
    x = gaussian(4096)
    alpha = jax.jit(alpha_for)
    for k in (-120, -60, 0, 60, 120):
        assert alpha(np.ldexp(x, k)) == 2.0 ** (1 - k)
    for value in (0.0, np.nan, np.inf):
        assert alpha(np.full(4096, value, np.float32)) == 1.0
    assert alpha(np.zeros(0, np.float32)) == 1.0


def test_metrics_give_the_snr_of_both_hops():
    """Noise of hop 1 in the unit of hop 2, plus that of hop 2, against the signal of hop 2."""
    observation = seen(4.0)
    observation = observation.at[0, :, SUM_ERROR].set(jnp.asarray([1.0, 2.0])).at[1, 1].set(0.0)
    observation = observation.at[1, 0, SUM_ERROR].set(4.0)
    scales = {"a": state([[4.0, 2.0], [1.0, 1.0]]), "b": state()}
    both = jax.jit(lambda scales, seen: taco_jax.update_scales(scales, seen, axis_name=None))
    _, metrics = both(scales, {"a": observation, "b": jnp.zeros((2, 2, 5))})
    chex.assert_trees_all_close(float(metrics["snr_forward/a"]), 10 * np.log10(4000 / (1.0 / 4 + 2.0)), rtol=1e-5)
    chex.assert_trees_all_close(float(metrics["snr_backward/a"]), 10 * np.log10(4000 / 4.0), rtol=1e-5)
    assert np.isnan(metrics["snr_forward/b"])
    chex.assert_trees_all_close(metrics["snr_forward"], metrics["snr_forward/a"])
    assert taco_jax.update_scales({}, {}, axis_name=None)[0] == {}
