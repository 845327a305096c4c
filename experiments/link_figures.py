"""What the commands that measure for long share: checks of their options, rows kept in a file, and exit codes."""

import dataclasses
import json
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from experiments.config import ConfigError
from experiments.link_workers import WorkerFailed
from experiments.netns import bits_per_second
from taco_jax.config import PRESETS


class Figures(Protocol):
    """A dataclass of one measurement."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def key(self) -> tuple:
        """What tells it from all others."""


R = TypeVar("R", bound=Figures)


def check_turns(rates: Sequence[str], compressions: Sequence[str], baseline: str, rounds: int) -> None:
    """Check what is measured in turns.

    Raises:
        ConfigError: for a link speed or a compression that there is not, without the baseline, or without a turn.
    """
    for rate in rates:
        bits_per_second(rate)
    if unknown := [name for name in compressions if name not in PRESETS]:
        raise ConfigError(f"--compressions: there are {', '.join(PRESETS)}, got {', '.join(unknown)}")
    if baseline not in compressions:
        raise ConfigError(f"--compressions needs {baseline}, which the others are compared with")
    if rounds < 1:
        raise ConfigError(f"--rounds must be 1 or more, got {rounds}")


def read_rows(path: Path, kind: type[R]) -> list[R]:
    """Return the rows of a file of JSON lines, none if it is not there; of a row that stands twice the last."""
    if not path.exists():
        return []
    rows = (kind(**json.loads(line)) for line in path.read_text().splitlines())
    return list({row.key: row for row in rows}.values())


def add_rows(path: Path, rows: Iterable[Figures]) -> None:
    """Add rows to the file, a line each."""
    with path.open("a") as file:
        file.writelines(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows)


def write_rows(path: Path | None, rows: Iterable[Figures]) -> None:
    """Write rows to the file of --json, if there is one."""
    if path is not None:
        path.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")


def exit_code(program: str, run: Callable[[], int]) -> int:
    """Return what `run` does, or the exit code of what ended it, told in one line."""
    try:
        return run()
    except ConfigError as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return 2
    except WorkerFailed as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{program}: interrupted; the same command goes on", file=sys.stderr)
        return 128 + signal.SIGINT
