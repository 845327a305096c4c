"""Runs of the trainer, in this process and in others, that share what they compile; and their comparison."""

import os
import socket
import sys

import chex

from experiments import step
from experiments.checkpoint import Checkpoints
from experiments.cli import build_config, parse_arguments
from experiments.config import CheckpointConfig
from experiments.metrics import read_metrics
from taco_jax.sharding.mesh import make_mesh, parse_mesh

TINY = ("--recipe=tiny", "--mesh=dp2,pp2,tp2", "--set=sample_length=4")


def state_of(folder, *argv: str):
    """Return the newest saved state of a run, on the mesh of the command."""
    config = build_config(parse_arguments([*TINY, *argv, "--set=model.vocab_size=256", "--set=model.max_positions=32"]))
    program = step.build(config, make_mesh(parse_mesh(config.mesh)))
    with Checkpoints(folder / "checkpoints", CheckpointConfig()) as checkpoints:
        return checkpoints.restore(program.abstract_state(), unpadded=program.unpadded_state)


def numbers(folder, *names: str):
    return [[values[name] for name in names] for values in read_metrics(folder / "metrics.jsonl")]


def assert_same_run(folder, other) -> None:
    """Two runs are equal bit for bit: every loss, gradient norm and learning rate, and the whole last state."""
    assert numbers(folder, "step", "loss", "grad_norm", "lr") == numbers(other, "step", "loss", "grad_norm", "lr")
    state, position = state_of(folder)
    state_of_other, position_of_other = state_of(other)
    assert position.step == position_of_other.step
    chex.assert_trees_all_equal(state, state_of_other)


def command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "experiments.train", *argv]


def environment(compiled_once) -> dict[str, str]:
    return os.environ | compiled_once | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "PYTHONUNBUFFERED": "1"}


def free_port() -> int:
    """Return a port of this machine that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
