"""Profiler traces of a few steps, to be opened with xprof, Perfetto or `jax.profiler.ProfileData`."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import jax

from experiments.metrics import Progress, StepLog

_log = logging.getLogger("experiments")


class Profiler:
    """Trace the steps of a range into a folder; a context manager and a hook that is called next to the log.

    The trace begins when the device has finished the step before and its hooks have run, and ends when the device has
    finished the last one. Each step is marked by a `jax.profiler.StepTraceAnnotation` called "train"; operations carry
    the named scopes they stand in. A run that is resumed inside the range traces what is left of it.

    Args:
        folder: where to; every process but the first writes to a folder of its own inside.
        steps: numbers of the steps to trace, without gaps.
        start: number of steps that the run has done.
        log: whose clock stands still while traces begin and are written.
    """

    def __init__(self, folder: Path, steps: range, start: int, log: StepLog):
        self._folder = folder / f"process-{jax.process_index()}" if jax.process_index() else folder
        self._steps = range(max(steps.start, start + 1), steps.stop)
        self._log = log
        self._is_tracing = False
        if steps and not self._steps:
            _log.warning("--profile traces nothing: the run has done step %d already", steps[-1])

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *exception) -> None:
        self._end()

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Mark what dispatches a step, and begin the trace if it is the first."""
        if number not in self._steps:
            yield
            return
        if not self._is_tracing:
            self._begin()
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            yield

    def __call__(self, progress: Progress) -> None:
        """End the trace if the step that has been dispatched is the last of the range."""
        if progress.step + 1 == self._steps.stop:
            with self._log.paused():
                self._end()

    def _begin(self) -> None:
        options = jax.profiler.ProfileOptions()
        # Recording every Python call makes the steps of a small model three times as long.
        options.python_tracer_level = 0
        with self._log.paused():
            jax.profiler.start_trace(self._folder, profiler_options=options)
        self._is_tracing = True

    def _end(self) -> None:
        if self._is_tracing:
            self._is_tracing = False
            jax.profiler.stop_trace()
            _log.info("traced steps %d to %d into %s", self._steps[0], self._steps[-1], self._folder)
