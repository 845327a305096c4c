"""The programs of a training run on a mesh: initialise, train one step, evaluate, score a text.

One `jax.shard_map` over the whole mesh holds the model, its pipeline and the gradient sums; the optimizer runs on the
global arrays behind it in the same jit.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments import optimizer
from experiments.compiler_options import step_options
from experiments.config import TrainConfig, validate
from experiments.sites import MESSAGES, first_true, nonfinite_origin, site_metrics
from taco_jax import Compression, SitePair, all_gather, init_scales, psum, save_payloads, split_scales, update_scales
from taco_jax.compat import vary
from taco_jax.models.config import ModelConfig
from taco_jax.models.decoder import LAYER_SITES, SITES, Decoder
from taco_jax.models.families import abstract_parameters, graph_of, init_parameters
from taco_jax.scales import ALPHA, BACKWARD, UPDATES
from taco_jax.sharding import pipeline, rules
from taco_jax.sharding.data_parallel import global_norm, sum_replicas
from taco_jax.sharding.mesh import AXES, format_mesh
from taco_jax.sharding.tensor_parallel import TensorParallel

DATA = P("dp", None)
"""Batches are split over dp; the devices of a pipeline and of a layer read the same tokens."""
BATCH_DTYPES = {"tokens": jnp.int32, "targets": jnp.int32, "mask": jnp.float32}
OBSERVE_ONLY = -1
"""Number of a step that updates scales and nothing else."""


def build(config: TrainConfig, mesh: Mesh) -> "Program":
    """Return the programs of `config` on `mesh`; nothing is compiled before it is used.

    Raises:
        experiments.config.ConfigError: if the model or the batch does not divide over the mesh.
    """
    return Program(config, mesh)


def model_config(config: TrainConfig) -> ModelConfig:
    """Return the architecture of `config` with every size written out."""
    longest = config.model.max_positions or config.data.sequence_length
    return dataclasses.replace(config.model, max_positions=longest).resolved()


class Program:
    """What a run does on its mesh; `state` is {"params", "opt_state", "scales"} of sharded arrays."""

    def __init__(self, config: TrainConfig, mesh: Mesh):
        self.config, self.mesh = config, mesh
        validate(dataclasses.replace(config, mesh=format_mesh(mesh.shape)))
        self.model_config = model_config(config)
        self._graph = graph_of(self.model_config, shards=mesh.shape["tp"], dtype=config.dtype)
        self.compression = compression_of(config)
        self.direction = optimizer.direction(config.optimizer)
        self.learning_rate = optimizer.learning_rate(config)
        self.batch_sharding = NamedSharding(mesh, DATA)
        self._shapes = jax.eval_shape(self._new_state, 0)
        self.specs = rules.partition_specs(self._shapes["params"], mesh.shape["tp"])
        self._partial_axes = rules.partial_axes(self.specs)
        self.scale_specs = {site: P("pp") if site in LAYER_SITES else P() for site in self._shapes["scales"]}

    # State

    def init(self, seed: int) -> dict:
        """Return the first state; the same values on every mesh."""
        # It runs once: without optimisation it compiles four times as fast.
        options = {"xla_backend_optimization_level": 0}
        new_state = jax.jit(self._new_state, out_shardings=self.state_shardings, compiler_options=options)
        return new_state(np.uint32(seed))

    def init_scales(self) -> dict:
        """Return the scales of the first state, for messages that no training has left any for."""
        new_scales = jax.jit(lambda: self._new_state(0)["scales"], out_shardings=self.state_shardings["scales"])
        return new_scales()

    def abstract_state(self) -> dict:
        """Return the tree of `ShapeDtypeStruct` with shardings that a state has."""
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), self._shapes, self.state_shardings
        )

    @functools.cached_property
    def unpadded_state(self) -> dict:
        """The tree of `ShapeDtypeStruct` of a state without the padding that this mesh needs, for checkpoints."""
        parameters = abstract_parameters(self.model_config, shards=0)
        moments = jax.eval_shape(self.direction.init, parameters)
        return {"params": parameters, "opt_state": moments, "scales": self._shapes["scales"]}

    @functools.cached_property
    def state_shardings(self) -> dict:
        """Sharding of every leaf of the state: moments lie like their parameters."""
        named = functools.partial(NamedSharding, self.mesh)
        parameters = jax.tree.map(named, self.specs)
        moments = optax.tree.map_params(
            self.direction,
            lambda _, sharding: sharding,
            self._shapes["opt_state"],
            parameters,
            transform_non_params=lambda _: named(P()),
        )
        return {"params": parameters, "opt_state": moments, "scales": jax.tree.map(named, self.scale_specs)}

    def _new_state(self, seed: jax.Array | int) -> dict:
        parameters = init_parameters(self.model_config, seed, shards=self.mesh.shape["tp"])
        layers = dict.fromkeys(LAYER_SITES, self.compression)
        others = dict.fromkeys((site for site in SITES if site not in LAYER_SITES), self.compression)
        scales = init_scales(layers, (self.model_config.num_layers,)) | init_scales(others)
        # Cotangents of a mean over tokens are some hundredths of 1 / tokens; FP8 has 17 octaves to meet them in.
        tokens = self.config.data.batch_size * self.config.data.sequence_length
        alpha = 2.0 ** (math.ceil(math.log2(tokens)) + 4)
        scales = {site: value.at[..., BACKWARD, :, ALPHA].set(alpha) for site, value in scales.items()}
        return {"params": parameters, "opt_state": self.direction.init(parameters), "scales": scales}

    # Training

    def train_step(self, state: dict, step: int, batch: dict) -> tuple[dict, dict]:
        """Return the next state and the metrics of one step; `state` is donated."""
        return self.compiled(state, np.int32(step), batch)

    def calibrate(self, state: dict, batch: dict) -> dict:
        """Return `state` with the scales that adaptive codecs start from; `state` is donated.

        Passes of the step itself, of which only the scales are kept, until the scales stay: two or three, because
        `_new_state` starts them near the truth. Where a site's first messages came out as zeros nevertheless, each
        pass sees one site further, so they end with every site seen.
        """
        if not self.compression.is_adaptive:
            return state
        for _ in range(2 * self.model_config.num_layers + 3):
            state, metrics = self.train_step(state, OBSERVE_ONLY, batch)
            if metrics["scale_changes"] == 0:
                break
        return state

    @functools.cached_property
    def compiled(self) -> jax.stages.Compiled:
        """The compiled step."""
        return self.compile(step_options(self.mesh))

    def compile(self, options: Mapping[str, bool | int]) -> jax.stages.Compiled:
        """Return the step compiled with options of XLA's; {} leaves them all to XLA and its flags."""
        return self._lowered.compile(compiler_options=dict(options) or None)

    @functools.cached_property
    def _lowered(self) -> jax.stages.Lowered:
        return self._traced.lower()

    @property
    def jaxpr(self) -> Any:
        """The closed jaxpr of the step."""
        return self._traced.jaxpr

    @functools.cached_property
    def _traced(self) -> jax.stages.Traced:
        batch = self.abstract_batch
        replicated = NamedSharding(self.mesh, P())
        step = jax.jit(
            self._step,
            donate_argnums=0,
            in_shardings=(self.state_shardings, replicated, dict.fromkeys(batch, self.batch_sharding)),
            out_shardings=(self.state_shardings, replicated),
        )
        return step.trace(self._shapes, jax.ShapeDtypeStruct((), jnp.int32), batch)

    @property
    def compressed_directions(self) -> dict[str, list[str]]:
        """Site -> directions in which its tensor-parallel messages are to be compressed."""
        if self.mesh.shape["tp"] == 1:
            return {}
        compressed = self.compression.compressed_directions
        return {site: [way for way in ways if way in compressed] for site, ways in MESSAGES.items()}

    @property
    def abstract_batch(self) -> dict:
        """The tree of `ShapeDtypeStruct` of a batch, which lies like `batch_sharding`."""
        shape = (self.config.data.batch_size, self.config.data.sequence_length)
        return {k: jax.ShapeDtypeStruct(shape, t) for k, t in BATCH_DTYPES.items()}

    def nonfinite_origin(self, metrics: Mapping[str, float]) -> str:
        """Return where a step that was not finite went wrong, as the end of a sentence."""
        paths = jax.tree_util.tree_flatten_with_path(self._shapes["params"])[0]
        names = [".".join(str(entry.key) for entry in path) for path, _ in paths]
        return nonfinite_origin(metrics, self.model_config.num_layers, names)

    def loss_and_gradients(self, parameters: dict, scales: dict, batch: dict) -> tuple[dict, dict, dict]:
        """Return {"loss", "tokens", "grad_norm"} of the whole batch, the gradients and what the messages were like.

        Everything is global; to be called under `jax.jit`.

        Args:
            parameters: the model's parameters.
            scales: state of the adaptive scales, {} without compression.
            batch: tokens, targets and mask.

        Returns:
            The last is {site: (scales, observation)} of all layers, on every device.
        """
        run = jax.shard_map(
            self._local_gradients,
            mesh=self.mesh,
            in_specs=(self.specs, self.scale_specs, DATA),
            out_specs=(P(), self.specs, P()),
            check_vma=True,
        )
        return run(parameters, scales, batch)

    def _step(self, state: dict, step: jax.Array, batch: dict) -> tuple[dict, dict]:
        sums, gradients, messages = self.loss_and_gradients(state["params"], state["scales"], batch)
        with jax.named_scope("scales"):
            scales, seen = self._update_scales(messages)
        norm, rate = sums["grad_norm"], self.learning_rate(step)
        with jax.named_scope("optimizer"):
            update, opt_state = self.direction.update(gradients, state["opt_state"], state["params"], global_norm=norm)
        # A step that is not finite would spoil the moments for good; all ranks see the same two numbers.
        finite = jnp.isfinite(sums["loss"]) & jnp.isfinite(norm)
        moves = finite & (step >= 0)
        new = {"params": optimizer.apply(state["params"], update, rate), "opt_state": opt_state}
        new = {key: _where(moves, new[key], state[key]) for key in new}
        new["scales"] = _where(finite, scales, state["scales"])
        skipped = 1.0 - finite.astype(jnp.float32)
        metrics = {**sums, "lr": rate, "nonfinite": skipped, "skipped_step": skipped, **seen}
        return new, {k: jnp.asarray(v, jnp.float32) for k, v in metrics.items()}

    def _update_scales(self, messages: dict) -> tuple[dict, dict]:
        """Return this stage's scales, which follow the observations, and the metrics of the messages."""

        def local(messages: dict) -> tuple[dict, dict]:
            old, observed = ({site: pair[i] for site, pair in messages.items()} for i in range(2))
            new, seen = update_scales(old, observed, axis_name=None)
            metrics = {key: seen[key] for key in ("saturation", "snr_forward", "snr_backward")}
            metrics |= site_metrics(old, observed, seen)
            own = {site: pipeline.own_share(x) if site in LAYER_SITES else x for site, x in new.items()}
            return own, {**metrics, "scale_changes": _changes(new, old)}

        run = jax.shard_map(local, mesh=self.mesh, in_specs=P(), out_specs=(self.scale_specs, P()), check_vma=True)
        return run(messages)

    def _local_gradients(self, parameters: dict, scales: dict, batch: dict) -> tuple:
        """Return scalars and gradients, added over every axis that they are not sharded on, and `_every_stage`."""
        tokens = psum(jnp.sum(batch["mask"]), "dp", compression=None, name="tokens")
        batch = {**batch, "tokens": _after(batch["tokens"], tokens)}
        states, probes = split_scales(scales, AXES)
        # Gradients with respect to varying parameters are local; their sums over devices then stand here, once a step.
        varying = jax.tree.map(vary, parameters, self._partial_axes)

        def loss(parameters: dict, probes: dict) -> jax.Array:
            pairs = {site: SitePair(states[site], probes[site]) for site in states}
            return self._loss_sum(parameters, self.comm(pairs), batch) / jnp.maximum(tokens, 1.0)

        value, (gradients, observed) = jax.value_and_grad(loss, argnums=(0, 1))(varying, probes)
        with jax.named_scope("taco.psum.gradients.backward"):
            gradients = sum_replicas(gradients, self.specs, self._partial_axes)
        with jax.named_scope("taco.psum.grad_norm.backward"):
            norm, squares = global_norm(gradients, self.specs)
        sums = {
            "loss": psum(value, ("dp", "pp"), compression=None, name="loss"),
            "tokens": tokens,
            "grad_norm": norm,
            "nonfinite_gradient": first_true(~jnp.isfinite(squares)),
        }
        return sums, gradients, _every_stage(scales, observed)

    # The model on its part of the mesh

    def _loss_sum(self, parameters: dict, comm: TensorParallel, batch: dict) -> jax.Array:
        """Return this device's part of the sum over tokens of mask * loss; the parts of dp and pp add up to it."""
        model, x = self._hidden(parameters, comm, batch["tokens"], self.config.parallel.num_microbatches, ("dp", "pp"))
        targets, mask = (pipeline.own_share(batch[key].reshape(-1)) for key in ("targets", "mask"))
        with jax.named_scope("head"):
            return jnp.sum(model.loss(x, targets, comm) * mask)

    def _hidden(
        self, parameters: dict, comm: TensorParallel, tokens: jax.Array, num_microbatches: int, axes: tuple[str, ...]
    ) -> tuple[Decoder, jax.Array]:
        """Return the model and its last hidden states [tokens / pp, H], shared by the stages."""
        model = self.model(parameters)
        microbatches = tokens.reshape(num_microbatches, -1, tokens.shape[-1])
        with jax.named_scope("embedding"):
            x = pipeline.on_first_stage(lambda: model.embed(microbatches, comm), axes=axes)
        options = {"remat": self.config.parallel.remat, "remat_policy": save_payloads()}
        layers = functools.partial(model.run_layers, comm=comm.select(LAYER_SITES), **options)
        with jax.named_scope("layers"):
            x = pipeline.run_pipeline(layers, x, **options)
        return model, pipeline.scatter_from_last_stage(x.reshape(-1, x.shape[-1]))

    def model(self, parameters: dict) -> Decoder:
        """Return the model of a device's shards of the parameters, inside `shard_map`."""
        return nnx.merge(self._graph, parameters)

    # Without gradients

    def traced_evaluation(self) -> jax.stages.Traced:
        """Return the traced program of `eval_step`, for a look at what it sends."""
        return self._evaluate.trace(self._shapes["params"], self._shapes["scales"], self.abstract_batch)

    def eval_step(self, state: dict, batch: dict) -> dict:
        """Return {"loss_sum", "tokens"} of a batch: nats over its tokens, and their number."""
        return self._evaluate(state["params"], state["scales"], batch)

    @functools.cached_property
    def _evaluate(self) -> Any:
        def local(parameters: dict, scales: dict, batch: dict) -> dict:
            parameters = jax.tree.map(lambda p: vary(p, ("dp", "pp")), parameters)
            tokens = psum(jnp.sum(batch["mask"]), "dp", compression=None, name="tokens")
            batch = {**batch, "tokens": _after(batch["tokens"], tokens)}
            loss = self._loss_sum(parameters, self.comm(scales), batch)
            return {"loss_sum": psum(loss, ("dp", "pp"), compression=None, name="loss"), "tokens": tokens}

        specs = (self.specs, self.scale_specs, DATA)
        shardings = (*(self.state_shardings[k] for k in ("params", "scales")), self.batch_sharding)
        run = jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=P(), check_vma=True)
        return jax.jit(run, in_shardings=shardings)

    def logits(self, state: dict, tokens: jax.Array) -> jax.Array:
        """Return f32[b, s, vocab] for tokens[b, s], replicated; every dp rank does the same work."""
        return self._score(state["params"], state["scales"], jnp.asarray(tokens, jnp.int32))

    @functools.cached_property
    def _score(self) -> Callable:
        def local(parameters: dict, scales: dict, tokens: jax.Array) -> jax.Array:
            parameters = jax.tree.map(lambda p: vary(p, ("pp",)), parameters)
            comm = self.comm(scales)
            model, x = self._hidden(parameters, comm, tokens, 1, ("pp",))
            return model.logits(x, comm)

        specs = (self.specs, self.scale_specs, P())
        run = jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=P("pp", "tp"), check_vma=True)

        def score(parameters: dict, scales: dict, tokens: jax.Array) -> jax.Array:
            flat = run(parameters, scales, tokens)[: tokens.size, : self.model_config.vocab_size]
            return flat.reshape(*tokens.shape, -1)

        return jax.jit(score, out_shardings=NamedSharding(self.mesh, P()))

    def comm(self, scales: dict) -> TensorParallel:
        """Return the communication of a layer's devices, given their scales."""
        return TensorParallel(scales or None, "tp", self.compression)


