"""Read run folders, for whoever compares runs."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.config import ConfigError


@dataclass(frozen=True)
class RunData:
    """What a run folder says.

    Attributes:
        name: what it is called.
        config: config.json, empty if there is none.
        communication: "totals" of communication.json, empty if there is none.
        columns: f64[steps] of every number of metrics.jsonl, NaN where a step lacks it; one is "step".
    """

    name: str
    config: Mapping[str, Any]
    communication: Mapping[str, Any]
    columns: Mapping[str, np.ndarray]

    def column(self, key: str) -> np.ndarray:
        """Return f64[steps], NaN where a step lacks the number."""
        return self.columns.get(key, np.full(len(self.columns["step"]), np.nan))

    def last(self, key: str) -> float:
        """Return the last finite value of a number, NaN if there is none."""
        values = self.column(key)
        known = values[np.isfinite(values)]
        return float(known[-1]) if len(known) else math.nan

    def speed(self, key: str) -> np.ndarray:
        """Return a number that measures speed, NaN for the first step after each start."""
        first = np.nan_to_num(self.column("first_step")) > 0
        # Runs that mark no such step began once.
        first[0] = True
        return np.where(first, np.nan, self.column(key))

    def median_speed(self, key: str) -> float:
        """Return the median of `speed`, NaN if there is none."""
        values = self.speed(key)
        return float(np.median(values[np.isfinite(values)])) if np.isfinite(values).any() else math.nan


def read_runs(folders: list[Path]) -> list[RunData]:
    """Read run folders; they are called like the folders, with as many parents as tell them apart.

    Raises:
        ConfigError: for a folder without metrics.jsonl, or a file that cannot be read.
    """
    resolved = [folder.resolve() for folder in folders]
    if repeated := {str(folder) for folder in resolved if resolved.count(folder) > 1}:
        raise ConfigError(f"{min(repeated)} is given twice")
    depth = 1
    while len({folder.parts[-depth:] for folder in resolved}) < len(resolved):
        depth += 1
    return [_read_run(folder, "/".join(path.parts[-depth:])) for folder, path in zip(folders, resolved, strict=True)]


def format_bytes(size: float) -> str:
    """Return a number of bytes with three digits: "45.8 kB"."""
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= scale:
            return f"{size / scale:.4g} {unit}" if size >= 999.5 * scale else f"{size / scale:.3g} {unit}"
    return f"{size:g} B"


def _read_run(folder: Path, name: str) -> RunData:
    path = folder / "metrics.jsonl"
    lines = _read(path).splitlines()
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append({key: math.nan if value is None else float(value) for key, value in json.loads(line).items()})
            rows[-1]["step"] = int(rows[-1]["step"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            # A run that is being written, or was killed, may end in half a line.
            if number < len(lines):
                raise ConfigError(f"{path} line {number} is no step of a run: {error}") from None
    if not rows:
        raise ConfigError(f"{path} holds no step")
    keys = dict.fromkeys(key for row in rows for key in row)
    columns = {key: np.array([row.get(key, math.nan) for row in rows], np.float64) for key in keys}
    totals = _read_json(folder / "communication.json").get("totals", {})
    return RunData(name, _read_json(folder / "config.json"), totals, columns)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json.loads(_read(path))
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"cannot read {path}: {reason}") from None
