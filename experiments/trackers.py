"""Trackers of a run: what metrics.jsonl gets also goes to TensorBoard and to Weights & Biases, if asked for.

A run that is resumed goes on with the same curves: steps that run again replace (TensorBoard) or leave (W&B) those that
were recorded before the kill. They are the same numbers either way.
"""

import contextlib
import dataclasses
import importlib
import json
import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import jax

from experiments.config import ConfigError, LogConfig, TrainConfig

_log = logging.getLogger("experiments")


class Tracker(Protocol):
    """Somewhere that numbers of a run are sent to, on the first process."""

    def start(self, config: Mapping[str, Any], step: int) -> None:
        """Begin, or go on after `step` steps; `config` is the configuration as nested dicts."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the finite scalars of a step."""

    def finish(self) -> None:
        """Write what is held back."""


class NoTracker:
    """Records nothing."""

    def start(self, config: Mapping[str, Any], step: int) -> None:
        """Do nothing."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""


class Trackers:
    """Several trackers as one."""

    def __init__(self, members: Sequence[Tracker]):
        self._members = members

    def start(self, config: Mapping[str, Any], step: int) -> None:
        """Start every member."""
        for member in self._members:
            member.start(config, step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Let every member record a step."""
        for member in self._members:
            member.log(step, values)

    def finish(self) -> None:
        """Finish every member."""
        for member in self._members:
            member.finish()


class TensorBoard:
    """Event files in `folder`; one more at each start, which hides the steps of older ones that run again."""

    def __init__(self, folder: Path):
        self._folder = folder

    def start(self, config: Mapping[str, Any], step: int) -> None:
        """Open an event file; the first one also gets the configuration as text."""
        is_first = not any(self._folder.glob("events.*"))
        # A kill loses what is not flushed, and the checkpoint to go on from may be a second old.
        self._writer = _tensorboardx().SummaryWriter(str(self._folder), purge_step=step + 1, flush_secs=1)
        if is_first:
            self._writer.add_text("config", f"```json\n{json.dumps(config, indent=2)}\n```", 0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add one scalar per name."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        """Close the event file."""
        self._writer.close()


class WandB:
    """A run of Weights & Biases, whose id is kept in `folder` so that a resumed run continues it.

    Without a key or without the network it is written to `folder`/wandb, to be sent later by `wandb sync`.
    """

    def __init__(self, project: str, folder: Path):
        self._project, self._folder = project, folder

    def start(self, config: Mapping[str, Any], step: int) -> None:
        """Begin or resume the run."""
        wandb = _wandb()
        arguments = {
            "project": self._project,
            "name": self._folder.resolve().name,
            "id": self._run_id(),
            "resume": "allow",
            "dir": str(self._folder),
            "config": dict(config),
        }
        try:
            self._run = wandb.init(**arguments)
        except Exception as error:  # whatever the service answers, training goes on
            reason = str(error).strip().split("\n")[0]
            _log.warning("W&B writes to %s only, as WANDB_MODE=offline does: %s", self._folder / "wandb", reason)
            wandb.teardown()  # its service still holds the id
            self._run = wandb.init(**arguments, mode="offline")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send a step, unless it is one that the service already has."""
        if step >= self._run.step:
            self._run.log(dict(values), step=step)

    def finish(self) -> None:
        """Wait until everything is sent."""
        self._run.finish()

    def _run_id(self) -> str:
        file = self._folder / "wandb-run-id"
        if not file.exists():
            file.write_text(uuid.uuid4().hex[:12] + "\n", encoding="utf-8")
        return file.read_text(encoding="utf-8").strip()


def check_installed(config: LogConfig) -> None:
    """Check that what `config` asks for can be imported.

    Raises:
        ConfigError: saying what to install.
    """
    if config.tensorboard:
        _tensorboardx()
    if config.wandb:
        _wandb()


@contextlib.contextmanager
def tracking(config: TrainConfig, folder: Path, step: int) -> Iterator[Tracker]:
    """Yield the tracker that `config.log` asks for, started after `step` steps of the run; finish it at the end.

    Every process but the first gets one that records nothing.
    """
    members: list[Tracker] = []
    if config.log.tensorboard and jax.process_index() == 0:
        members.append(TensorBoard(folder / "tensorboard"))
    if config.log.wandb and jax.process_index() == 0:
        members.append(WandB(config.log.wandb, folder))
    tracker: Tracker = Trackers(members) if members else NoTracker()
    tracker.start(dataclasses.asdict(config), step)
    try:
        yield tracker
    finally:
        tracker.finish()


def _tensorboardx() -> ModuleType:
    return _import("tensorboardX", "SummaryWriter", "log.tensorboard=true")


def _wandb() -> ModuleType:
    return _import("wandb", "init", "log.wandb")


def _import(name: str, function: str, setting: str) -> ModuleType:
    with contextlib.suppress(ImportError):
        module = importlib.import_module(name)
        # A folder called wandb, which W&B leaves where it ran, can be imported too.
        if hasattr(module, function):
            return module
    raise ConfigError(f"{setting} needs the package {name}: pip install {name}")
