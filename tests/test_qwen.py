import dataclasses
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from taco_jax.models.config import ModelConfig
from taco_jax.models.families import graph_of, init_parameters
from taco_jax.models.layers import RMSNorm, causal_attention, key_heads_read, rotate, without_padding
from taco_jax.sharding.tensor_parallel import SingleDevice

pytestmark = pytest.mark.usefixtures("quickly_compiled")

QWEN = ModelConfig(2, 32, 4, "qwen", num_kv_heads=2, head_dim=12, intermediate_size=48, vocab_size=50, max_positions=16)
GPT = ModelConfig(2, 32, 4, "gpt", vocab_size=50, max_positions=16)
KINDS = {
    "gpt": GPT,
    "qwen2": dataclasses.replace(QWEN, qkv_bias=True, tie_embeddings=False),
    "qwen3": dataclasses.replace(QWEN, qk_norm=True),
}
RNG = np.random.default_rng(0)


def noisy(config):
    parameters = jax.jit(lambda: init_parameters(config, 0))()
    return jax.tree.map(lambda p: p + 0.1 * RNG.normal(size=p.shape).astype(np.float32), parameters)


def test_rotation_depends_on_the_distance_alone():
    q, k = RNG.normal(size=(2, 1, 1, 1, 8)).astype(np.float32)
    products = [
        float(jnp.vdot(rotate(jnp.asarray(q), start, 100.0), rotate(jnp.asarray(k), start + 3, 100.0)))
        for start in (0, 5, 1000)
    ]
    np.testing.assert_allclose(products, products[0], rtol=1e-4)
    chex.assert_trees_all_equal(rotate(jnp.asarray(q), 0, 100.0), q)


def test_rotation_turns_pairs_by_the_published_angles():
    x = RNG.normal(size=(2, 5, 3, 6)).astype(np.float32)
    angles = np.arange(7, 12)[:, None] * 50.0 ** (-np.arange(3) * 2 / 6)
    turned = (x[..., :3] + 1j * x[..., 3:]) * np.exp(1j * angles)[:, None]
    want = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(rotate(jnp.asarray(x), 7, 50.0), want, atol=1e-5)


def test_rms_norm():
    norm = RMSNorm(16, epsilon=1e-6)
    x = RNG.normal(size=(3, 16)).astype(np.float32)
    norm.scale[...] = jnp.arange(16.0)
    want = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6) * np.arange(16)
    np.testing.assert_allclose(norm(jnp.asarray(x)), want, rtol=1e-5, atol=1e-6)
    assert norm(jnp.asarray(x, jnp.bfloat16)).dtype == jnp.bfloat16


def test_query_heads_share_key_heads_and_see_what_came_before():
    q, k = RNG.normal(size=(2, 3, 6, 8)), RNG.normal(size=(2, 7, 2, 8))
    v = RNG.normal(size=(2, 7, 2, 8))
    found = causal_attention(*(jnp.asarray(x, jnp.float32) for x in (q, k, v)), start=2)
    for head in range(6):
        for i in range(3):
            keys, values = k[:, : 3 + i, head // 3], v[:, : 3 + i, head // 3]
            scores = np.einsum("bd,btd->bt", q[:, i, head], keys) / math.sqrt(8)
            weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
            want = np.einsum("bt,btd->bd", weights, values)
            np.testing.assert_allclose(found[:, i, head], want, atol=1e-5)


class Rank(SingleDevice):
    """One device of several that share a layer."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def index(self):
        return jnp.int32(self.rank)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "devices", "here"),
    [(4, 2, 2, 2), (4, 2, 4, 1), (28, 4, 8, 4), (14, 2, 4, 4), (5, 1, 2, 3), (24, 8, 6, 4), (8, 8, 3, 3)],
)
def test_every_query_head_reads_its_own_key_head(heads, kv_heads, devices, here):
    """M4: whatever the numbers, the head that a query head reads is the one that it reads on a single device."""
    config = dataclasses.replace(QWEN, num_heads=heads, num_kv_heads=kv_heads)
    for rank in range(devices):
        read = key_heads_read(here, config, Rank(rank, devices))
        if read is None:  # shared like the query heads
            read = rank * (here * kv_heads // heads) + jnp.arange(here * kv_heads // heads)
            if heads == kv_heads:
                read = rank * here + jnp.arange(here)
        for head in range(rank * here, min(heads, (rank + 1) * here)):
            assert int(read[(head - rank * here) // (here // len(read))]) == head // (heads // kv_heads)


def test_padded_heads_are_silent():
    y = jnp.ones((1, 2, 3, 4))
    config = dataclasses.replace(QWEN, num_heads=5, num_kv_heads=1)
    chex.assert_trees_all_equal(without_padding(y, config, Rank(0, 2)), y)
    chex.assert_trees_all_equal(without_padding(y, config, Rank(1, 2)), y.at[:, :, 2].set(0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_changes_no_logit(kind):
    config, comm = KINDS[kind], SingleDevice()
    parameters, tokens = noisy(config), RNG.integers(0, 50, (2, 9)).astype(np.int32)

    @jax.jit
    def all_at_once(parameters):
        model = nnx.merge(graph_of(config, dtype="float32"), parameters)
        return model.logits(model.run_layers(model.embed(tokens, comm), comm), comm)

    @jax.jit
    def piecewise(parameters):
        model = nnx.merge(graph_of(config, dtype="float32"), parameters)
        cache, parts = model.new_cache(2, 12, comm), []
        for start, stop in ((0, 5), (5, 6), (6, 9)):
            x = model.embed(tokens[:, start:stop], comm, start)
            x, cache = model.run_layers(x, comm, start=start, cache=cache)
            parts.append(model.logits(x, comm))
        return jnp.concatenate(parts, axis=1), cache

    logits, (keys, values) = piecewise(parameters)
    np.testing.assert_allclose(logits, all_at_once(parameters), atol=2e-5)
    chex.assert_shape([keys, values], (2, 2, 12, config.resolved().num_kv_heads, config.resolved_head_dim))
    assert not keys[:, :, 9:].any()


def test_a_longer_text_changes_no_earlier_logit():
    config, comm = KINDS["qwen3"], SingleDevice()
    parameters, tokens = noisy(config), RNG.integers(0, 50, (1, 8)).astype(np.int32)

    @jax.jit
    def score(tokens):
        model = nnx.merge(graph_of(config, dtype="float32"), parameters)
        return model.logits(model.run_layers(model.embed(tokens, comm), comm), comm)

    changed = tokens.copy()
    changed[:, 5:] += 1
    chex.assert_trees_all_equal(score(tokens)[:, :5], score(changed)[:, :5])
    assert not np.array_equal(score(tokens)[:, 5:], score(changed)[:, 5:])
