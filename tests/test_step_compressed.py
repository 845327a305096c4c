"""The 3-D step with compressed tensor-parallel messages: error, bias, scales, equal bits, steps that are not finite."""

import functools
import gzip
from importlib import resources

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference_gpt import loss as reference_loss
from test_step import VOCAB, assert_equal_on_all_ranks, change, noisy_parameters, numpy_batch, placed, program_on

from experiments.communication import planned_collectives
from taco_jax.scales import ALPHA, BACKWARD, FORWARD, SKIPPED, UPDATES

pytestmark = pytest.mark.usefixtures("quickly_compiled")

CONFIG = change(compression="taco", dtype="bfloat16", data={"batch_size": 12})
MESH = (2, 2, 2)
NUM_INPUTS = 20


@functools.cache
def english():
    data = (resources.files("taco_jax.data") / "kjv.txt.gz").read_bytes()
    return np.frombuffer(gzip.decompress(data), np.uint8).astype(np.int32)


def english_batch(seed):
    """Windows of the default corpus, and a mask of ones."""
    rows, length = CONFIG.data.batch_size, CONFIG.data.sequence_length
    starts = np.random.default_rng(seed).integers(0, len(english()) - length - 1, rows)
    windows = english()[starts[:, None] + np.arange(length + 1)]
    return {"tokens": windows[:, :-1], "targets": windows[:, 1:], "mask": np.ones((rows, length), np.float32)}


def replace_leaf(tree, path, change):
    """Copy of a nested dict with one leaf changed, sharded as it was."""
    if not path:
        return jax.device_put(change(np.array(tree)), tree.sharding)
    return {**tree, path[0]: replace_leaf(tree[path[0]], path[1:], change)}


@functools.cache
def calibrated():
    """Host copies of a calibrated first state, which every test puts back on the devices."""
    program = program_on(CONFIG, *MESH)
    state = program.init(0)
    state["params"] = jax.device_put(noisy_parameters(CONFIG), program.state_shardings["params"])
    return jax.device_get(program.calibrate(state, placed(program, numpy_batch(CONFIG))))


def first_state():
    return jax.device_put(calibrated(), program_on(CONFIG, *MESH).state_shardings)


def test_calibration_moves_the_scales_only():
    program, state = program_on(CONFIG, *MESH), calibrated()
    chex.assert_trees_all_equal(state["params"], noisy_parameters(CONFIG))
    assert not any(leaf.any() for leaf in jax.tree.leaves(state["opt_state"]))
    scales = state["scales"]
    chex.assert_shape(scales["mlp"], (4, 2, 2, 5))
    chex.assert_shape(scales["head"], (2, 2, 5))
    sites = {"attention": (FORWARD, BACKWARD), "mlp": (FORWARD, BACKWARD), "embedding": FORWARD, "head": BACKWARD}
    for site, directions in sites.items():
        seen = scales[site][..., directions, :, :]
        assert (seen[..., UPDATES] > 0).all()
        assert (np.frexp(seen[..., ALPHA])[0] == 0.5).all()
    assert (scales["mlp"][:, BACKWARD, :, ALPHA] > 64 * scales["mlp"][:, FORWARD, :, ALPHA]).all()
    _, metrics = program.train_step(first_state(), -1, placed(program, numpy_batch(CONFIG)))
    assert float(metrics["scale_changes"]) == 0


def test_small_sums_travel_together():
    """One sum and one gather of the scales however many sites there are, one sum of the gradient norm."""
    program = program_on(CONFIG, *MESH)
    plan = planned_collectives(program.jaxpr, dict(program.mesh.shape))
    found = sorted((c.site, c.op, c.axis, c.count) for c in plan if c.site in ("scales", "grad_norm"))
    assert found == [
        ("grad_norm", "all-reduce", "pp,tp", 1),
        ("scales", "all-gather", "pp", 1),
        ("scales", "all-reduce", "dp,tp", 1),
    ]


def test_blind_scales_are_found_too():
    """Backward alphas that turn every cotangent into zero at first."""
    program, state = program_on(CONFIG, *MESH), first_state()
    first = np.where(np.arange(5) == ALPHA, np.float32(2.0**-20), np.float32(0))
    blind = {
        site: jax.device_put(np.broadcast_to(first, value.shape), value.sharding)
        for site, value in state["scales"].items()
    }
    found = program.calibrate({**state, "scales": blind}, placed(program, numpy_batch(CONFIG)))["scales"]
    octaves = jax.tree.map(
        lambda a, b: np.log2(np.asarray(a)[..., ALPHA] / b[..., ALPHA]), found, calibrated()["scales"]
    )
    for site in ("attention", "mlp"):
        assert np.abs(octaves[site]).max() <= 1
    assert np.abs(octaves["head"][BACKWARD]).max() <= 1


