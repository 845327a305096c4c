"""Stop a run again and again, at random, and compare it with one that was let be: `python -m experiments.soak`.

A trainer is killed (SIGKILL) or told to stop (SIGTERM, SIGUSR1) about every `--every` seconds and started again by the
same command; when the time is up it finishes. Then the same command runs undisturbed into another folder, and all
losses, gradient norms and learning rates of the two runs must be equal, bit for bit. Exit code 1 if they are not.
"""

import dataclasses
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from experiments.cli import parse_command_line
from experiments.config import ConfigError
from experiments.metrics import read_metrics

PROGRAM = "python -m experiments.soak"
COMPARED = ("step", "loss", "grad_norm", "lr", "val_loss")
_SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Stop a run again and again, at random, and compare it with one that was never stopped."""

    minutes: float = 20.0
    """How long the run is disturbed."""
    every: float = 60.0
    """Mean seconds between two stops, counted from the start of a process."""
    mesh: str = "dp2,pp2,tp2"
    """Mesh of the run."""
    recipe: str = "tiny"
    """Recipe of the run."""
    compression: str = "taco"
    """Compression of the run."""
    steps: int = 0
    """Steps of the run; 0: those it has done when the time is up, and some more."""
    out: str = "runs/soak"
    """Folder of the two runs, which is emptied first."""
    seed: int = 0
    """Seed of the moments and the ways of stopping."""


@dataclasses.dataclass
class Stops:
    """How often the run was stopped, by signal, and what else happened."""

    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    resumed: int = 0

    def add(self, name: str) -> None:
        """Count one."""
        self.counts[name] = self.counts.get(name, 0) + 1


class SoakError(Exception):
    """A trainer that ended otherwise than it should."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the program's own) and return the exit code."""
    try:
        arguments = parse_command_line(Arguments, PROGRAM, sys.argv[1:] if argv is None else argv)
        if arguments.minutes <= 0 or arguments.every <= 0:
            raise ConfigError("--minutes and --every must be above 0")
        return soak(arguments)
    except ConfigError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    except SoakError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1


def soak(arguments: Arguments) -> int:
    """Disturb one run, let another be, compare them and print the result; return the exit code."""
    out = Path(arguments.out)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    stops = Stops()
    disturbed, undisturbed = out / "disturbed", out / "undisturbed"
    steps = disturb(arguments, disturbed, stops)
    _run(arguments, disturbed, steps)
    print(f"undisturbed run of {steps} steps", flush=True)
    _run(arguments, undisturbed, steps)
    differing = compare(disturbed, undisturbed)
    table = Table(title=f"{steps} steps on {arguments.mesh}, disturbed for {arguments.minutes:g} minutes")
    for name in ("stops", *stops.counts, "resumed", "steps done twice", "differing steps"):
        table.add_column(name, justify="right")
    lost = _steps_logged(out / "disturbed.log") - steps
    row = [sum(stops.counts.values()), *stops.counts.values(), stops.resumed, lost, len(differing)]
    table.add_row(*map(str, row))
    Console(width=120).print(table)
    if differing:
        print(f"the runs differ from step {differing[0]} on", file=sys.stderr)
    return 1 if differing else 0


def disturb(arguments: Arguments, folder: Path, stops: Stops) -> int:
    """Start and stop the run until the time is up; return the steps that it shall end with."""
    randomness = random.Random(arguments.seed)
    deadline = time.monotonic() + 60 * arguments.minutes
    while (now := time.monotonic()) < deadline:
        wait = min(randomness.uniform(0.2, 1.8) * arguments.every, deadline - now)
        number = randomness.choice(_SIGNALS)
        before = _last_step(folder)
        process = _start(arguments, folder, arguments.steps or 10**9)
        try:
            code = process.wait(wait)
        except subprocess.TimeoutExpired:
            process.send_signal(number)
            code = process.wait(300)
        if code == 0:
            break
        # Before the first step, while it compiles, a signal ends the program at once.
        if code not in (-number, 128 + number):
            raise SoakError(f"the run ended with {code}, see {folder}.log")
        stops.add(number.name)
        stops.resumed += before > 0
        print(f"{number.name} after {wait:3.0f} s: exit code {code}, step {_last_step(folder)}", flush=True)
    return arguments.steps or _last_step(folder) + 10


def compare(one: Path, other: Path) -> list[int]:
    """Return the steps in which what `metrics.jsonl` says of the two runs differs."""
    a, b = (read_metrics(folder / "metrics.jsonl") for folder in (one, other))
    if len(a) != len(b):
        raise SoakError(f"the runs have {len(a)} and {len(b)} steps")
    return [x["step"] for x, y in zip(a, b, strict=True) if any(x.get(name) != y.get(name) for name in COMPARED)]


def _start(arguments: Arguments, folder: Path, steps: int) -> subprocess.Popen:
    command = [
        *(sys.executable, "-m", "experiments.train"),
        *(f"--mesh={arguments.mesh}", f"--recipe={arguments.recipe}", f"--compression={arguments.compression}"),
        *(f"--steps={steps}", f"--out={folder}", "--set=checkpoint.every=200", "--set=eval_every=200"),
    ]
    # What is compiled is kept, so that the time goes into steps.
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder.parent / "compiled"), "PYTHONUNBUFFERED": "1"}
    with folder.with_name(f"{folder.name}.log").open("ab") as log:
        return subprocess.Popen(command, env=os.environ | cache, stdout=log, stderr=log)


def _run(arguments: Arguments, folder: Path, steps: int) -> None:
    code = _start(arguments, folder, steps).wait()
    if code:
        raise SoakError(f"the run ended with {code}, see {folder}.log")


def _last_step(folder: Path) -> int:
    rows = read_metrics(folder / "metrics.jsonl")
    return rows[-1]["step"] if rows else 0


def _steps_logged(log: Path) -> int:
    return sum(line.startswith("step ") for line in log.read_text(errors="replace").splitlines())


if __name__ == "__main__":
    sys.exit(main())
