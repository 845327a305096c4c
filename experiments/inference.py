"""A trained or converted model, ready to be used on any mesh."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro

from experiments import communication
from experiments.checkpoint import Checkpoints
from experiments.config import (
    CommunicationConfig,
    ConfigError,
    DataConfig,
    ParallelConfig,
    TrainConfig,
    nearest,
    validate,
)
from experiments.processes import mesh_of
from experiments.saved import read_config, split_checkpoint, tokenizer_of
from experiments.step import Program, build, model_config
from experiments.tokenizer import BYTES, Tokenizer, load_tokenizer
from taco_jax.config import PRESETS, Compression
from taco_jax.sharding.mesh import parse_mesh

STATELESS = tuple(name for name in PRESETS if not Compression.named(name).is_adaptive)
"""Presets that need no scales of a training run."""


@dataclass(frozen=True)
class ModelArguments:
    """Options of every command that uses a model."""

    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")] = ""
    """Run folder, one checkpoint in it, or a folder that experiments.convert has written."""
    mesh: Annotated[str, tyro.conf.arg(metavar="dp2,pp2,tp4")] = "dp1,pp1,tp1"
    """Devices per axis; CPU devices are emulated where there are too few."""
    compression: Annotated[str, tyro.conf.arg(metavar="none|taco|taco_block|int8|fp8|paper|bf16")] = "none"
    """What the tensor-parallel messages are sent as."""
    min_bytes: Annotated[int, tyro.conf.arg(metavar="BYTES")] = 4096
    """Smaller messages travel exactly."""
    dtype: Annotated[str, tyro.conf.arg(metavar="float32|bfloat16")] = ""
    """Compute type; empty means the run's."""
    step: Annotated[int, tyro.conf.arg(metavar="INT")] = -1
    """Which checkpoint of the run; -1 means the newest."""
    tokenizer: Annotated[str, tyro.conf.arg(metavar="PATH")] = ""
    """As for the trainer; empty means the one in the folder, or the run's."""

    def check(self, **at_least: int) -> None:
        """Compare the folder with none and numbers, `min_bytes` and those named, with the least that they may be.

        Raises:
            ConfigError: for the first that will not do.
        """
        if not self.folder:
            raise ConfigError("name the folder of a run or of a converted model")
        for name, least in {**at_least, "min_bytes": 0}.items():
            if (value := getattr(self, name)) < least:
                raise ConfigError(f"--{name.replace('_', '-')} must be {least} or more, got {value}")

    def load(self, **batch: int) -> "Model":
        """Return the model; `batch` and errors are those of `load_model`."""
        return load_model(
            Path(self.folder),
            mesh=self.mesh,
            compression=self.compression,
            dtype=self.dtype,
            min_bytes=self.min_bytes,
            step=None if self.step < 0 else self.step,
            **batch,
        )


@dataclass(frozen=True)
class Model:
    """A model on its mesh.

    Attributes:
        program: what it can compute.
        state: {"params", "scales"} of arrays on the mesh.
        step: training steps it has seen.
        folder: where it came from.
        saved: the configuration found there.
    """

    program: Program
    state: dict
    step: int
    folder: Path
    saved: TrainConfig


