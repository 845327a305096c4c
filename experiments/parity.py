"""Does training reach the same loss with each codec? `python -m experiments.parity [--quick] [--out DIR]`.

Runs of the trainer, one after another, most important first: the same model, tokens, order and initialisation with
nothing compressed, with each codec, both directions compressed alike, and with the published codec's ablations, which
are to fail (`experiments.ablations`). The seed sets initialisation and order alike for all codecs, so that losses are
compared in pairs. Last come longer runs, for the scales over time.

Figures are added to DIR/results.jsonl as they come; a command that is run again measures what is missing and goes on
from the checkpoint of the run that was interrupted. A run that diverges is a result.

Exit codes: 2 a mistake, 1 a run failed otherwise than by diverging, 130 or 143 interrupted.
"""

import contextlib
import dataclasses
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from experiments.cli import parse_command_line
from experiments.config import ConfigError, nearest
from experiments.link_figures import add_rows, exit_code, read_rows
from experiments.link_workers import WorkerFailed, say
from experiments.metrics import read_metrics
from experiments.parity_report import BASELINE, TAIL, Row, table, write_report

PROGRAM = "python -m experiments.parity"
CODECS = (BASELINE, "taco", "int8", "int6", "taco_block", "paper", "fp8", "int4")
REPEATED = (BASELINE, "taco", "int8", "int6")
"""What is run with every seed and at tp=8."""
ABLATIONS = ("int8_without_amax", "e5m2_to_448", "e4m3_unscaled")
LONG = (BASELINE, "taco", "int6")
MESH, WIDE_MESH = "tp4", "tp8"
EVALUATIONS, LEAST_BETWEEN = 5, 50
DIVERGED = 3
"""Exit code of the trainer."""
GUESS = 0.25
"""Seconds that a step takes as long as nothing has been measured."""
_LOOKS_EVERY, _SAYS_EVERY = 0.2, 30.0


@dataclasses.dataclass(frozen=True)
class Options:
    """Compare the losses that training reaches with each codec."""

    steps: Annotated[int, tyro.conf.arg(help="of every run but the long ones")] = 600
    long_steps: Annotated[int, tyro.conf.arg(help="of the long runs; 0: none")] = 2000
    seeds: Annotated[tuple[int, ...], tyro.conf.arg(help="all codecs have the first, four of them the others")] = (
        0, 1, 2,
    )  # fmt: skip
    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME", help="codecs or runs; nothing else is run")] = ()
    quick: Annotated[bool, tyro.conf.arg(help="none, taco, int8 and one ablation for 60 steps: four minutes")] = False
    out: Annotated[Path, tyro.conf.arg(metavar="DIR", help="folder of the runs and figures")] = Path("runs/parity")


