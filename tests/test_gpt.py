import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from reference_gpt import logits as reference_logits
from reference_gpt import loss as reference_loss

from taco_jax.models.config import ModelConfig
from taco_jax.models.decoder import SITES
from taco_jax.models.families import graph_of, init_parameters
from taco_jax.models.layers import causal_attention, cross_entropy
from taco_jax.sharding import rules
from taco_jax.sharding.tensor_parallel import SingleDevice

pytestmark = pytest.mark.usefixtures("quickly_compiled")

CONFIG = ModelConfig(
    num_layers=3,
    hidden_size=32,
    num_heads=4,
    vocab_size=300,
    max_positions=16,
    intermediate_size=64,
    embedding_std=0.05,
    kernel_std=0.04,
)
TOKENS = np.random.default_rng(0).integers(0, 300, (2, 12)).astype(np.int32)


class Recorder(SingleDevice):
    """Counts the messages of a model on one device."""

    def __init__(self):
        self.calls = []

    def enter(self, x, site):
        self.calls.append(("enter", site))
        return x

    def leave(self, y, site):
        self.calls.append(("leave", site))
        return y


def merged(config, parameters, dtype="float32"):
    return nnx.merge(graph_of(config, dtype=dtype), parameters)


def forward(config, parameters, tokens, comm=None):
    """Plain use of the model on one device."""
    comm = comm or SingleDevice()
    model = merged(config, parameters)
    return model.logits(model.run_layers(model.embed(tokens, comm), SingleDevice()), comm)


@functools.lru_cache
def first(config, seed=0, shards=1):
    """First parameters, compiled as fast as can be."""
    init = jax.jit(
        lambda: init_parameters(config, seed, shards=shards), compiler_options={"xla_backend_optimization_level": 0}
    )
    return init()


@functools.lru_cache
def noisy(config):
    """Parameters with biases and norms that are not zero and one."""
    parameters, rng = first(config), np.random.default_rng(7)
    return jax.tree.map(lambda p: p + 0.05 * rng.normal(size=p.shape).astype(np.float32), parameters)


@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_the_plain_model(tied):
    config = dataclasses.replace(CONFIG, tie_embeddings=tied)
    parameters = noisy(config)
    assert ("head" in parameters) is not tied
    found = jax.jit(lambda p, t: forward(config, p, t))(parameters, TOKENS)
    chex.assert_shape(found, (2, 12, 384))
    want = jax.jit(reference_logits, static_argnums=2)(parameters, TOKENS, 300)
    chex.assert_trees_all_close(found[..., :300], want, atol=2e-6)


def test_parameters_have_the_shapes_that_the_rules_shard():
    parameters = first(CONFIG)
    assert jax.tree.all(jax.tree.map(lambda x: x.dtype == jnp.float32, parameters))
    chex.assert_shape(parameters["layers"]["attention"]["qkv"]["kernel"], (3, 32, 3, 4, 8))
    chex.assert_shape(parameters["layers"]["mlp"]["down"]["kernel"], (3, 64, 32))
    chex.assert_shape(parameters["embedding"]["embedding"], (384, 32))
    specs = rules.partition_specs(parameters)
    jax.tree.map(lambda spec, x: chex.assert_equal(len(spec) <= x.ndim, True), specs, parameters)
    with pytest.raises(ValueError, match="0 rules .* 'layers/extra/kernel'"):
        rules.partition_specs({"layers": {"extra": {"kernel": 0}}})


def test_first_parameters():
    parameters = first(CONFIG, 3)
    table = parameters["embedding"]["embedding"]
    assert float(jnp.std(table[:300])) == pytest.approx(0.05, rel=0.05)
    assert float(jnp.std(parameters["layers"]["mlp"]["up"]["kernel"])) == pytest.approx(0.04, rel=0.05)
    assert not table[300:].any()
    layers = parameters["layers"]["mlp"]["up"]["kernel"]
    assert not np.array_equal(layers[0], layers[1])
    otherwise = first(CONFIG, 3, shards=3)  # 3 devices: 6 heads of 4, 66 units of 64
    chex.assert_trees_all_equal(otherwise["embedding"]["embedding"][:300], table[:300])
    for padded, plain in zip(jax.tree.leaves(otherwise), jax.tree.leaves(parameters), strict=True):
        kept = tuple(map(slice, plain.shape))
        chex.assert_trees_all_equal(padded[kept], plain)
        assert not jnp.any(padded.at[kept].set(0))


