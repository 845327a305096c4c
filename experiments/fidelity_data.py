"""What `experiments.fidelity` sends through the codecs: stated distributions, and the messages of a training GPT."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from experiments import step
from experiments.config import TrainConfig
from experiments.data import TrainingData, load_corpus, with_model_sizes
from experiments.recipes import RECIPES
from experiments.sites import MESSAGES
from experiments.train import place
from taco_jax import compat
from taco_jax.models.decoder import LAYER_SITES
from taco_jax.sharding.mesh import make_mesh, parse_mesh
from taco_jax.sharding.tensor_parallel import TensorParallel

CHANNELS = 1024
OUTLIERS, OUTLIER_FACTOR = 8, 50.0
CANCELLATION = 0.3
TRAINED_RANKS = 4


@dataclasses.dataclass(frozen=True)
class Distribution:
    """Values f32[rows, channels], a row being a token.

    Attributes:
        name: what a reader sees.
        values: all of them.
        outliers: channels that are none of the ordinary ones.
    """

    name: str
    values: np.ndarray
    outliers: np.ndarray | None = None


def distributions(rows: int, seed: int) -> Iterator[Distribution]:
    """Yield the distributions, each of [rows, 1024] values.

    Gaussian; the same with 8 channels times 50, those that `default_rng(0).choice(1024, 8, replace=False)` names; rows
    times exp(sigma g), g ~ N(0, 1), for sigma 1 and 2.
    """
    random = np.random.default_rng(seed)
    gaussian = random.standard_normal((rows, CHANNELS), np.float32)
    yield Distribution("gaussian", gaussian)
    outliers = np.random.default_rng(0).choice(CHANNELS, OUTLIERS, replace=False)
    values = gaussian.copy()
    values[:, outliers] *= np.float32(OUTLIER_FACTOR)
    yield Distribution("outliers", values, outliers)
    octaves = random.standard_normal((rows, 1), np.float32)
    for sigma in (1, 2):
        yield Distribution(f"tokens_sigma{sigma}", gaussian * np.exp(sigma * octaves))


def gaussian_parts(ranks: int, size: int, seed: int) -> np.ndarray:
    """Return f32[ranks, size], independent N(0, 1)."""
    return np.random.default_rng((seed, ranks)).standard_normal((ranks, size), np.float32)


def cancelling_parts(ranks: int, size: int, seed: int) -> np.ndarray:
    """Return f32[ranks, size] whose sum has 0.3 times the RMS that a part has (but for its missing mean)."""
    parts = gaussian_parts(ranks, size, seed)
    common = np.random.default_rng((seed, ranks, 1)).standard_normal(size, np.float32)
    return parts - parts.mean(0) + np.float32(CANCELLATION / ranks) * common


@dataclasses.dataclass(frozen=True)
class Captured:
    """What the ranks of one tensor-parallel group were about to add.

    Attributes:
        step: training steps before it.
        site: as in `experiments.sites.MESSAGES`.
        layer: 0 where no layer has the site.
        direction: forward or backward.
        parts: f32[ranks, tokens, hidden].
    """

    step: int
    site: str
    layer: int
    direction: str
    parts: np.ndarray


def training(recipe: str, seed: int) -> TrainConfig:
    """Return the run that tensors are captured from: the recipe's on four devices of a layer, uncompressed."""
    config = RECIPES[recipe]()
    parallel = dataclasses.replace(config.parallel, num_microbatches=1)
    return dataclasses.replace(config, mesh=f"tp{TRAINED_RANKS}", compression="none", seed=seed, parallel=parallel)


def captured(config: TrainConfig, steps: int) -> Iterator[Captured]:
    """Train `steps` steps and yield the messages of the batches before the first, the middle and after the last one."""
    corpus = load_corpus(config.data)
    config = with_model_sizes(config, corpus)
    program = step.build(config, make_mesh(parse_mesh(config.mesh)))
    data = TrainingData(corpus, config.data, config.seed)
    state, record = program.init(config.seed), recorder(program)
    for number in range(steps + 1):
        batch = place(data[number], program.batch_sharding)
        if number in (0, steps // 2, steps):
            yield from _messages(number, record(state["params"], batch))
        if number < steps:
            state, _ = program.train_step(state, number, batch)


def _messages(number: int, found: Mapping[str, Mapping[str, np.ndarray]]) -> Iterator[Captured]:
    for site, directions in found.items():
        for direction, parts in directions.items():
            # [ranks, (layers,) batch, sequence, hidden]
            layers = np.moveaxis(parts, 1, 0) if site in LAYER_SITES else parts[None]
            for layer, rows in enumerate(layers):
                yield Captured(number, site, layer, direction, rows.reshape(len(rows), -1, rows.shape[-1]))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Recording(TensorParallel):
    """Exact communication that tells what it carried when it is differentiated.

    `scales[site][direction]` is an array of zeros of the message's shape. Its cotangent is the message: of `forward`,
    this device's part of the sum; of `backward`, its part of the cotangent's sum.
    """

    def enter(self, x: jax.Array, site: str) -> jax.Array:
        return compat.vary(x, (self.axis_name,)) + self._scales(site)["backward"].astype(x.dtype)

    def leave(self, y: jax.Array, site: str) -> jax.Array:
        zeros = compat.vary(self._scales(site)["forward"], compat.varying_axes(y))
        return lax.psum(_recorded(y, zeros), self.axis_name)


@jax.custom_vjp
def _recorded(y: jax.Array, zeros: jax.Array) -> jax.Array:
    return y


_recorded.defvjp(lambda y, zeros: (y, y), lambda y, ct: (ct, y.astype(jnp.float32)))


def recorder(program: step.Program) -> Callable[[Any, Mapping[str, jax.Array]], dict[str, dict[str, np.ndarray]]]:
    """Return a function from parameters and a batch to the messages that the loss of the batch sends.

    They are {site: {direction: f32[ranks, (layers,) batch, sequence, hidden]}}; `program` has a mesh of tp alone.
    """
    assert program.mesh.shape["tp"] == program.mesh.size
    model = program.model_config
    message = (*program.abstract_batch["tokens"].shape, model.hidden_size)
    layers = {site: (model.num_layers,) if site in LAYER_SITES else () for site in MESSAGES}
    shapes = {site: {way: (*layers[site], *message) for way in ways} for site, ways in MESSAGES.items()}

    def local(parameters: Any, batch: Any) -> Any:
        def loss(zeros: Any) -> jax.Array:
            comm = Recording(zeros)
            decoder = program.model(parameters)
            x = compat.vary(decoder.embed(batch["tokens"], comm), ("pp",))
            x = decoder.run_layers(x, comm.select(LAYER_SITES), remat=False)
            total = jnp.sum(decoder.loss(x, batch["targets"], comm) * batch["mask"])
            return lax.psum(total, "pp") / jnp.sum(batch["mask"])

        zeros = jax.tree.map(lambda shape: compat.vary(jnp.zeros(shape), ("tp",)), shapes, is_leaf=_is_shape)
        return jax.tree.map(lambda x: x[None], jax.grad(loss)(zeros))

    specs = (program.specs, P())
    run = jax.jit(jax.shard_map(local, mesh=program.mesh, in_specs=specs, out_specs=P("tp")))
    return lambda parameters, batch: jax.device_get(run(parameters, dict(batch)))


def _is_shape(x: Any) -> bool:
    return isinstance(x, tuple)
