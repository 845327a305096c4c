"""The whole 3-D step against the plain model on one device."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from meshes import P, copies, mesh, spmd
from reference_gpt import logits as reference_logits
from reference_gpt import loss as reference_loss

from experiments import optimizer, step
from experiments.config import (
    CommunicationConfig,
    DataConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from taco_jax.models.config import ModelConfig
from taco_jax.models.families import init_parameters
from taco_jax.sharding.data_parallel import global_norm

pytestmark = pytest.mark.usefixtures("quickly_compiled")

VOCAB = 300
CONFIG = TrainConfig(
    compression="none",
    dtype="float32",
    steps=20,
    model=ModelConfig(
        num_layers=4,
        hidden_size=32,
        num_heads=4,
        intermediate_size=64,
        vocab_size=VOCAB,
        embedding_std=0.05,
        kernel_std=0.04,
    ),
    data=DataConfig(sequence_length=15, batch_size=6),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=5),
    parallel=ParallelConfig(num_microbatches=3),
    communication=CommunicationConfig(min_bytes=0),
)


def change(config=CONFIG, **sections):
    """Config with fields of sections, or whole fields, replaced."""
    new = {
        name: dataclasses.replace(getattr(config, name), **value) if isinstance(value, dict) else value
        for name, value in sections.items()
    }
    return dataclasses.replace(config, **new)


@functools.cache
def program_on(config, dp=1, pp=1, tp=1):
    return step.build(config, mesh(dp=dp, pp=pp, tp=tp))


def numpy_batch(config, seed=0):
    """Random tokens; the mask weighs tokens unevenly, over data-parallel ranks and microbatches too."""
    rng = np.random.default_rng(seed)
    shape = (config.data.batch_size, config.data.sequence_length)
    tokens, targets = rng.integers(0, VOCAB, (2, *shape)).astype(np.int32)
    mask = (rng.random(shape) < np.linspace(0.2, 1.0, shape[0])[:, None]).astype(np.float32)
    return {"tokens": tokens, "targets": targets, "mask": mask}


def placed(program, batch):
    return jax.device_put(batch, program.batch_sharding)


@functools.cache
def noisy_parameters(config, tp=1):
    """First parameters plus noise, so that biases and norms matter."""
    init = functools.partial(init_parameters, step.model_config(config), 0, shards=tp)
    first = jax.jit(init, compiler_options={"xla_backend_optimization_level": 0})()
    rng = np.random.default_rng(7)
    noisy = jax.tree.map(lambda p: np.asarray(p) + 0.05 * rng.normal(size=p.shape).astype(np.float32), first)
    for table in (noisy["embedding"], noisy.get("head", {})):
        for name in table:
            table[name][VOCAB:] = 0
    return noisy


@functools.cache
def reference_gradients(config):
    function = jax.jit(jax.value_and_grad(functools.partial(reference_loss, vocab_size=VOCAB)))
    return function(noisy_parameters(config), numpy_batch(config))


def assert_gradients_close(found, want):
    """||d|| <= 1e-5 ||g|| + 1e-7 ||all g|| for every tensor."""
    norm = float(optax.tree.norm(want))
    for (path, w), f in zip(jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(found), strict=True):
        error, own = np.linalg.norm(np.asarray(f) - w), np.linalg.norm(w)
        assert error <= 1e-5 * own + 1e-7 * norm, (jax.tree_util.keystr(path), error, own)


def assert_equal_on_all_ranks(tree):
    """Devices that hold the same part of an array hold the same bits (C1)."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        seen = {}
        for shard in leaf.addressable_shards:
            bits = np.asarray(shard.data).tobytes()
            assert seen.setdefault(str(shard.index), bits) == bits, jax.tree_util.keystr(path)