def load_model(
    path: Path,
    *,
    mesh: str = "dp1,pp1,tp1",
    compression: str = "none",
    dtype: str = "",
    min_bytes: int = 4096,
    step: int | None = None,
    sequence_length: int = 0,
    batch_size: int = 1,
) -> Model:
    """Return the model in the folder of a run or of `experiments.convert`, or in one of its checkpoints.

    Args:
        path: that folder.
        mesh: devices per axis.
        compression: of the tensor-parallel messages; an adaptive one takes the scales that training has left.
        dtype: compute dtype; empty means the run's.
        min_bytes: messages below this size travel exactly.
        step: which checkpoint; None takes the newest, or that of `path`.
        sequence_length: of the batches that will be evaluated; 0 means the model's longest, but at most 1024.
        batch_size: of those batches over the whole mesh, rounded up to a multiple of dp.

    Raises:
        ConfigError: if there is no model, or the mesh or compression does not suit it.
    """
    folder, of_path = split_checkpoint(path)
    saved = read_config(path)
    if compression not in PRESETS:
        raise ConfigError(
            f"--compression must be one of {', '.join(PRESETS)}, got {compression!r}{nearest(compression, PRESETS)}"
        )
    try:
        dp = parse_mesh(mesh)["dp"]
    except ValueError as error:
        raise ConfigError(str(error)) from None
    dp = dp if dp > 0 else jax.device_count()
    rows = math.ceil(batch_size / dp) * dp
    model = model_config(saved)
    config = TrainConfig(
        mesh=mesh,
        compression=compression,
        dtype=dtype or saved.dtype,
        model=model,
        data=DataConfig(sequence_length=sequence_length or min(model.max_positions, 1024), batch_size=rows),
        parallel=ParallelConfig(num_microbatches=1),
        communication=CommunicationConfig(min_bytes=min_bytes),
    )
    validate(config)
    config, devices = mesh_of(config)
    program = build(config, devices)
    state, position = _read(program, folder, of_path if step is None else step)
    return Model(program, state, position, folder, saved)


def _read(program: Program, folder: Path, step: int | None) -> tuple[dict, int]:
    with Checkpoints(folder / "checkpoints", program.config.checkpoint) as checkpoints:
        adaptive = program.compression.is_adaptive
        if adaptive and "scales" not in checkpoints.parts(step):
            raise ConfigError(
                f"--compression={program.config.compression} needs the scales of a run trained with it, {folder} has "
                f"none (usable: {', '.join(STATELESS)})"
            )
        names = ("params", "scales") if adaptive else ("params",)
        target, unpadded = (
            {name: tree[name] for name in names} for tree in (program.abstract_state(), program.unpadded_state)
        )
        state, position = checkpoints.restore_parts(target, step, unpadded)
    return {"scales": {} if adaptive else program.init_scales(), **state}, position.step


def tokenizer_for(model: Model, name: str = "") -> Tokenizer:
    """Return the tokenizer called `name`, or the one that the model was trained with.

    Raises:
        ConfigError: if it cannot be loaded, or has more ids than the model.
    """
    name = name or tokenizer_of(model.folder, model.saved) or BYTES
    tokenizer, known = load_tokenizer(name), model.program.model_config.vocab_size
    if tokenizer.vocab_size > known:
        raise ConfigError(f"the tokenizer {name} has {tokenizer.vocab_size} ids, the model {known}")
    return tokenizer


def sent_per_call(program: Program, traced: Any, compiled: Any) -> list[communication.CommunicationRow]:
    """Return the rows of what one call of a compiled forward pass sends, after comparing them with its jaxpr.

    Where nothing is compressed, because every message is below min_bytes, that is what the rows say.

    Raises:
        experiments.communication.CommunicationMismatch: if something else travels than the jaxpr says.
    """
    sizes = dict(program.mesh.shape)
    collectives = communication.read_collectives(compiled.as_text(), sizes)
    plan = communication.planned_collectives(traced.jaxpr, sizes)
    if any(message.compressed for message in plan):
        sites = dict.fromkeys(("embedding", "attention", "mlp"), ("forward",))
        communication.check(collectives, plan, sites, program.compression.min_bytes)
    return communication.communication_rows(collectives, plan)


def require_compression(program: Program, rows: Iterable[communication.CommunicationRow]) -> None:
    """Raise if compression was asked for and nothing of a program travels compressed.

    Raises:
        experiments.communication.CommunicationMismatch: naming the limit below which messages are exact.
    """
    config = program.config
    asked = program.compression.compressed_directions and program.mesh.shape["tp"] > 1
    if asked and not any(row.compressed for row in rows):
        raise communication.CommunicationMismatch(
            f"--compression={config.compression} is not on the wire: every message is below "
            f"--min-bytes={config.communication.min_bytes}"
        )
