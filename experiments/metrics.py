"""Hooks of the training loop: one line and one JSON object per step, written one step late; validation; saving.

A hook is called with the `Progress` of each step. The log fetches a step's metrics when the next step is already
under way, so that the device never waits for it.
"""

import contextlib
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from experiments.flops import Throughput, format_flops
from experiments.nonfinite import NonfiniteGuard
from experiments.trackers import NoTracker, Tracker

_log = logging.getLogger("experiments")


@dataclass
class Progress:
    """The loop after a step has been dispatched.

    Attributes:
        step: steps dispatched so far, this one included.
        is_last: whether the loop ends here.
        state: the state after the step.
        metrics: scalars on the device.
        extra: further numbers for this step's line.
    """

    step: int
    is_last: bool
    state: Any
    metrics: dict[str, jax.Array]
    extra: dict[str, float] = field(default_factory=dict)


Hook = Callable[[Progress], None]


class StepLog:
    """Write a line to the log and an object to metrics.jsonl for every step, once the step after it is dispatched.

    A context manager; what a step that was held back when an error ended the loop said is lost.

    Args:
        path: metrics.jsonl, of which the steps after `start` are dropped; None writes no file (every process but the
            first).
        start: number of steps that the state has seen.
        total: number of steps of the run, for the line.
        tracker: where the finite numbers of metrics.jsonl go as well.
        throughput: what makes FLOP/s of seconds; None leaves them out.
        guard: called with each step's number and metrics once they are written; what it raises ends the run. None: a
            guard that raises at the first step that is not finite.
    """

    def __init__(
        self,
        path: Path | None,
        start: int,
        total: int,
        tracker: Tracker | None = None,
        throughput: Throughput | None = None,
        guard: Callable[[int, dict[str, float]], None] | None = None,
    ):
        if path:
            truncate_metrics(path, start)
        self._file = path.open("a", encoding="utf-8") if path else None
        self._first, self._total = start + 1, total
        self._tracker, self._throughput = tracker or NoTracker(), throughput
        self._guard = guard or NonfiniteGuard("abort", lambda values: "")
        self._pending: Progress | None = None
        self._started = time.perf_counter()

    def __enter__(self) -> "StepLog":
        return self

    def __exit__(self, *exception) -> None:
        if self._file:
            self._file.close()

    def __call__(self, progress: Progress) -> None:
        """Write the step before and hold this one back."""
        self.flush()
        self._pending = progress

    def annotate(self, measure: Callable[[], dict[str, float]]) -> None:
        """Add what `measure` returns to the step held back; the time it takes is no step's."""
        assert self._pending is not None
        with self.paused():
            self._pending.extra |= measure()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Wait for the step held back, if there is one; the time that the caller then takes is no step's."""
        if self._pending is not None:
            jax.block_until_ready(self._pending.metrics)
        before = time.perf_counter()
        yield
        self._started += time.perf_counter() - before

    def flush(self) -> None:
        """Write the step held back and let the guard judge it."""
        if self._pending is None:
            return
        progress, self._pending = self._pending, None
        values = {name: float(value) for name, value in jax.device_get(progress.metrics).items()}
        now = time.perf_counter()
        seconds, self._started = now - self._started, now
        tokens_per_second = values.get("tokens", 0.0) / seconds
        values |= {"step_ms": 1e3 * seconds, "tokens_per_s": tokens_per_second}
        values |= self._throughput.metrics(seconds) if self._throughput else {}
        # Caches, clocks and the reader of the data are cold: nobody should take its time for the run's speed.
        values |= {"first_step": 1.0} if progress.step == self._first else {}
        values |= progress.extra
        _log.info(format_line(progress.step, self._total, values))
        if self._file:
            self._file.write(json_line({"step": progress.step, **values}))
            self._file.flush()
        self._tracker.log(progress.step, {name: value for name, value in values.items() if math.isfinite(value)})
        self._guard(progress.step, values)

    def restart_clock(self) -> None:
        """Let the next step's time begin now."""
        self._started = time.perf_counter()


def format_line(step: int, total: int, values: dict[str, float]) -> str:
    """Return one step's line of the log."""
    width = len(str(total))
    parts = [
        f"step {step:{width}d}/{total}",
        f"loss {values['loss']:.4f}",
        f"grad norm {values['grad_norm']:.3f}",
        f"lr {values['lr']:.2e}",
    ]
    if values.get("first_step"):
        parts.append(f"{values['step_ms']:.0f} ms (first step, with warm-up)")
    else:
        parts += [f"{values['step_ms']:.0f} ms", f"{values['tokens_per_s']:,.0f} tokens/s"]
        if "tflops_per_device" in values:
            parts.append(f"{format_flops(values['tflops_per_device'])}/device")
        if "mfu" in values:
            parts.append(f"MFU {100 * values['mfu']:.1f} %")
    # Without compression there is nothing to saturate and no error to measure.
    if math.isfinite(values.get("snr_forward", math.nan)):
        parts += [
            f"saturation {values['saturation']:.1e}",
            f"SNR {values['snr_forward']:.1f}/{values['snr_backward']:.1f} dB",
        ]
    if "val_loss" in values:
        parts.append(f"validation {values['val_loss']:.4f}")
    return "  ".join(parts)


def json_line(values: dict[str, float | None]) -> str:
    """Return `values` as one line of JSON, which knows no NaN and no infinity: they become null."""
    finite = {name: value if value is not None and math.isfinite(value) else None for name, value in values.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a metrics.jsonl; a last line that a kill cut off is left out."""
    if not path.exists():
        return []
    objects = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            objects.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return objects


def truncate_metrics(path: Path, step: int) -> None:
    """Drop what metrics.jsonl says about steps after `step`, which are about to run again."""
    kept = "".join(json_line(values) for values in read_metrics(path) if values["step"] <= step)
    write_atomically(path, kept)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file in one move, so that a kill leaves the old or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


class Bar:
    """Progress bar, on a terminal only; a context manager and a hook."""

    def __init__(self, start: int, total: int):
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("left"),
        )
        self._bar = ProgressBar(*columns, disable=not sys.stdout.isatty(), transient=True)
        self._task = self._bar.add_task("training", total=total, completed=start)

    def __enter__(self) -> "Bar":
        self._bar.start()
        return self

    def __exit__(self, *exception) -> None:
        self._bar.stop()

    def __call__(self, progress: Progress) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=progress.step)


@contextlib.contextmanager
def progress_bar(what: str, total: int, counts: ProgressColumn | None = None) -> Iterator[Callable[[int], None]]:
    """Show how much of `total` is done, as numbers or in `counts`, on a terminal only; yields what to tell of more."""
    counts = counts or MofNCompleteColumn()
    columns = (TextColumn(what), BarColumn(), counts, TimeRemainingColumn(), TextColumn("left"))
    with ProgressBar(*columns, disable=not sys.stdout.isatty(), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)


class StdoutHandler(logging.StreamHandler):
    """Log to what `sys.stdout` is now: a progress bar takes its place while it is shown."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self):
        """The present standard output."""
        return sys.stdout


def log_to_stderr() -> None:
    """Send the program's own log lines to standard error, for commands whose output is a result."""
    _log.setLevel(logging.INFO)
    _log.propagate = False
    _log.handlers = [logging.StreamHandler(sys.stderr)]


def start_logging() -> None:
    """Send the program's own log lines to standard output, on the first process only."""
    _log.setLevel(logging.INFO if jax.process_index() == 0 else logging.WARNING)
    _log.propagate = False
    _log.handlers = [StdoutHandler()]
    # Orbax writes the tracebacks of what it also raises.
    logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)
