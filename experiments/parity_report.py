"""What the runs of `experiments.parity` say: losses beside the uncompressed run of the same seed; table, CSV, plots."""

import csv
import dataclasses
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from experiments.metrics import read_metrics
from experiments.sites import MESSAGES

BASELINE = "none"
TAIL = 50
"""Last steps, over which training loss, SNR and saturation are averaged."""
_COLUMNS = ("mesh", "steps", "codec", "seeds", "val loss", "gap %", "+-", "train", "SNR fwd/bwd", "MB/step", "ratio",
            "s/step", "diverged")  # fmt: skip
_SMOOTHED = 20


@dataclasses.dataclass(frozen=True)
class Row:
    """One run.

    Attributes:
        name: its folder.
        mesh: as `--mesh`.
        steps: of the plan.
        codec: preset or ablation.
        seed: of parameters and order of the data.
        status: `finished`, or `diverged`: a step or the last validation was not finite.
        done: steps applied.
        val_loss: nats per byte behind the last step; NaN of a run that diverged.
        train_loss, snr_forward, snr_backward, saturation: means over the last `TAIL` steps; SNR in dB, NaN where
            nothing is compressed and where nothing is left of the messages.
        bytes_per_step: that a device sends over tp.
        bf16_bytes_per_step: that it would send in bf16.
        step_seconds: median.
        seconds: of the whole process, compilation and validation included.
    """

    name: str
    mesh: str
    steps: int
    codec: str
    seed: int
    status: str
    done: int
    val_loss: float
    train_loss: float
    snr_forward: float
    snr_backward: float
    saturation: float
    bytes_per_step: float
    bf16_bytes_per_step: float
    step_seconds: float
    seconds: float

    @property
    def key(self) -> tuple[str]:
        """What tells it from all others."""
        return (self.name,)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The runs of a codec on one mesh, beside the uncompressed ones of the same seeds.

    Attributes:
        rows: by seed.
        gaps: 100 (L / L0 - 1) of each pair that finished, L the validation loss and L0 the uncompressed run's.
    """

    rows: tuple[Row, ...]
    gaps: tuple[float, ...]

    @property
    def gap(self) -> float:
        """Mean of the gaps in percent, NaN without a pair."""
        return statistics.fmean(self.gaps) if self.gaps else math.nan

    @property
    def spread(self) -> float:
        """Standard deviation of the gaps over seeds in percent (n - 1), NaN of fewer than two."""
        return statistics.stdev(self.gaps) if len(self.gaps) > 1 else math.nan

    def mean(self, name: str) -> float:
        """Return the mean of a figure over the runs that have it."""
        values = [value for row in self.rows if math.isfinite(value := getattr(row, name))]
        return statistics.fmean(values) if values else math.nan


def compare(rows: Iterable[Row]) -> list[Comparison]:
    """Return the codecs of each mesh and length, in the order of the rows."""
    rows = list(rows)
    gap = gaps(rows)
    groups: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.mesh, row.steps, row.codec), []).append(row)
    places = list(dict.fromkeys(key[:2] for key in groups))
    found = []
    for key, members in sorted(groups.items(), key=lambda item: places.index(item[0][:2])):
        members.sort(key=lambda row: row.seed)
        finite = tuple(gap[row.name] for row in members if math.isfinite(gap[row.name]))
        found.append(Comparison(tuple(members), () if key[2] == BASELINE else finite))
    return found


def gaps(rows: Iterable[Row]) -> dict[str, float]:
    """Return 100 (L / L0 - 1) of each run by name, L0 of the uncompressed run of its seed; NaN where one is missing."""
    rows = list(rows)
    base = {(r.mesh, r.steps, r.seed): r.val_loss for r in rows if r.codec == BASELINE}
    return {r.name: 100 * (r.val_loss / base.get((r.mesh, r.steps, r.seed), math.nan) - 1) for r in rows}


def table(rows: Iterable[Row]) -> Table:
    """Return the table of all codecs; the ratio is of bf16's bytes, +- the spread over seeds."""
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in _COLUMNS:
        shown.add_column(name, justify="left" if name in ("mesh", "codec", "diverged") else "right", no_wrap=True)
    before = None
    for c in compare(rows):
        place = c.rows[0].mesh, c.rows[0].steps
        if before not in (None, place):
            shown.add_section()
        before = place
        shown.add_row(*_cells(c))
    return shown


def _cells(c: Comparison) -> Iterator[str]:
    row = c.rows[0]
    yield from (row.mesh, str(row.steps), row.codec, str(len(c.rows)))
    yield from (_shown(c.mean("val_loss"), ".4f"), _shown(c.gap, "+.2f"), _shown(c.spread, ".2f"))
    yield _shown(c.mean("train_loss"), ".4f")
    lost = "-" if row.codec == BASELINE else "lost"
    yield "/".join(_shown(c.mean(name), ".1f", lost) for name in ("snr_forward", "snr_backward"))
    yield f"{row.bytes_per_step / 1e6:.3f}"
    yield f"{row.bf16_bytes_per_step / row.bytes_per_step:.2f}"
    yield f"{c.mean('step_seconds'):.3f}"
    yield ", ".join(f"{r.seed} at {r.done + 1}" for r in c.rows if r.status == "diverged") or "-"