@pytest.mark.parametrize(
    ("sizes", "sections"),
    [
        ({"dp": 2, "pp": 2, "tp": 2}, {}),
        pytest.param({"dp": 1, "pp": 4, "tp": 2}, {"model": {"tie_embeddings": False}}, marks=pytest.mark.slow),
        ({"dp": 2, "pp": 4, "tp": 1}, {"parallel": {"num_microbatches": 1}}),
    ],
    ids=["dp2,pp2,tp2", "untied-dp1,pp4,tp2", "one-microbatch-dp2,pp4,tp1"],
)
def test_gradients_equal_the_plain_model(sizes, sections):
    """M2, M3, T1: microbatches fewer than stages, tokens that the stages do not divide, tied tables summed once."""
    config = change(**sections)
    program = program_on(config, **sizes)
    parameters = jax.device_put(noisy_parameters(config), program.state_shardings["params"])
    batch = numpy_batch(config)
    sums, gradients, observed = jax.jit(program.loss_and_gradients)(parameters, {}, placed(program, batch))
    want_loss, want = reference_gradients(change(model=sections.get("model", {})))
    chex.assert_trees_all_close(sums["loss"], want_loss, rtol=1e-5)
    chex.assert_trees_all_close(sums["grad_norm"], optax.tree.norm(want), rtol=1e-5)
    assert float(sums["tokens"]) == batch["mask"].sum()
    assert observed == {}
    assert_gradients_close(gradients, want)
    assert_equal_on_all_ranks(gradients)
    assert not np.asarray(gradients["embedding"]["embedding"])[VOCAB:].any()


LARGER = change(data={"batch_size": 12})


def steps(program, state, count, seed=0):
    """Losses and gradient norms of some steps, and the state after them."""
    found = []
    for i in range(count):
        state, metrics = program.train_step(state, i, placed(program, numpy_batch(program.config, seed + i)))
        found.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    return np.array(found), state


@pytest.mark.slow
def test_training_is_the_same_on_every_mesh():
    one, many = program_on(LARGER, 1, 1, 1), program_on(LARGER, 2, 2, 2)
    want, _ = steps(one, one.init(1), 3)
    found, _ = steps(many, many.init(1), 3)
    np.testing.assert_allclose(found[:, 0], want[:, 0], rtol=1e-5)
    # T2: the norm counts every parameter once.
    np.testing.assert_allclose(found[:, 1], want[:, 1], rtol=1e-4)


@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 1e-5), ("bfloat16", 2e-3)])
def test_loss_is_the_same_on_every_mesh(dtype, rtol):
    losses = []
    for sizes in ((1, 1, 1), (2, 2, 2), (4, 2, 1)):
        program = program_on(change(LARGER, dtype=dtype), *sizes)
        state = {"params": jax.device_put(noisy_parameters(CONFIG), program.state_shardings["params"]), "scales": {}}
        sums = program.eval_step(state, placed(program, numpy_batch(LARGER)))
        losses.append(float(sums["loss_sum"] / sums["tokens"]))
    np.testing.assert_allclose(losses, losses[0], rtol=rtol)


def test_first_state_is_the_same_on_every_mesh():
    one = program_on(CONFIG, 1, 1, 1).init(5)
    many = program_on(CONFIG, 2, 2, 2).init(5)
    chex.assert_trees_all_equal(jax.device_get(one), jax.device_get(many))
    abstract = program_on(CONFIG, 2, 2, 2).abstract_state()
    chex.assert_trees_all_equal_shapes_and_dtypes(abstract, many)
    assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, abstract, many))
    assert many["opt_state"][1].mu["layers"]["mlp"]["up"]["kernel"].sharding.spec == P("pp", None, "tp")


