"""Checkpoints of a run: the state by Orbax, with the configuration and the data position beside it.

Saving is asynchronous, restoring goes onto any mesh, and nothing is ever cast or reshaped on the way: the position
holds the type and a checksum of every array, and a checksum of itself.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from experiments.checksum import checksums
from experiments.config import CheckpointConfig, ConfigError, TrainConfig, flatten

_log = logging.getLogger("experiments")

CHANGEABLE = (
    "mesh",
    "recipe",
    "steps",
    "eval_every",
    "eval_batches",
    "sample_length",
    "on_nonfinite",
    "data.path",  # the data's digest is compared instead
    "data.tokenizer",  # its digest is part of the data's
    "parallel.",
    "communication.chunks",
    "communication.implementation",
    "checkpoint.",
    "log.",
)
"""Fields, and sections, that may differ when a run is resumed: they leave the run's meaning as it is."""


class CheckpointError(Exception):
    """A checkpoint that could not be written; older ones are untouched."""


class Damaged(Exception):
    """A checkpoint whose bytes are not those that were saved."""


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
        f"{name} is {'empty' if saved[name] == '' else saved[name]}, not {'empty' if value == '' else value}"
        for name, value in flatten(config).items()
        if not name.startswith(CHANGEABLE) and saved[name] != value
    ]
    if position.data_digest != data_digest:
        changed.append("data has other contents")
    if changed:
        raise ConfigError(f"{folder} holds another run ({'; '.join(changed)}); choose another --out")