@dataclasses.dataclass(frozen=True)
class Planned:
    """One run of the trainer."""

    mesh: str
    steps: int
    codec: str
    seed: int

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.mesh}-{self.steps}-{self.codec}-seed{self.seed}"

    def argv(self, out: Path) -> list[str]:
        """Return the command, of the trainer or of the trainer with ablations."""
        ablation = self.codec in ABLATIONS
        settings = {
            # A quarter of the recipe's time; the codecs differ in what they send, not in what they compute with.
            "dtype": "float32",
            "data.batch_size": 16,
            "optimizer.decay_steps": self.steps,
            # The default's 8 batches would leave differences of a few tenths of a percent in the noise.
            "eval_batches": 64,
            "eval_every": max(LEAST_BETWEEN, self.steps // EVALUATIONS),
            "sample_length": 0,
            "checkpoint.every": 200,
            "checkpoint.keep": 1,
        }
        if ablation:
            settings["communication.implementation"] = self.codec
        return [
            *(sys.executable, "-m", "experiments.ablations" if ablation else "experiments.train"),
            *("--recipe=small", f"--mesh={self.mesh}", f"--steps={self.steps}", f"--seed={self.seed}"),
            *(f"--compression={'paper' if ablation else self.codec}", f"--out={out / self.name}"),
            *(f"--set={name}={value}" for name, value in settings.items()),
        ]


def plan(options: Options) -> list[Planned]:
    """Return the runs, most important first."""
    first, *others = options.seeds
    if options.quick:
        return [Planned(MESH, options.steps, codec, first) for codec in (*CODECS[:3], ABLATIONS[0])]
    runs = [Planned(MESH, options.steps, codec, first) for codec in CODECS]
    runs += [Planned(MESH, options.steps, codec, seed) for seed in others for codec in REPEATED]
    runs += [Planned(WIDE_MESH, options.steps, codec, first) for codec in REPEATED]
    runs += [Planned(MESH, options.steps, codec, first) for codec in ABLATIONS]
    if options.long_steps:
        runs += [Planned(MESH, options.long_steps, codec, first) for codec in LONG]
    return list(dict.fromkeys(runs))


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is missing, and write table, CSV and plots; returns the exit code."""
    return exit_code(PROGRAM, lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    options = parse_command_line(Options, PROGRAM, argv)
    if options.quick:
        options = dataclasses.replace(options, steps=60, seeds=options.seeds[:1])
    runs = _chosen(options)
    options.out.mkdir(parents=True, exist_ok=True)
    results = options.out / "results.jsonl"
    with _ends_at_sigterm():
        for run in runs:
            rows = read_rows(results, Row)
            if run.name not in {row.name for row in rows}:
                add_rows(results, [_train(run, runs, rows, options.out)])
            # Half the run's bytes on disk, and of no use any more.
            shutil.rmtree(options.out / run.name / "checkpoints", ignore_errors=True)
    names = {run.name for run in plan(options)}
    rows = [row for row in read_rows(results, Row) if row.name in names]
    write_report(rows, options.out)
    Console(width=120).print(table(rows))
    print(f"{options.out}: results.jsonl, parity.csv, curves.png, long.png")
    return 0


def _chosen(options: Options) -> list[Planned]:
    """Return the runs that --only leaves, the options having been checked."""
    for name, number, least in (("steps", options.steps, 1), ("long-steps", options.long_steps, 0)):
        if number < least:
            raise ConfigError(f"--{name} must be {least} or more, got {number}")
    if not options.seeds or len(set(options.seeds)) < len(options.seeds) or min(options.seeds) < 0:
        raise ConfigError(f"--seeds must be different numbers from 0 up, got {options.seeds or 'none'}")
    runs = plan(options)
    known = list(dict.fromkeys([*(run.codec for run in runs), *(run.name for run in runs)]))
    for name in options.only:
        if name not in known:
            raise ConfigError(f"--only {name}: there are {', '.join(known)}{nearest(name, known)}")
    return [run for run in runs if not options.only or {run.codec, run.name} & set(options.only)]


def _train(run: Planned, runs: Sequence[Planned], rows: Sequence[Row], out: Path) -> Row:
    """Train one run, or go on with it, and return its figures."""
    known = {row.name for row in rows}
    waiting = [other for other in runs if other.name not in known and other != run]
    folder, log = out / run.name, out / f"{run.name}.log"
    # Seeds share what is compiled.
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str((out / "compiled").absolute())}
    started = said = time.monotonic()
    with log.open("a") as file, _process(run.argv(out), env=environment, stdout=file, stderr=file) as process:
        say(f"{run.name}: {len(waiting)} more wait, {_minutes(remaining([run, *waiting], rows))} minutes in all")
        while process.poll() is None:
            time.sleep(_LOOKS_EVERY)
            if time.monotonic() - said > _SAYS_EVERY:
                said = time.monotonic()
                done = len(read_metrics(folder / "metrics.jsonl"))
                left = remaining(waiting, rows) + remaining([run], rows) * (1 - done / run.steps)
                say(f"{run.name}: step {done} of {run.steps}, about {_minutes(left)} minutes left for all")
    if process.returncode not in (0, DIVERGED):
        last = log.read_text().strip().splitlines() or ["no message"]
        raise WorkerFailed(f"{run.name} ended with code {process.returncode}: {last[-1]} (see {log})")
    row = row_of(run, folder, time.monotonic() - started, process.returncode)
    say(f"{run.name}: {row.status}, validation loss {row.val_loss:.4f}, {row.seconds:.0f} s")
    return row


def remaining(runs: Sequence[Planned], rows: Sequence[Row]) -> float:
    """Return the seconds that runs will take: as the same codec on the same mesh did, or as all did on average."""
    paces = {(row.mesh, row.codec): row.seconds / row.done for row in rows if row.done}
    average = statistics.fmean(paces.values()) if paces else GUESS
    return sum(run.steps * paces.get((run.mesh, run.codec), average) for run in runs)


def row_of(run: Planned, folder: Path, seconds: float, code: int) -> Row:
    """Return the figures of a run that has ended, from its folder."""
    metrics = read_metrics(folder / "metrics.jsonl")
    losses = [m["val_loss"] for m in metrics if "val_loss" in m]
    sound = [m for m in metrics if not m.get("skipped_step")]
    finished = code == 0 and bool(losses) and losses[-1] is not None
    sent = json.loads((folder / "communication.json").read_text())["totals"]["axes"]["tp"]

    def late(name: str) -> float:
        known = [m[name] for m in sound[-TAIL:] if m.get(name) is not None]
        return statistics.fmean(known) if known else math.nan

    return Row(
        name=run.name,
        mesh=run.mesh,
        steps=run.steps,
        codec=run.codec,
        seed=run.seed,
        status="finished" if finished else "diverged",
        done=len(sound),
        val_loss=losses[-1] if finished else math.nan,
        train_loss=late("loss"),
        snr_forward=late("snr_forward"),
        snr_backward=late("snr_backward"),
        saturation=late("saturation"),
        bytes_per_step=sent["bytes_per_step"],
        bf16_bytes_per_step=sent["bf16_bytes_per_step"],
        step_seconds=statistics.median(m["step_ms"] for m in metrics) / 1e3,
        seconds=seconds,
    )


@contextlib.contextmanager
def _process(argv: Sequence[str], **options) -> Iterator[subprocess.Popen]:
    """Start a process that saves its state and ends if this one is interrupted."""
    # In a session of its own: the second signal, the terminal's and this one's, would end it at once.
    process = subprocess.Popen(argv, start_new_session=True, **options)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait()


@contextlib.contextmanager
def _ends_at_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that the trainer is told too."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _minutes(seconds: float) -> str:
    return f"{math.ceil(seconds / 60)}"


if __name__ == "__main__":
    raise SystemExit(main())