def test_logits_and_evaluation_equal_the_plain_model():
    """M14."""
    batch = numpy_batch(CONFIG)
    parameters = noisy_parameters(CONFIG)
    want = jax.jit(reference_logits, static_argnums=2)(parameters, batch["tokens"][:, :7], VOCAB)
    want_loss, _ = reference_gradients(CONFIG)
    for sizes in ((1, 1, 1), (1, 2, 4), (2, 2, 2)):
        program = program_on(CONFIG, *sizes)
        state = {"params": jax.device_put(parameters, program.state_shardings["params"]), "scales": {}}
        logits = program.logits(state, batch["tokens"][:, :7])
        chex.assert_shape(logits, (6, 7, VOCAB))
        chex.assert_trees_all_close(jax.device_get(logits), want, rtol=1e-5, atol=1e-5)
    sums = program.eval_step(state, placed(program, batch))
    assert float(sums["loss_sum"] / sums["tokens"]) == pytest.approx(float(want_loss), rel=1e-5)


def test_exact_program_gathers_nothing():
    """The optimizer works on each device's own part."""
    text = program_on(LARGER, 2, 2, 2).compiled.as_text()
    assert "all-gather" not in text
    assert "all-reduce" in text


@pytest.mark.parametrize(
    ("sizes", "sections", "message"),
    [
        ({"pp": 4}, {"model": {"num_layers": 30}}, r"pp=4 does not divide model.num_layers=30 .*1, 2, 3, 5, 6, 10"),
        ({"dp": 2}, {"parallel": {"num_microbatches": 4}}, r"data.batch_size=6 is no multiple of dp=2 x"),
    ],
    ids=["M1", "M2"],
)
def test_what_does_not_divide_is_refused(sizes, sections, message):
    with pytest.raises(ValueError, match=message):
        program_on(change(**sections), **sizes)


@pytest.mark.parametrize("spec", [P("tp"), P(), P(("dp", "tp"))])
def test_global_norm_counts_every_element_once(spec):
    """T2: the norm of arange(8) is 11.832, however it is split."""
    tree = {"a": jnp.arange(8.0), "b": jnp.zeros(3)}
    specs = {"a": spec, "b": P()}

    def run(tree):
        return [x[None] for x in global_norm(tree, specs)]

    norm, squares = spmd(run, mesh(dp=2, tp=4), (specs,), P())(tree)
    for copy in copies(norm):
        assert float(copy[0]) == pytest.approx(11.832, abs=1e-3)
    for copy in copies(squares):
        np.testing.assert_array_equal(copy[0], [140.0, 0.0])


def test_learning_rate_depends_on_the_step_alone():
    """T4."""
    config = change(steps=100, optimizer={"learning_rate": 5e-3, "warmup_steps": 10, "final_fraction": 0.1})
    rates = np.array([float(optimizer.learning_rate(config)(i)) for i in (0, 4, 9, 10, 54, 99, 200)])
    half = 5e-4 + 4.5e-3 * 0.5 * (1 + np.cos(np.pi * 44 / 89))
    np.testing.assert_allclose(rates, [5e-4, 2.5e-3, 5e-3, 5e-3, half, 5e-4, 5e-4], rtol=1e-4)


def test_update_direction_is_clipped_adam_with_decayed_matrices():
    config = OptimizerConfig(weight_decay=0.5, clip_norm=1.0, b1=0.9, b2=0.95)
    parameters = {"kernel": jnp.full((2,), 2.0), "bias": jnp.full((2,), 2.0)}
    transformation = optimizer.direction(config)
    gradients = {"kernel": jnp.full((2,), 30.0), "bias": jnp.full((2,), -40.0)}
    norm = optax.tree.norm(gradients)
    update, state = transformation.update(gradients, transformation.init(parameters), parameters, global_norm=norm)
    chex.assert_trees_all_close(update, {"kernel": jnp.full((2,), 2.0), "bias": jnp.full((2,), -1.0)}, rtol=1e-5)
    clipped = -40.0 / np.sqrt(2 * (30**2 + 40**2))
    chex.assert_trees_all_close(state[1].mu["bias"], jnp.full((2,), 0.1 * clipped), rtol=1e-5)
    chex.assert_trees_all_close(optimizer.apply(parameters, update, jnp.float32(0.5))["kernel"], jnp.ones(2), rtol=1e-5)
