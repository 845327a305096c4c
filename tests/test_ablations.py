"""The published codec with a part left out: what it does to values, in float64, and that it is had by name only."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from codec_cases import ONE, PAPER, gaussian
from jax.sharding import PartitionSpec as P

from experiments import ablations
from experiments.config import CommunicationConfig, ConfigError, TrainConfig, validate
from taco_jax import Compression, codec, psum, wire
from taco_jax.pallas import registry
from taco_jax.sharding.mesh import make_mesh, parse_mesh

pytestmark = pytest.mark.usefixtures("quickly_compiled")
NAMES = tuple(ablations.ABLATIONS)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    ablations.register()


def round_trip(x: np.ndarray, name: str) -> np.ndarray:
    """What the definition gives, in float64."""
    v = oracles.blocks(x, PAPER)
    if name == "e4m3_unscaled":
        return oracles.rows(oracles.to_grid(v, "e4m3"))
    alpha = 448 / np.sqrt(np.square(v).mean(-1, keepdims=True))
    z = oracles.rotate(alpha * v, PAPER)
    if name == "int8_without_amax":
        q, s = oracles.to_grid(z, "int8"), 1.0
    else:
        s = np.abs(z).max(-1, keepdims=True) / 448
        q = oracles.to_grid(np.clip(z / s, -448, 448), "e5m2")
    return oracles.rows(oracles.rotate(q * s, PAPER) / alpha)


@functools.cache
def program(name: str):
    """Compile once for all tests: eager operations take longer."""

    def run(x, alpha):
        message, seen = codec.encode(x, PAPER, alpha, observe=True, implementation=name)
        return message, codec.decode(message, PAPER, alpha, jnp.float32, implementation=name), seen

    return jax.jit(run)


def values(seed: int) -> np.ndarray:
    return gaussian(64, 2048, seed=seed)


def sent(x: np.ndarray, name: str) -> np.ndarray:
    message, decoded, _ = program(name)(x, ONE)
    assert message.shape == (*x.shape[:-1], wire.message_size(x.shape[-1], PAPER)) and message.dtype == jnp.uint8
    return np.asarray(decoded)


@pytest.mark.parametrize("scale", [1.0, 1e-5])
@pytest.mark.parametrize("name", NAMES)
def test_values_come_out_as_defined(name, scale):
    x = scale * values(40)
    expected, found = round_trip(x, name), sent(x, name)
    # Float32 may take the other neighbour where a value lies half way between two codes.
    assert np.mean(np.abs(found - expected) <= 1e-5 * scale) > 0.999
    chex.assert_trees_all_close(oracles.snr_db(x, found), oracles.snr_db(x, expected), atol=0.01)


def test_int8_without_amax_clips_most_of_a_gaussian():
    """Clipped at c = 127/448 of its RMS, a Gaussian loses 2 ((1 + c^2) Q(c) - c phi(c)) of its power: 2.06 dB left."""
    x = values(41)
    assert oracles.snr_db(x, sent(x, "int8_without_amax")) == pytest.approx(2.06, abs=0.05)
    # An amax makes 43 dB of the same bits.
    assert oracles.snr_db(x, codec.round_trip(jnp.asarray(x), Compression.named("int8").forward)) > 42


def test_e5m2_loses_a_mantissa_bit_and_no_scale_loses_small_gradients():
    x = values(42)
    e4m3, e5m2 = (oracles.snr_db(x, sent(x, name)) for name in ("e4m3_unscaled", "e5m2_to_448"))
    assert e4m3 - e5m2 == pytest.approx(6.0, abs=0.5)
    assert not sent(1e-5 * x, "e4m3_unscaled").any()
    assert np.abs(sent(1e3 * x, "e4m3_unscaled")).max() == 448


@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zeros(name):
    assert not sent(np.zeros((64, 2048), np.float32), name).any()


@pytest.mark.parametrize("name", NAMES)
def test_the_observation_is_the_error(name):
    x = values(43)
    seen = program(name)(x, jnp.float32(0.5))[-1]
    squares, _, saturated, nonfinite, noise = np.asarray(seen, np.float64)
    chex.assert_trees_all_close(squares, np.square(0.5 * x.astype(np.float64)).sum(), rtol=1e-5)
    chex.assert_trees_all_close(10 * np.log10(squares / noise), oracles.snr_db(x, round_trip(x, name)), atol=0.01)
    # |z| is above 127 of 448 for 77.7 % of a Gaussian.
    assert saturated / x.size == pytest.approx(0.777 if name == "int8_without_amax" else 0.0, abs=0.01)
    assert nonfinite == 0


@pytest.mark.parametrize("name", NAMES)
def test_an_all_reduce_sends_the_ablation_twice(name):
    n, columns = 4, 2048
    x = gaussian(n, columns, seed=44)
    compression = Compression.named("paper", min_bytes=0, implementation=name)
    mesh = make_mesh(parse_mesh(f"tp{n}"))
    run = jax.shard_map(
        lambda x: psum(x[0], "tp", compression=compression, name="site"), mesh=mesh, in_specs=P("tp"), out_specs=P()
    )
    found = np.asarray(jax.jit(run)(x))
    expected = round_trip(round_trip(x, name).sum(0)[None], name)[0]
    # A code half way between two may be the other one in float32: far less than what either hop loses.
    assert oracles.snr_db(expected, found) > 45
    chex.assert_trees_all_close(oracles.snr_db(x.sum(0), found), oracles.snr_db(x.sum(0), expected), atol=0.05)


def test_it_is_had_by_name_only():
    assert registry.registered() == NAMES
    assert registry.resolve(None, PAPER, jnp.float32).__name__ == "taco_jax.pallas.xla"
    assert registry.resolve(NAMES[0], PAPER, jnp.float32) is ablations.ABLATIONS[NAMES[0]]
    with pytest.raises(NotImplementedError, match="'e5m2_to_448': it stands in the place of the preset \"paper\""):
        registry.resolve("e5m2_to_448", Compression.named("taco").forward, jnp.float32)


def test_a_name_is_taken_once():
    ablations.register()
    for name in ("xla", "triton_interpret", NAMES[0]):
        with pytest.raises(ValueError, match=f"'{name}' is the name of another implementation"):
            registry.register(name, object())


def test_the_trainer_knows_what_is_registered(monkeypatch):
    config = TrainConfig(compression="paper", communication=CommunicationConfig(implementation=NAMES[0]))
    validate(config)
    monkeypatch.setattr(registry, "_registered", {})
    with pytest.raises(ConfigError, match="communication.implementation must be one of auto, triton"):
        validate(config)