def test_steps_learn_and_replicas_stay_equal():
    """C1, T7: the same bits on all ranks, float32 masters that move, padding rows still zero."""
    program, state = program_on(CONFIG, *MESH), first_state()
    before = calibrated()["params"]
    losses, batch = [], placed(program, numpy_batch(CONFIG))
    for i in range(5):
        state, metrics = program.train_step(state, i, batch)
        losses.append(float(metrics["loss"]))
        assert float(metrics["lr"]) == pytest.approx(0.01 * min(1, (i + 1) / 5), rel=1e-5)
    assert losses[-1] < losses[0] - 0.1
    assert 24 < float(metrics["snr_forward"]) < 40
    assert 24 < float(metrics["snr_backward"]) < 40
    assert float(metrics["saturation"]) < 1e-4
    assert float(metrics["skipped_step"]) == 0
    assert_equal_on_all_ranks(state)
    for leaf in jax.tree.leaves((state["params"], state["opt_state"])):
        assert leaf.dtype in (jnp.float32, jnp.int32)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((np.asarray(a) != b).any()), state["params"], before))
    assert not np.asarray(state["params"]["embedding"]["embedding"])[VOCAB:].any()


@pytest.mark.parametrize("value", [np.nan, np.inf], ids=["nan", "inf"])
def test_a_step_that_is_not_finite_changes_nothing(value):
    """N8: one bad weight on one tensor-parallel rank of one stage."""
    program, state = program_on(CONFIG, *MESH), first_state()

    def spoil(kernel):
        kernel[3, 0, -1] = value
        return kernel

    state["params"] = replace_leaf(state["params"], ("layers", "mlp", "up", "kernel"), spoil)
    before = jax.device_get(state)
    state, metrics = program.train_step(state, 0, placed(program, numpy_batch(CONFIG)))
    chex.assert_trees_all_equal(jax.device_get(state), before)
    assert (float(metrics["nonfinite"]), float(metrics["skipped_step"])) == (1, 1)
    # The spoilt matrix is the last of four layers: what went in was finite, what came out was not.
    assert float(metrics["nonfinite/mlp/forward"]) > 0
    origin = program.nonfinite_origin(jax.device_get(metrics))
    assert origin.startswith(", first in the forward mlp of layer 3 message, gradient of "), origin
    assert_equal_on_all_ranks(metrics)
    assert all((value[..., SKIPPED] == 0).all() for value in before["scales"].values())


@pytest.mark.parametrize(
    "compression",
    ["taco", *(pytest.param(name, marks=pytest.mark.slow) for name in ("taco_block", "paper", "fp8", "int8"))],
)
def test_gradients_are_close_and_unbiased(compression):
    """Each tensor within 10 % and cosine 0.995 on every input of English; over 20 of them no shrinking, no growing.

    Rounding to nearest depends on the value alone, and gradients of English share a mean: errors do not average out as
    independent ones would. What must hold is that the error has no part along the gradient itself, to 2 %.
    """
    config = change(CONFIG, compression=compression, dtype="float32")
    program = program_on(config, *MESH)
    parameters = jax.device_put(noisy_parameters(CONFIG), program.state_shardings["params"])
    scales = jax.device_put(calibrated()["scales"], program.state_shardings["scales"])
    compressed = jax.jit(program.loss_and_gradients)
    plain = jax.jit(jax.grad(functools.partial(reference_loss, vocab_size=VOCAB)))
    products = []
    for seed in range(NUM_INPUTS):
        batch = english_batch(seed)
        found = compressed(parameters, scales, placed(program, batch))[1]
        found, want = jax.device_get((found, plain(noisy_parameters(CONFIG), batch)))
        everything = float(optax.tree.norm(want))
        for (path, w), f in zip(jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(found), strict=True):
            own, error = np.linalg.norm(w), np.linalg.norm(f - w)
            assert error <= 0.1 * own + 1e-7 * everything, (jax.tree_util.keystr(path), error / own)
            assert np.vdot(f, w) >= 0.995 * own * np.linalg.norm(f), jax.tree_util.keystr(path)
        products.append(jax.tree.map(lambda f, w: np.array([np.vdot(f, w), np.vdot(w, w)]), found, want))
    gain = jax.tree.map(lambda *pairs: np.divide(*np.sum(pairs, axis=0)), *products)
    assert max(abs(g - 1) for g in jax.tree.leaves(gain)) < 0.02, gain
