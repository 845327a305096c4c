"""From an architecture to its structure, first parameters and sizes, whichever family it is of."""

import functools
import math
from collections.abc import Callable

import jax
from flax import nnx

from taco_jax.models.config import ModelConfig
from taco_jax.models.decoder import Decoder
from taco_jax.models.gpt import GPT
from taco_jax.models.qwen import Qwen

_MODELS: dict[str, Callable[..., Decoder]] = {"gpt": GPT, "qwen": Qwen}


def build(config: ModelConfig, *, shards: int = 1, dtype: str = "bfloat16", rngs: nnx.Rngs) -> Decoder:
    """Return a model with first parameters.

    Args:
        config: architecture with a vocabulary and a longest sequence.
        shards: devices that will share a layer: heads, units and ids are padded to its multiples. 0: no padding.
        dtype: compute dtype; parameters are float32.
        rngs: source of the parameters; the padding does not change their values.
    """
    return _MODELS[config.family](config.resolved(), shards=shards, dtype=dtype, rngs=rngs)


@functools.lru_cache
def graph_of(config: ModelConfig, *, shards: int = 1, dtype: str = "bfloat16") -> nnx.GraphDef:
    """Return the structure that `nnx.merge` turns a dict of parameters or shards into a model with."""
    return nnx.split(nnx.eval_shape(lambda: build(config, shards=shards, dtype=dtype, rngs=nnx.Rngs(0))))[0]


def init_parameters(config: ModelConfig, seed: jax.Array | int, *, shards: int = 1) -> dict:
    """Return the nested dict of float32 parameters for a seed; under `jax.jit` it may be sharded in any way."""
    return nnx.to_pure_dict(nnx.split(build(config, shards=shards, rngs=nnx.Rngs(jax.random.key(seed))))[1])


@functools.lru_cache
def abstract_parameters(config: ModelConfig, *, shards: int = 1) -> dict:
    """Return the nested dict of `jax.ShapeDtypeStruct` of the parameters; `shards` = 0 for those without padding."""
    return jax.eval_shape(functools.partial(init_parameters, config, shards=shards), 0)


def parameter_count(config: ModelConfig) -> int:
    """Return the number of parameters without padding, a tied table counted once."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_parameters(config, shards=0)))