def compression_of(config: TrainConfig) -> Compression:
    """Return how tensor-parallel messages are sent: the preset with the settings of `config.communication`."""
    c = config.communication
    implementation = None if c.implementation == "auto" else c.implementation
    return Compression.named(config.compression, min_bytes=c.min_bytes, chunks=c.chunks, implementation=implementation)


def _every_stage(scales: dict, observed: dict) -> dict:
    """Return {site: (scales, observation)} of all layers on every device, inside `shard_map`.

    Packed: on a slow link a message of 80 bytes takes as long as one of 1,000. Behind the gradients: see `_after`.

    Args:
        scales: of this stage's layers, and of what no layer has.
        observed: this device's, alike.
    """
    if not scales:
        return {}
    flat, unflatten = ravel_pytree(observed)
    observed = unflatten(psum(flat, ("dp", "tp"), compression=None, name="scales"))
    flat, unflatten = ravel_pytree((scales, observed))
    stages = all_gather(flat, "pp", to="invarying", compression=None, name="scales")
    scales, observed = jax.vmap(unflatten)(stages)
    return {
        site: tuple(x.reshape(-1, *x.shape[2:]) for x in (scales[site], observed[site]))
        if site in LAYER_SITES
        else (scales[site][0], jnp.sum(observed[site], axis=0))
        for site in scales
    }


def _changes(new: dict, old: dict) -> jax.Array:
    """Return how many alphas moved or were set by their first observation."""
    moved = [(new[site][..., ALPHA] != old[site][..., ALPHA]) for site in new]
    first = [(new[site][..., UPDATES] > 0) & (old[site][..., UPDATES] == 0) for site in new]
    return sum((jnp.sum(a | b) for a, b in zip(moved, first, strict=True)), jnp.float32(0))


def _where(condition: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def _after(ids: jax.Array, count: jax.Array) -> jax.Array:
    """Return `ids` in a way that waits for `count`, which is never negative.

    XLA:CPU does not order a collective inside a conditional (the embedding's) after an independent one outside; some
    devices then wait in the one and some in the other until it aborts.
    """
    return ids + (count < 0).astype(ids.dtype)