def _shown(value: float, form: str, missing: str = "-") -> str:
    return format(value, form) if math.isfinite(value) else missing


def write_report(rows: Sequence[Row], folder: Path) -> None:
    """Write parity.csv, and curves.png and long.png of the runs' metrics.jsonl in `folder`."""
    with (folder / "parity.csv").open("w", newline="") as file:
        fields = [field.name for field in dataclasses.fields(Row)]
        writer = csv.writer(file)
        writer.writerow([*fields, "gap"])
        gap = gaps(rows)
        for row in rows:
            writer.writerow([*dataclasses.astuple(row), gap[row.name]])
    lengths = sorted({row.steps for row in rows})
    mesh = rows[0].mesh if rows else ""
    _plot_curves([r for r in rows if (r.mesh, r.steps) == (mesh, lengths[0])], folder)
    # Without long runs those that there are.
    _plot_scales([r for r in rows if (r.mesh, r.steps) == (mesh, lengths[-1]) and r.codec != BASELINE], folder)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _columns(folder: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return steps and values of a number of metrics.jsonl, where it stands and is finite."""
    found = [(m["step"], m[name]) for m in read_metrics(folder / "metrics.jsonl") if m.get(name) is not None]
    steps, values = np.array(found, np.float64).reshape(-1, 2).T
    return steps, values


def _plot_curves(rows: Sequence[Row], folder: Path) -> None:
    """Draw training loss, validation loss and the gap to the uncompressed run of each codec's first seed."""
    pyplot = _pyplot()
    figure, (training, validation, gap) = pyplot.subplots(1, 3, figsize=(16, 5))
    firsts = {row.codec: row for row in reversed(rows)}
    exact = dict(zip(*_columns(folder / firsts[BASELINE].name, "val_loss"), strict=True)) if BASELINE in firsts else {}
    for number, codec in enumerate(sorted(firsts, key=[row.codec for row in rows].index)):
        path = folder / firsts[codec].name
        style = {"label": codec, "color": "black" if codec == BASELINE else f"C{number % 10}", "linewidth": 1.2}
        style |= {"linestyle": "--"} if number > 9 else {}
        steps, losses = _columns(path, "loss")
        window = min(_SMOOTHED, len(losses))
        if window:
            smooth = np.convolve(losses, np.ones(window) / window, "valid")
            training.plot(steps[window - 1 :], smooth, **style)
        steps, losses = _columns(path, "val_loss")
        validation.plot(steps, losses, "o-", markersize=3, **style)
        pairs = [(s, 100 * (loss / exact[s] - 1)) for s, loss in zip(steps, losses, strict=True) if s in exact]
        gap.plot(*np.array(pairs).reshape(-1, 2).T, "o-", markersize=3, **style)
    training.set(xlabel="step", ylabel=f"training loss, mean of {_SMOOTHED} steps", yscale="log")
    validation.set(xlabel="step", ylabel="validation loss, nats per byte", yscale="log")
    for panel in (training, validation):
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter("{x:g}")
    gap.set(xlabel="step", ylabel=f"validation loss above {BASELINE}'s, %", yscale="symlog")
    gap.legend(fontsize=8)
    figure.suptitle(", ".join(f"{r.mesh}, {r.steps} steps, seed {r.seed}" for r in rows[:1]))
    _save(figure, folder / "curves.png")


def _plot_scales(rows: Sequence[Row], folder: Path) -> None:
    """Draw alpha, saturation and SNR of each site over time, a column per direction, codecs by line style."""
    pyplot = _pyplot()
    ways = ("forward", "backward")
    figure, axes = pyplot.subplots(3, 2, figsize=(14, 11), sharex=True, squeeze=False)
    styles = dict(zip(dict.fromkeys(row.codec for row in rows), ("-", "--", ":", "-."), strict=False))
    firsts = {row.codec: row for row in reversed(rows)}
    for codec, style in styles.items():
        path = folder / firsts[codec].name
        for color, (site, directions) in enumerate(MESSAGES.items()):
            for way in directions:
                column = axes[:, ways.index(way)]
                drawn = {"color": f"C{color}", "linestyle": style, "label": f"{codec}, {site}", "linewidth": 1}
                for hop, width in ((1, 1.2), (2, 0.6)):
                    steps, alphas = _columns(path, f"alpha/{site}/{way}/{hop}")
                    label = f"{codec}, {site}, hop {hop}"
                    column[0].plot(steps, np.log2(alphas), **drawn | {"linewidth": width, "label": label})
                column[1].plot(*_columns(path, f"saturation/{site}/{way}"), **drawn)
                column[2].plot(*_columns(path, f"snr/{site}/{way}"), **drawn)
    for way, column in zip(ways, axes.T, strict=True):
        column[0].set(title=way, ylabel="log2 alpha (what does not adapt is measured by it)")
        column[1].set(ylabel="share of values saturated")
        column[1].set_yscale("symlog", linthresh=1e-7)
        column[2].set(ylabel="SNR, dB", xlabel="step")
        for panel in column[:2]:
            panel.legend(fontsize=6, ncols=2)
    _save(figure, folder / "long.png")


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    _pyplot().close(figure)
