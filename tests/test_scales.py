"""Dual-scale quantization: what a step observes, and how alpha follows it."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import P, assert_equal_on_all_ranks, mesh, spmd

import taco_jax
from taco_jax.scales import (
    ALPHA,
    ALPHA_OCTAVES,
    COUNT,
    MEAN_SQUARE,
    NONFINITE,
    SATURATED,
    SKIPPED,
    SUM_SQUARES,
    UPDATES,
)

TACO = taco_jax.Compression.named("taco", min_bytes=0)


def site(alpha: float = 1.0, mean_square: float = 0.0, updates: int = 0) -> jax.Array:
    state = taco_jax.init_scales({"s": TACO})["s"]
    return state.at[..., ALPHA].set(alpha).at[..., MEAN_SQUARE].set(mean_square).at[..., UPDATES].set(updates)


def observation(rms: float, count: int = 1000, saturated: int = 0, nonfinite: int = 0) -> jax.Array:
    """What a site reports in all directions and hops when alpha x has this RMS."""
    seen = jnp.zeros((2, 2, 5), jnp.float32).at[..., SUM_SQUARES].set(np.float32(rms) ** 2 * count)
    return seen.at[..., COUNT].set(count).at[..., SATURATED].set(saturated).at[..., NONFINITE].set(nonfinite)


def follow(state: jax.Array, seen: jax.Array) -> jax.Array:
    return taco_jax.update_scales({"s": state}, {"s": seen}, axis_name=None)[0]["s"]


@pytest.mark.parametrize(("rms", "octaves"), [(2.0, 0), (2.0**-9, 10), (2.0**7, -6), (3.0, -1), (1.3, 1)])
def test_the_first_observation_is_adopted_at_once(rms, octaves):
    # round(1 - log2(rms)): log2(3) = 1.58 gives -0.58, log2(1.3) = 0.38 gives 0.62.
    state = follow(site(), observation(rms))
    chex.assert_trees_all_equal(state[..., ALPHA], jnp.full((2, 2), 2.0**octaves))
    chex.assert_trees_all_close(state[..., MEAN_SQUARE], jnp.full((2, 2), (rms * 2.0**octaves) ** 2), rtol=1e-5)
    chex.assert_trees_all_equal(state[..., UPDATES], jnp.ones((2, 2)))


def test_small_changes_move_nothing_and_lasting_ones_do():
    state = site(alpha=8.0, mean_square=4.0, updates=1)
    state = follow(state, observation(2.8))  # half an octave up, and only a tenth of it enters the average
    chex.assert_trees_all_equal(state[..., ALPHA], jnp.full((2, 2), 8.0))
    chex.assert_trees_all_close(state[..., MEAN_SQUARE], jnp.full((2, 2), 0.9 * 4.0 + 0.1 * 2.8**2), rtol=1e-6)
    for _ in range(60):
        state = follow(state, observation(8.0 * float(state[0, 0, ALPHA]) / 8.0))
    chex.assert_trees_all_equal(state[..., ALPHA], jnp.full((2, 2), 2.0))


def test_saturation_is_followed_at_once():
    calm = follow(site(8.0, 4.0, 5), observation(64.0))
    alarmed = follow(site(8.0, 4.0, 5), observation(64.0, saturated=1))
    # Without saturation the average rises to 0.9 * 4 + 0.1 * 4096 = 413, an RMS of 20: 3.3 octaves too much.
    chex.assert_trees_all_equal(calm[..., ALPHA], jnp.full((2, 2), 1.0))
    chex.assert_trees_all_equal(alarmed[..., ALPHA], jnp.full((2, 2), 8.0 * 2.0**-5))


def test_non_finite_observations_are_skipped_and_counted():
    before = site(8.0, 4.0, 5)
    for seen in (observation(64.0, nonfinite=1), observation(jnp.inf), observation(jnp.nan)):
        after = follow(before, seen)
        chex.assert_trees_all_equal(after, before.at[..., SKIPPED].set(1.0))


@pytest.mark.parametrize("seen", [observation(1.0, count=0), observation(0.0)])
def test_nothing_sent_and_only_zeros_change_nothing(seen):
    chex.assert_trees_all_equal(follow(site(8.0, 4.0, 5), seen), site(8.0, 4.0, 5))


def test_alpha_stays_a_normal_power_of_two():
    small, large = site(2.0**120), site(2.0**-120)
    for _ in range(4):
        small, large = follow(small, observation(2.0**-10)), follow(large, observation(2.0**8, saturated=1))
    assert float(small[0, 0, ALPHA]) == 2.0 ** ALPHA_OCTAVES[1]
    assert float(large[0, 0, ALPHA]) == 2.0 ** ALPHA_OCTAVES[0]


@pytest.mark.parametrize("exponent", [-110, 0, 110])
def test_alpha_follows_data_of_any_size_from_one(exponent):
    x = (np.random.default_rng(0).standard_normal((4, 4096)) * 2.0**exponent).astype(np.float32)
    state = site()

    def loss(x, scales):
        return jnp.sum(taco_jax.psum(x, "tp", compression=TACO, scales=scales))

    observe = spmd(jax.grad(loss, argnums=1), mesh(tp=4), (P("tp"), P()), P())
    total = spmd(lambda x, s: taco_jax.psum(x, "tp", compression=TACO, scales=s), mesh(tp=4), (P("tp"), P()), P())
    for _ in range(30):
        state = follow(state, observe(x, state))
    want = np.sum(x.astype(np.float64), axis=0)
    error = np.asarray(total(x, state), np.float64)[0] - want
    assert 10 * np.log10(np.sum(want**2) / np.sum(error**2)) > 28.0


def test_a_step_observes_sums_and_counts_of_both_hops_and_directions():
    """x is summed (forward) and its input's cotangent is (backward): moments as NumPy has them."""
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((4, 8, 300)).astype(np.float32), rng.standard_normal((4, 300)).astype(np.float32)

    def loss(scales, x, w):
        def step(carry, _):
            h = taco_jax.pvary(carry, "tp", compression=TACO, scales=scales["in"], name="in") * w[0]
            y = taco_jax.psum(h * x[0], "tp", compression=TACO, scales=scales["out"], name="out")
            return 0 * y + carry, jnp.sum(y)

        step = jax.checkpoint(step, policy=taco_jax.save_payloads(), prevent_cse=False)
        return jnp.sum(jax.lax.scan(step, jnp.ones((8, 300)), None, length=3)[1])

    scales = taco_jax.init_scales({"in": TACO, "out": TACO})
    for check_vma in (True, False):
        inside = spmd(jax.grad(loss), mesh(tp=4), (P(), P("tp"), P("tp")), P(), check_vma)
        if check_vma:
            seen = inside(scales, x, w)
            assert_equal_on_all_ranks(seen)
        else:  # each rank keeps its own; update_scales adds them
            local = spmd(
                lambda s, x, w: jax.tree.map(lambda g: jax.lax.psum(g, "tp"), jax.grad(loss)(s, x, w)),
                mesh(tp=4), (P(), P("tp"), P("tp")), P(), False,
            )  # fmt: skip
            seen = local(scales, x, w)
        parts = (x * w[:, None]).astype(np.float64)
        out = np.asarray(seen["out"][0])
        np.testing.assert_allclose(out[0, SUM_SQUARES], 3 * np.sum(parts**2), rtol=1e-3)
        np.testing.assert_allclose(out[1, SUM_SQUARES], 3 * np.sum(parts.sum(0) ** 2), rtol=2e-2)
        np.testing.assert_array_equal(out[:, COUNT], [3 * parts.size, 3 * parts.size / 4])
        if check_vma:  # where JAX tracks varying axes the backward all-reduce stands in pvary
            back = np.asarray(seen["in"][1])
            np.testing.assert_allclose(back[0, SUM_SQUARES], 3 * np.sum(parts**2), rtol=1e-3)
            np.testing.assert_allclose(back[1, SUM_SQUARES], 3 * np.sum(parts.sum(0) ** 2), rtol=2e-2)


