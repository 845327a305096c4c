"""Named starting points of a run; every field can be overridden on the command line.

The cosine of each recipe ends at a step of its own, so that a run stopped early and continued later is the same run.
"""

import dataclasses
from collections.abc import Callable

from experiments.config import (
    CheckpointConfig,
    CommunicationConfig,
    DataConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from taco_jax.models.presets import gpt2_124m, gpt2_tiny


def main() -> TrainConfig:
    """Return the run that 128 emulated devices on one CPU finish in minutes."""
    return TrainConfig(
        recipe="main",
        steps=100,
        # A byte takes 0.4 s where 128 devices share a CPU.
        sample_length=80,
        model=gpt2_tiny(),
        data=DataConfig(sequence_length=64, batch_size=64),
        optimizer=OptimizerConfig(learning_rate=5e-3, warmup_steps=10, decay_steps=100),
        parallel=ParallelConfig(num_microbatches=4),
    )


def small() -> TrainConfig:
    """Return a longer run for a mesh of a few devices, to compare compressions by validation loss."""
    return TrainConfig(
        recipe="small",
        steps=600,
        eval_every=100,
        model=gpt2_tiny(),
        data=DataConfig(sequence_length=64, batch_size=32),
        optimizer=OptimizerConfig(learning_rate=5e-3, warmup_steps=20, decay_steps=600),
        parallel=ParallelConfig(num_microbatches=1),
        checkpoint=CheckpointConfig(every=100),
    )


def tiny() -> TrainConfig:
    """Return a run of seconds, for tests."""
    return TrainConfig(
        recipe="tiny",
        steps=6,
        eval_every=3,
        eval_batches=2,
        sample_length=16,
        model=dataclasses.replace(gpt2_tiny(), num_layers=2, hidden_size=64, num_heads=4, intermediate_size=256),
        data=DataConfig(sequence_length=32, batch_size=8),
        optimizer=OptimizerConfig(learning_rate=5e-3, warmup_steps=10, decay_steps=100),
        parallel=ParallelConfig(num_microbatches=2),
        checkpoint=CheckpointConfig(every=3),
    )


def large() -> TrainConfig:
    """Return the beginning of a real training run, for the published architectures on GPUs."""
    return TrainConfig(
        recipe="large",
        steps=1000,
        eval_every=250,
        model=gpt2_124m(),
        data=DataConfig(sequence_length=1024, batch_size=256),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=100, decay_steps=1000),
        parallel=ParallelConfig(num_microbatches=16),
        communication=CommunicationConfig(min_bytes=65536),
        checkpoint=CheckpointConfig(every=250),
    )


RECIPES: dict[str, Callable[[], TrainConfig]] = {"main": main, "small": small, "tiny": tiny, "large": large}
