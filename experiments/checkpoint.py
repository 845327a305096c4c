"""Checkpoints of a run: the state by Orbax, with the configuration and the data position beside it.

Saving is asynchronous, restoring goes onto any mesh, and nothing is ever cast or reshaped on the way.
"""

import contextlib
import dataclasses
import logging
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from experiments.config import CheckpointConfig, ConfigError, TrainConfig, flatten

_log = logging.getLogger("experiments")

CHANGEABLE = (
    "mesh",
    "recipe",
    "steps",
    "eval_every",
    "eval_batches",
    "sample_length",
    "data.path",  # the text's digest is compared instead
    "parallel.",
    "communication.chunks",
    "communication.implementation",
    "checkpoint.",
    "log.",
)
"""Fields, and sections, that may differ when a run is resumed: they leave the run's meaning as it is."""


@dataclasses.dataclass(frozen=True)
class Position:
    """What a checkpoint knows beside the state.

    Attributes:
        step: optimizer steps done, which is also the number of the next batch.
        config: configuration as nested dicts.
        data_digest: SHA-256 of the text.
    """

    step: int
    config: dict[str, Any]
    data_digest: str


def check_same_run(position: Position, config: TrainConfig, data_digest: str, folder: Path) -> None:
    """Compare a run with the one that a checkpoint belongs to.

    Raises:
        ConfigError: naming the fields that differ and must not.
    """
    # A field that came after the checkpoint had what is now its default.
    saved = flatten(TrainConfig()) | flatten(position.config)
    changed = [
        f"{name} is {saved[name]}, not {value}"
        for name, value in flatten(config).items()
        if not name.startswith(CHANGEABLE) and saved[name] != value
    ]
    if position.data_digest != data_digest:
        changed.append("data has other contents")
    if changed:
        raise ConfigError(f"{folder} holds another run ({'; '.join(changed)}); choose another --out")


class Checkpoints:
    """The checkpoints in a folder, of which the last `config.keep` are kept; a context manager.

    Leaving it waits until everything is on disk and raises what went wrong there.
    """

    def __init__(self, folder: Path, config: CheckpointConfig):
        self.folder = folder
        self._manager = ocp.CheckpointManager(
            folder.resolve(),
            options=ocp.CheckpointManagerOptions(max_to_keep=config.keep, cleanup_tmp_directories=True),
            item_handlers={"state": ocp.StandardCheckpointHandler(), "position": ocp.JsonCheckpointHandler()},
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        # The error that ended the run is the one to report.
        with contextlib.suppress(Exception) if error else contextlib.nullcontext():
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        self._manager.close()

    def latest(self) -> Position | None:
        """Return the position of the newest checkpoint that has one to read, None if there is none."""
        for step in self._steps():
            with self._reported(step):
                return self._position(step)
        return None

    def save(self, position: Position, state: Any) -> None:
        """Start writing a checkpoint; `state` may be donated as soon as this returns.

        Raises:
            Exception: what went wrong while an earlier one was written.
        """
        self._manager.check_for_errors()
        saved = self._manager.save(
            position.step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), position=ocp.args.JsonSave(dataclasses.asdict(position))
            ),
        )
        assert saved, f"Orbax did not save step {position.step}; it holds {self._manager.all_steps()}"

    def restore(self, target: Any) -> tuple[Any, Position] | None:
        """Return the newest state that can be read, and its position; None if there is no checkpoint.

        Checkpoints that cannot be read are reported and moved aside once an older one has been read.

        Args:
            target: tree of `jax.ShapeDtypeStruct` with the shardings that the state shall have.

        Raises:
            ConfigError: if shapes, dtypes or names differ from the target's, or no checkpoint can be read.
        """
        steps = self._steps()
        for index, step in enumerate(steps):
            with self._reported(step):
                self._check_fits(step, target)
                restored = self._manager.restore(
                    step,
                    args=ocp.args.Composite(state=ocp.args.StandardRestore(target), position=ocp.args.JsonRestore()),
                )
                self._set_aside(steps[:index])
                return restored["state"], Position(**restored["position"])
        if steps:
            raise ConfigError(f"no checkpoint in {self.folder} can be read; choose another --out or remove the folder")
        return None

    def _steps(self) -> list[int]:
        return sorted(self._manager.all_steps(), reverse=True)

    def _position(self, step: int) -> Position:
        args = ocp.args.Composite(position=ocp.args.JsonRestore())
        return Position(**self._manager.restore(step, args=args)["position"])

    @contextlib.contextmanager
    def _reported(self, step: int):
        """Turn the many errors of a damaged checkpoint into one line of the log."""
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:
            reason = str(error).split("\n")[0][:200]
            _log.warning("checkpoint %s cannot be read, trying the one before it: %s", self.folder / str(step), reason)

    def _check_fits(self, step: int, target: Any) -> None:
        """Compare names, shapes and dtypes: Orbax itself casts without a word."""
        saved = _signatures(self._manager.item_metadata(step)["state"].tree)
        wanted = _signatures(target)
        names = [name for name in sorted(saved | wanted) if saved.get(name) != wanted.get(name)]
        if names:
            name = names[0]
            raise ConfigError(
                f"checkpoint {self.folder / str(step)} does not fit this run in {len(names)} arrays: {name} is "
                f"{saved.get(name, 'missing')}, the run needs {wanted.get(name, 'none')}"
            )

    def _set_aside(self, steps: list[int]) -> None:
        if not steps:
            return
        aside = self.folder.with_name(f"{self.folder.name}-unreadable")
        aside.mkdir(exist_ok=True)
        for step in steps:
            (self.folder / str(step)).rename(aside / f"{step}-{len(list(aside.iterdir()))}")
        self._manager.reload()


def _signatures(tree: Any) -> dict[str, str]:
    """Return "dtype[shape]" of every array under its dotted path."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {
        ".".join(str(_key(entry)) for entry in path): f"{leaf.dtype}{list(leaf.shape)}".replace(" ", "")
        for path, leaf in leaves
    }


def _key(entry: Any) -> Any:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    raise TypeError(f"no name in {entry!r}")