class Checkpoints:
    """The checkpoints in a folder; a context manager.

    The last `config.keep` are kept, and those of every `config.keep_every`-th step. Leaving the context waits until
    everything is on disk and raises what went wrong there.

    Raises:
        CheckpointError: from `save`, `poll` and the end of the context, for a checkpoint that could not be written.
    """

    def __init__(self, folder: Path, config: CheckpointConfig):
        self.folder = folder
        kept = [ocp.checkpoint_managers.LatestN(config.keep)]
        if config.keep_every:
            kept.append(ocp.checkpoint_managers.EveryNSteps(config.keep_every))
        self._manager = ocp.CheckpointManager(
            folder.resolve(),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=ocp.checkpoint_managers.AnyPreservationPolicy(kept), cleanup_tmp_directories=True
            ),
            item_handlers={"state": ocp.StandardCheckpointHandler(), "position": ocp.JsonCheckpointHandler()},
        )
        self._writing: int | None = None
        self._told: set[int] = set()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        # The error that ended the run is the one to report.
        with contextlib.suppress(Exception) if error else self._written():
            try:
                self._wait()
            finally:
                self._manager.close()

    def latest(self, step: int | None = None) -> Position | None:
        """Return the position of the newest checkpoint that has one to read, None if there is none.

        Args:
            step: look at this checkpoint only.

        Raises:
            ConfigError: if there is no checkpoint of `step`, or it cannot be read.
        """
        for candidate in self._candidates(step):
            with self._reported(candidate, wanted=step):
                return self._record(candidate)[0]
        return None

    def parts(self, step: int | None = None) -> frozenset[str]:
        """Return what the newest checkpoint's state, or that of `step`, consists of, such as "params" and "scales".

        Raises:
            ConfigError: if there is no such checkpoint, or it cannot be read.
        """
        chosen = chosen_step(self.folder, self._steps(), step)
        with self._reported(chosen, wanted=chosen):
            return frozenset(name.split(".")[0] for name in self._record(chosen)[1])

    def check_space(self, target: Any) -> None:
        """Compare what one checkpoint of `target` takes with the free space of the file system.

        Raises:
            ConfigError: with both numbers.
        """
        if shortage := self._shortage(target):
            raise ConfigError(f"{shortage}; make room or choose another --out")

    def save(self, position: Position, state: Any, unpadded: Any = None) -> None:
        """Start writing a checkpoint; `state` may be donated as soon as this returns.

        A step that has a checkpoint is not saved again: the log says so.

        Args:
            position: what to keep beside the state.
            state: tree of global arrays, some perhaps padded with zeros at the end of an axis.
            unpadded: tree of `jax.ShapeDtypeStruct` without the padding, which a checkpoint takes on another mesh.
        """
        self._wait()
        if position.step in self._manager.all_steps():
            _log.info("checkpoint %s exists already", self.folder / str(position.step))
            return
        if shortage := self._shortage(state):
            raise CheckpointError(f"step {position.step} could not be saved: {shortage}; older checkpoints are kept")
        unpadded = state if unpadded is None else unpadded
        sums = np.asarray(checksums(state, unpadded)).tolist()
        arrays = {name: [kind, int(c)] for (name, kind), c in zip(_signatures(unpadded).items(), sums, strict=True)}
        record = {**dataclasses.asdict(position), "arrays": arrays}
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), position=ocp.args.JsonSave(sealed(record)))
        self._writing = position.step
        with self._written():
            _silence_closed_loops()
            saved = self._manager.save(position.step, args=args)
        assert saved, f"Orbax did not save step {position.step}; it holds {self._manager.all_steps()}"

    def poll(self) -> None:
        """Notice a checkpoint that could not be written, without waiting for one that is being written."""
        if self._writing is not None and not self._manager.is_saving_in_progress():
            self._wait()

    def restore(self, target: Any, step: int | None = None, unpadded: Any = None) -> tuple[Any, Position] | None:
        """Return the newest state that can be read, and its position; None if there is no checkpoint.

        Checkpoints that cannot be read are reported and moved aside once an older one has been read.

        Args:
            target: tree of `jax.ShapeDtypeStruct` with the shardings that the state shall have.
            step: restore this checkpoint, and move the later ones aside.
            unpadded: as for `save`; the arrays may have been saved with other padding than the target's.

        Raises:
            ConfigError: if shapes, dtypes or names differ from the target's, or no checkpoint can be read.
        """
        candidates = self._candidates(step)
        for index, candidate in enumerate(candidates):
            with self._reported(candidate, wanted=step):
                state, position = self._read(candidate, target, unpadded)
                self._set_aside(candidates[:index], "unreadable")
                if step is not None:
                    self._set_aside([s for s in self._steps() if s > step], f"after-{step}")
                return state, position
        if candidates:
            raise ConfigError(f"no checkpoint in {self.folder} can be read; choose another --out or remove the folder")
        return None

    def restore_parts(self, target: dict, step: int | None = None, unpadded: Any = None) -> tuple[dict, Position]:
        """Return parts of a checkpoint's state, such as its "params", and its position; the checkpoint stays as it is.

        Args:
            target: tree of `jax.ShapeDtypeStruct` of those parts.
            step: which checkpoint; None takes the newest.
            unpadded: as for `restore`, of those parts.

        Raises:
            ConfigError: if there is none, or these parts of it are others.
        """
        chosen = chosen_step(self.folder, self._steps(), step)
        with self._reported(chosen, wanted=chosen):
            return self._read(chosen, target, unpadded, partial=True)

    def _read(self, step: int, target: Any, unpadded: Any = None, partial: bool = False) -> tuple[Any, Position]:
        _silence_closed_loops()
        unpadded = target if unpadded is None else unpadded
        position, arrays = self._record(step)
        if partial:
            arrays = {name: value for name, value in arrays.items() if name.split(".")[0] in target}
        self._check_fits(step, {name: kind for name, (kind, _) in arrays.items()}, _signatures(unpadded))
        # Not strict: an array of another shape is cropped or padded with zeros; its checksum says if that was right.
        if partial:
            restore = jax.tree.map(
                lambda x: ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape, strict=False), target
            )
            args = ocp.args.PyTreeRestore(target, restore_args=restore, partial_restore=True)
            # The manager's handler of whole states knows no parts.
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
                state = reader.restore(self.folder.resolve() / str(step) / "state", args)
        else:
            args = ocp.args.Composite(state=ocp.args.StandardRestore(target, strict=False))
            state = self._manager.restore(step, args=args)["state"]
        found = np.asarray(checksums(state, unpadded)).tolist()
        wrong = [name for name, c in zip(_signatures(target), found, strict=True) if arrays[name][1] != c]
        if wrong:
            raise Damaged(f"{len(wrong)} arrays have other bytes than were saved, {wrong[0]} first")
        return state, position

    def _record(self, step: int) -> tuple[Position, dict[str, list]]:
        """Return a checkpoint's position, and the type and checksum of its arrays."""
        args = ocp.args.Composite(position=ocp.args.JsonRestore())
        record = self._manager.restore(step, args=args)["position"]
        content = unsealed(record)
        arrays = content.pop("arrays")
        return Position(**content), arrays

    def _steps(self) -> list[int]:
        return sorted(self._manager.all_steps(), reverse=True)

    def _candidates(self, step: int | None) -> list[int]:
        return self._steps() if step is None else [chosen_step(self.folder, self._steps(), step)]

    def _wait(self) -> None:
        with self._written():
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        self._writing = None

    @contextlib.contextmanager
    def _written(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            path = self.folder / str(self._writing)
            raise CheckpointError(
                f"checkpoint {path} could not be written: {reason_of(error)}; older ones are kept"
            ) from error

    @contextlib.contextmanager
    def _reported(self, step: int, wanted: int | None) -> Iterator[None]:
        """Turn the many errors of a damaged checkpoint into one line of the log, or an error if no other will do."""
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:
            path, reason = self.folder / str(step), reason_of(error)
            if wanted is not None:
                raise ConfigError(f"checkpoint {path} cannot be read: {reason}") from error
            if step not in self._told:
                _log.warning("checkpoint %s cannot be read, trying the one before it: %s", path, reason)
            self._told.add(step)

    def _check_fits(self, step: int, saved: Mapping[str, str], wanted: Mapping[str, str]) -> None:
        """Compare names, shapes and dtypes: Orbax itself casts without a word."""
        names = [name for name in sorted({*saved, *wanted}) if saved.get(name) != wanted.get(name)]
        if names:
            name = names[0]
            raise ConfigError(
                f"checkpoint {self.folder / str(step)} does not fit this run in {len(names)} arrays: {name} is "
                f"{saved.get(name, 'missing')}, the run needs {wanted.get(name, 'none')}"
            )

    def _shortage(self, tree: Any) -> str:
        """Return what is wrong if the file system has no room for one more checkpoint, else nothing."""
        needed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
        free = shutil.disk_usage(self.folder).free
        if free >= needed:
            return ""
        return f"a checkpoint in {self.folder} takes {needed / 2**20:.1f} MiB, {free / 2**20:.1f} MiB are free"

    def _set_aside(self, steps: list[int], why: str) -> None:
        if not steps:
            return
        aside = self.folder.with_name(f"{self.folder.name}-{why}")
        if jax.process_index() == 0:
            aside.mkdir(exist_ok=True)
            for step in steps:
                (self.folder / str(step)).rename(aside / f"{step}-{len(list(aside.iterdir()))}")
            _log.info("moved checkpoints %s to %s", ", ".join(map(str, sorted(steps))), aside)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("checkpoints set aside")
        self._manager.reload()


def _silence_closed_loops() -> None:
    """Let TensorStore say nothing when it finishes work for an event loop that Orbax has given up and closed."""
    if getattr(sys.unraisablehook, "__name__", "") == "_report_unraisable":
        return
    before = sys.unraisablehook

    def _report_unraisable(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    sys.unraisablehook = _report_unraisable


def chosen_step(folder: Path, there: Collection[int], step: int | None) -> int:
    """Return `step`, or the newest checkpoint of those that are `there`.

    Raises:
        ConfigError: if there is no such checkpoint in `folder`.
    """
    if step is None and not there:
        raise ConfigError(f"there is no checkpoint in {folder}")
    if step is not None and step not in there:
        usable = ", ".join(map(str, sorted(there))) or "none"
        raise ConfigError(f"there is no checkpoint of step {step} in {folder}; there are: {usable}")
    return max(there) if step is None else step


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    """Return a position with its own checksum."""
    text = json.dumps(content, sort_keys=True)
    return {**content, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def unsealed(record: dict[str, Any]) -> dict[str, Any]:
    """Return a position without its own checksum.

    Raises:
        Damaged: if the checksum is that of other bytes.
    """
    content = {name: value for name, value in record.items() if name != "sha256"}
    if record != sealed(content):
        raise Damaged("its position has other bytes than were saved")
    return content


def signature(dtype: Any, shape: Sequence[int]) -> str:
    """Return "dtype[shape]" of an array, as a position has it."""
    return f"{dtype}{list(shape)}".replace(" ", "")


def reason_of(error: Exception) -> str:
    """Return the first line of an error's text; of TensorStore's long ones, what the operating system said."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error).split("\n")[0]
    if "os_error_code" in text:
        text = text.split(" [")[0].rsplit(": ", 1)[-1]
    return text[:200] or type(error).__name__


def _signatures(tree: Any) -> dict[str, str]:
    """Return "dtype[shape]" of every array under its dotted path, in the tree's order."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {".".join(str(_key(entry)) for entry in path): signature(leaf.dtype, leaf.shape) for path, leaf in leaves}


def _key(entry: Any) -> Any:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    raise TypeError(f"no name in {entry!r}")
