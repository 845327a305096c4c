"""Compare the logits of a model before and after a conversion, in float32 on a few tokens."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.checkpoint import Checkpoints
from experiments.config import CheckpointConfig, ConfigError
from experiments.tensor_files import TensorFolder
from taco_jax.models import huggingface
from taco_jax.models.config import ModelConfig
from taco_jax.models.families import abstract_parameters, graph_of
from taco_jax.models.huggingface import Naming
from taco_jax.sharding.tensor_parallel import SingleDevice

_BATCH, _LENGTH = 2, 16
_FOREIGN_TOLERANCE = 1e-3
"""Of the largest logit. Two implementations in float32 differ by 1e-6 of it, a wrong formula or weight by far more."""


def check_import(source: Path, folder: Path, model: ModelConfig, naming: Naming) -> list[str]:
    """Return the lines that say how far a Hugging Face folder and the checkpoint made of it are apart.

    Raises:
        ConfigError: if they are further apart than they may be.
    """
    before = _logits(model, _huggingface_parameters(source, model, naming))
    after = _logits(model, _checkpoint_parameters(folder / "checkpoints" / "0", model))
    _check_equal(before, after)
    return [_difference(before, after), *_compared_with_transformers(source, model, before)]


def check_export(checkpoint: Path, folder: Path, model: ModelConfig, naming: Naming, dtypes: list[str]) -> list[str]:
    """Return the lines that say how far a checkpoint and the Hugging Face folder made of it are apart.

    Args:
        checkpoint: folder of a step.
        folder: Hugging Face folder.
        model: architecture of both.
        naming: of the tensors.
        dtypes: types that the tensors have been rounded to.

    Raises:
        ConfigError: if they are further apart than rounding makes them.
    """
    parameters = _checkpoint_parameters(checkpoint, model)
    before = _logits(model, parameters)
    after = _logits(model, _huggingface_parameters(folder, model, naming))
    if len(dtypes) == 1:
        dtype = jnp.dtype(dtypes[0])
        rounded = _logits(model, jax.tree.map(lambda x: x.astype(dtype).astype(jnp.float32), parameters))
        _check_equal(rounded, after)
    return [_difference(before, after), *_compared_with_transformers(folder, model, after)]


def _tokens(model: ModelConfig) -> np.ndarray:
    shape = (_BATCH, min(_LENGTH, model.max_positions))
    return np.random.default_rng(0).integers(0, model.vocab_size, shape, dtype=np.int32)


def _logits(model: ModelConfig, parameters: Any) -> np.ndarray:
    """Return f32[B, S, V] of the fixed tokens."""
    with jax.default_matmul_precision("highest"):
        return np.asarray(_program(model)(parameters, _tokens(model)))


@functools.lru_cache
def _program(model: ModelConfig) -> Callable[[Any, Any], jax.Array]:
    def run(parameters: Any, tokens: jax.Array) -> jax.Array:
        decoder = nnx.merge(graph_of(model, shards=0, dtype="float32"), parameters)
        comm = SingleDevice()
        x = decoder.run_layers(decoder.embed(tokens, comm), comm, remat=False)
        return decoder.logits(x, comm)

    return jax.jit(run)


def _huggingface_parameters(folder: Path, model: ModelConfig, naming: Naming) -> Any:
    return huggingface.from_tensors(model, TensorFolder(folder).read, naming)


def _checkpoint_parameters(checkpoint: Path, model: ModelConfig) -> Any:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    unpadded = {"params": abstract_parameters(model, shards=0)}
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), unpadded)
    with Checkpoints(checkpoint.parent, CheckpointConfig()) as checkpoints:
        return checkpoints.restore_parts(target, int(checkpoint.name), unpadded)[0]["params"]


def _check_equal(before: np.ndarray, after: np.ndarray) -> None:
    if not np.array_equal(before, after):
        raise ConfigError(f"OUT is not what IN is: {_difference(before, after)}")


def _difference(ours: np.ndarray, others: np.ndarray, what: str = "IN and OUT") -> str:
    largest, difference = np.abs(ours).max(), np.abs(ours - others).max()
    return f"largest difference of the logits of {what}: {difference:.3g} (largest logit {largest:.3g})"


def _compared_with_transformers(folder: Path, model: ModelConfig, ours: np.ndarray) -> list[str]:
    """Compare with what the package transformers computes of a Hugging Face folder, if it is installed."""
    try:
        import torch
        import transformers
    except ImportError as error:
        return [f"not compared with transformers: {error.name} is not installed"]
    try:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False).float().eval()
    except Exception as error:  # of many kinds, for a model that the installed version does not know
        return [f"not compared with transformers, which cannot read it: {str(error).splitlines()[0]}"]
    with torch.no_grad():
        logits = theirs(torch.from_numpy(_tokens(model).astype(np.int64))).logits.numpy()
    text = _difference(logits, ours, "OUT and transformers")
    if not np.abs(logits - ours).max() <= _FOREIGN_TOLERANCE * np.abs(logits).max():
        raise ConfigError(f"transformers computes something else: {text}")
    return [text]