def test_a_pair_observes_what_a_plain_array_does_and_update_adds_over_ranks():
    x = np.random.default_rng(2).standard_normal((8, 2048)).astype(np.float32)
    scales = taco_jax.init_scales({"s": TACO})

    def summed(x, scales):
        return jnp.sum(jnp.square(taco_jax.psum(x, "tp", compression=TACO, scales=scales)))

    def plain(x, scales):
        seen = jax.grad(lambda s: jax.lax.psum(summed(x, s["s"]), "dp"))(scales)
        return taco_jax.update_scales(scales, seen, axis_name=("dp", "tp"))[0]

    def paired(x, scales):
        states, probes = taco_jax.split_scales(scales, ("dp", "tp"))
        seen = jax.grad(lambda p: summed(x, taco_jax.SitePair(states["s"], p["s"])))(probes)
        return taco_jax.update_scales(scales, seen, axis_name=("dp", "tp"))[0]

    on = mesh(dp=2, tp=4)
    one, other = (spmd(f, on, (P(("dp", "tp")), P()), P())(x, scales) for f in (plain, paired))
    chex.assert_trees_all_close(one, other, rtol=1e-6)
    assert float(one["s"][0, 0, UPDATES]) == 1.0 and float(one["s"][0, 0, ALPHA]) == 2.0
    assert_equal_on_all_ranks(other)
