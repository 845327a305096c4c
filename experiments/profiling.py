"""Profiler traces of a few steps, to be opened with xprof, Perfetto or `jax.profiler.ProfileData`."""

import contextlib
import logging
from contextlib import AbstractContextManager
from pathlib import Path

import jax

from experiments.metrics import Progress, StepLog

_log = logging.getLogger("experiments")


class Profiler:
    """Trace the steps of a range into a folder; a context manager and a hook.

    The trace holds whole steps: it begins when the device has finished the step before, and ends when it has finished
    the last one. Each step is marked by a `jax.profiler.StepTraceAnnotation` called "train", collectives by the named
    scopes they stand in. A run that is resumed inside the range traces what is left of it.

    Args:
        folder: where to; every process but the first writes to a folder of its own inside.
        steps: numbers of the steps to trace, without gaps.
        start: number of steps that the run has done.
        log: whose clock stands still while traces are written.
    """

    def __init__(self, folder: Path, steps: range, start: int, log: StepLog):
        self._folder = folder / f"process-{jax.process_index()}" if jax.process_index() else folder
        self._steps = range(max(steps.start, start + 1), steps.stop)
        self._start, self._log = start, log
        self._is_tracing = False
        if steps and not self._steps:
            _log.warning("--profile traces nothing: the run has done step %d already", steps[-1])

    def __enter__(self) -> "Profiler":
        self._begin_before(self._start + 1)
        return self

    def __exit__(self, *exception) -> None:
        self._end()

    def step(self, number: int) -> AbstractContextManager:
        """Return what to dispatch a step in, so that the trace shows its number."""
        if not self._is_tracing:
            return contextlib.nullcontext()
        return jax.profiler.StepTraceAnnotation("train", step_num=number)

    def __call__(self, progress: Progress) -> None:
        """Begin or end the trace behind a step that has been dispatched; called after the log."""
        if progress.step + 1 == self._steps.start or progress.step + 1 == self._steps.stop:
            with self._log.paused():
                self._end()
                self._begin_before(progress.step + 1)

    def _begin_before(self, number: int) -> None:
        if self._steps and number == self._steps.start:
            jax.profiler.start_trace(self._folder)
            self._is_tracing = True

    def _end(self) -> None:
        if self._is_tracing:
            self._is_tracing = False
            jax.profiler.stop_trace()
            _log.info("traced steps %d to %d into %s", self._steps[0], self._steps[-1], self._folder)
