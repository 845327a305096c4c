"""The golden models: weights as Hugging Face's transformers wrote them, and what it computed with them in float64."""

import functools
import json
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file

from experiments import step
from experiments.config import CommunicationConfig, DataConfig, ParallelConfig, TrainConfig
from taco_jax.models.config import ModelConfig
from taco_jax.models.families import abstract_parameters
from taco_jax.models.huggingface import from_tensors
from taco_jax.models.huggingface_config import read_config
from taco_jax.sharding.mesh import make_mesh, parse_mesh

FOLDER = Path(__file__).parent / "golden"
NAMES = ("gpt2-tiny", "qwen2-tiny", "qwen2-tied-tiny", "qwen3-tiny")
ROWS, LENGTH = 2, 17


@functools.cache
def golden(name: str) -> tuple[ModelConfig, dict, dict[str, np.ndarray]]:
    """Architecture, parameters without padding, and what is expected of them."""
    config = read_config(json.loads((FOLDER / name / "config.json").read_text()))
    weights = load_file(FOLDER / name / "model.safetensors")
    return config, from_tensors(config, weights.__getitem__), load_file(FOLDER / name / "expected.safetensors")


def batch_of(name: str) -> dict[str, np.ndarray]:
    ids = golden(name)[2]["input_ids"].astype(np.int32)
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:], "mask": np.ones((ROWS, LENGTH - 1), np.float32)}


@functools.cache
def program_on(name: str, mesh: str, compression: str = "none") -> step.Program:
    config = TrainConfig(
        mesh=mesh,
        compression=compression,
        dtype="float32",
        model=golden(name)[0],
        data=DataConfig(sequence_length=LENGTH - 1, batch_size=ROWS),
        parallel=ParallelConfig(num_microbatches=1),
        communication=CommunicationConfig(min_bytes=0),
    )
    return step.build(config, make_mesh(parse_mesh(mesh)))


def placed(name: str, program: step.Program) -> dict:
    """The parameters on the program's mesh, padded as it needs them."""
    stored = abstract_parameters(program.model_config, shards=program.mesh.shape["tp"])
    padded = jax.tree.map(_pad, golden(name)[1], stored)
    return jax.device_put(padded, program.state_shardings["params"])


def without_padding(tree: dict, config: ModelConfig) -> tuple[dict, float]:
    """What is no padding of a tree of arrays like the parameters, and the largest magnitude in the padding."""
    shapes = abstract_parameters(config, shards=0)
    tree = jax.tree.map(np.asarray, tree)
    kept = jax.tree.map(lambda x, s: x[tuple(map(slice, s.shape))], tree, shapes)
    rest = jax.tree.map(lambda x, k: np.abs(x - _pad(k, x)).max(), tree, kept)
    return kept, max(map(float, jax.tree.leaves(rest)))


def _pad(x: np.ndarray, like) -> np.ndarray:
    return np.pad(x, [(0, want - have) for have, want in zip(x.shape, like.shape, strict=True)])