def mean_loss(config):
    def loss(parameters):
        model, comm = merged(config, parameters), SingleDevice()
        x = model.run_layers(model.embed(TOKENS, comm), comm)
        return jnp.mean(model.loss(x, TOKENS[:, ::-1], comm))

    return loss


@pytest.mark.parametrize("vocab_size", [300, 50257])
def test_first_loss_counts_the_vocabulary_without_its_padding(vocab_size):
    """M6."""
    sizes = {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "vocab_size": vocab_size, "max_positions": 16}
    config = ModelConfig(**sizes, embedding_std=0.05, kernel_std=0.04)
    assert len(first(config)["embedding"]["embedding"]) > vocab_size
    step = jax.jit(jax.value_and_grad(mean_loss(config)))
    value, gradients = step(first(config))
    assert float(value) == pytest.approx(math.log(vocab_size), abs=0.15)
    assert not gradients["embedding"]["embedding"][vocab_size:].any()
    value, _ = step(jax.tree.map(jnp.zeros_like, first(config)))
    assert float(value) == pytest.approx(math.log(vocab_size), abs=1e-5)


def test_cross_entropy_ignores_padding_and_survives_large_logits():
    logits = jnp.array([[1e4, 0.0, -1e4, 5e4]])
    loss = cross_entropy(logits, jnp.array([1]), 3, SingleDevice())
    chex.assert_trees_all_close(loss, jnp.array([1e4]))


def test_gradients_equal_the_plain_model():
    parameters = noisy(CONFIG)
    batch = {"tokens": TOKENS, "targets": TOKENS[:, ::-1].copy(), "mask": np.ones((2, 12), np.float32)}
    found = jax.jit(jax.grad(mean_loss(CONFIG)))(parameters)
    want = jax.jit(jax.grad(lambda p: reference_loss(p, batch, 300)))(parameters)
    chex.assert_trees_all_close(found, want, rtol=1e-4, atol=1e-6)


def test_a_token_sees_no_later_token():
    parameters = first(CONFIG)
    score = jax.jit(lambda t: forward(CONFIG, parameters, t))
    changed = TOKENS.copy()
    changed[:, 7:] += 1
    chex.assert_trees_all_equal(score(TOKENS)[:, :7], score(changed)[:, :7])
    assert not np.array_equal(score(TOKENS)[:, 7:], score(changed)[:, 7:])


def test_attention_averages_equal_keys():
    ones = jnp.ones((1, 4, 1, 8))
    value = jnp.arange(4.0)[None, :, None, None] * ones
    chex.assert_trees_all_close(causal_attention(ones, ones, value)[0, :, 0, 0], jnp.array([0.0, 0.5, 1.0, 1.5]))


def test_sites_of_a_model():
    comm = Recorder()
    config = dataclasses.replace(CONFIG, num_layers=1)

    def run(parameters):
        model = merged(config, parameters)
        graph, layers = nnx.split(model.layers)
        layer = nnx.merge(graph, jax.tree.map(lambda x: x[0], nnx.to_pure_dict(layers)))
        return model.logits(layer(model.embed(TOKENS, comm), comm, 0, None)[0], comm)

    logits = jax.eval_shape(run, jax.eval_shape(lambda: init_parameters(config, 0)))
    chex.assert_shape(logits, (2, 12, 384))
    assert comm.calls == [
        ("leave", "embedding"),
        ("enter", "attention"),
        ("leave", "attention"),
        ("enter", "mlp"),
        ("leave", "mlp"),
        ("enter", "head"),
    ]
    assert {site for _, site in comm.calls} == set(SITES)


def test_bf16_computes_in_bf16_with_f32_logits():
    @jax.jit
    def run(parameters):
        model, comm = merged(CONFIG, parameters, "bfloat16"), SingleDevice()
        x = model.run_layers(model.embed(TOKENS, comm), comm)
        return x, model.logits(x, comm)

    x, logits = run(noisy(CONFIG))
    assert (x.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)
    want = jax.jit(reference_logits, static_argnums=2)(noisy(CONFIG), TOKENS, 300)
    assert float(jnp.linalg.norm(logits[..., :300] - want) / jnp.linalg.norm(want)) < 2e-2
