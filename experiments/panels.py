"""Panels of the page that `python -m experiments.plot` makes: curves over steps and bars of bytes, as SVG.

A run has the same colour everywhere. Colours are names of the page's style sheet, so that one SVG suits a light and a
dark page.
"""

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator, NullFormatter

from experiments.rundata import RunData, format_bytes

NUM_COLORS = 8
"""Colours of runs that the style sheet has."""
_MAX_POINTS = 1500
_WIDTH, _NARROW, _HEIGHT = 6.0, 3.3, 2.4
_SMALLEST_FRACTION = 1e-7
_SPEEDS = ("step_ms", "tflops_per_device")
_SITE_KEY = re.compile(r"(alpha|snr|saturation|nonfinite)/([^/]+)/((?:forward|backward)(?:/[12])?)")
_SITE_QUANTITIES = {
    "alpha": ("Scale alpha of each site, geometric mean over layers", "log2 alpha", "log2"),
    "snr": ("Signal-to-noise ratio of each site", "dB", "linear"),
    "saturation": ("Saturated values of each site", "fraction", "fraction"),
    "nonfinite": ("Values that are not finite at each site", "count", "linear"),
}
_WAYS = {
    "forward": ("forward", "solid"),
    "backward": ("backward", "dashed"),
    "forward/1": ("forward, hop 1", "solid"),
    "forward/2": ("forward, hop 2", "thin"),
    "backward/1": ("backward, hop 1", "dashed"),
    "backward/2": ("backward, hop 2", "thin-dashed"),
}
_STYLES: dict[str, dict[str, Any]] = {
    "solid": {"linewidth": 1.4},
    "dashed": {"linewidth": 1.4, "linestyle": (0, (4, 2))},
    "thin": {"linewidth": 0.8, "alpha": 0.6},
    "thin-dashed": {"linewidth": 0.8, "alpha": 0.6, "linestyle": (0, (4, 2))},
    "points": {"linewidth": 1.4, "marker": "o", "markersize": 3.5},
}
# Stand for the style sheet's colours until the SVG is written.
_TEXT, _GRID = "#010203", "#010204"
_RUN_COLORS = [f"#01{index:02x}05" for index in range(NUM_COLORS)]


@dataclass(frozen=True)
class Curve:
    """One number of every run, called `label` in the panel's key; `style` is a key of `_STYLES`."""

    key: str
    label: str
    style: str = "solid"


@dataclass(frozen=True)
class Panel:
    """A drawing with the title and the unit of its vertical axis.

    Attributes:
        scale: of the vertical axis, `linear`, `log`, `fraction` (logarithmic down to 1e-7, linear to 0), `log2`
            (the exponents are drawn), or `tera` for what was recorded in units of 1e12.
        note: what a reader must know beside the key.
        width: in inches; type is as large in wide panels as in narrow ones.
    """

    title: str
    unit: str
    curves: tuple[Curve, ...] = ()
    scale: str = "linear"
    note: str = ""
    width: float = _WIDTH


@dataclass
class Drawing:
    """A panel as SVG, with what a pointer over it needs.

    Attributes:
        box: left, top, right, bottom of the axes in the units of the SVG.
        limits: steps at the left and the right.
        curves: {"run", "label", "style", "steps", "values"} of each curve.
    """

    panel: Panel
    svg: str
    box: tuple[float, float, float, float]
    limits: tuple[float, float] | None = None
    curves: list[dict[str, Any]] = field(default_factory=list)


def training_panels() -> list[Panel]:
    """Return the panels about a run as a whole."""
    without_first = "without the first step after a start"
    directions = (Curve("snr_forward", "forward"), Curve("snr_backward", "backward", "dashed"))
    return [
        Panel("Loss", "nats/byte", (Curve("loss", "training", "thin"), Curve("val_loss", "validation", "points"))),
        Panel("Validation loss", "nats/byte", (Curve("val_loss", "validation", "points"),)),
        Panel("Signal-to-noise ratio of messages", "dB", directions),
        Panel("Saturated values", "fraction", (Curve("saturation", "all messages"),), "fraction"),
        Panel("Gradient norm", "L2 norm", (Curve("grad_norm", "before clipping"),), "log"),
        Panel("Learning rate", "per step", (Curve("lr", "learning rate"),)),
        Panel("Step time", "ms", (Curve("step_ms", "step"),), note=f"{without_first}; the slowest 2 % may be cut off"),
        Panel("Model FLOP/s", "FLOP/s/device", (Curve("tflops_per_device", "step"),), "tera", note=without_first),
    ]


def site_panels(runs: Sequence[RunData]) -> dict[str, list[Panel]]:
    """Return, under its title, a panel of each site for each quantity that a run recorded per site."""
    found: dict[tuple[str, str], set[str]] = {}
    for run in runs:
        for key in run.columns:
            # Zeros everywhere are the rule and would fill a row.
            if (match := _SITE_KEY.fullmatch(key)) and (match[1] != "nonfinite" or run.columns[key].any()):
                found.setdefault((match[1], match[2]), set()).add(match[3])
    sections: dict[str, list[Panel]] = {}
    for quantity, site in sorted(found, key=lambda place: (list(_SITE_QUANTITIES).index(place[0]), place[1])):
        title, unit, scale = _SITE_QUANTITIES[quantity]
        ways = found[quantity, site]
        curves = tuple(Curve(f"{quantity}/{site}/{way}", *_WAYS[way]) for way in _WAYS if way in ways)
        sections.setdefault(title, []).append(Panel(site, unit, curves, scale, width=_NARROW))
    return sections


def draw(panel: Panel, runs: Sequence[RunData]) -> Drawing | None:
    """Return the curves of a panel over the steps of all runs, None if no run has any."""
    curves: list[dict[str, Any]] = [
        {"run": index, "label": curve.label, "style": curve.style, "steps": steps, "values": values}
        for index, run in enumerate(runs)
        for curve in panel.curves
        for steps, values in [_points(run, curve, panel.scale)]
        if len(steps)
    ]
    if not curves:
        return None
    figure, axes = _figure(panel)
    for number, curve in enumerate(curves):
        color = _RUN_COLORS[curve["run"] % NUM_COLORS]
        line = axes.plot(curve["steps"], curve["values"], color=color, **_STYLES[curve["style"]])[0]
        line.set_gid(f"run-{curve['run']}-{number}")
    limits = min(run.columns["step"][0] for run in runs), max(run.columns["step"][-1] for run in runs)
    pad = max(0.015 * (limits[1] - limits[0]), 0.5)
    axes.set_xlim(limits[0] - pad, limits[1] + pad)
    axes.xaxis.set_major_locator(MaxNLocator(8 if panel.width == _WIDTH else 5, integer=True, steps=[1, 2, 5, 10]))
    axes.set_xlabel("step")
    _scale(axes, panel, np.concatenate([curve["values"] for curve in curves]))
    for curve in curves:
        curve["steps"] = [int(step) for step in curve["steps"]]
        curve["values"] = [float(f"{value:.5g}") if math.isfinite(value) else None for value in curve["values"]]
    return Drawing(panel, _svg(figure), _box(figure, axes), axes.get_xlim(), curves)


def draw_bytes(runs: Sequence[RunData]) -> Drawing | None:
    """Return bars of what leaves a device per step and axis, beside the same messages in bf16."""
    groups = _byte_groups(runs)
    if not groups:
        return None
    note = "filled: what is sent; outline: the same messages in bf16"
    panel = Panel("Bytes on the wire", "bytes/step/device", note=note, width=2 * _WIDTH)
    figure, axes = _figure(panel)
    slot = 0.8 / len(runs)
    is_crowded = len(runs) * len(groups) > 18
    for group, totals in enumerate(groups.values()):
        for index, (sent, exact) in enumerate(totals):
            if not sent:
                continue
            x, color = group + (index + 0.5) * slot - 0.4, _RUN_COLORS[index % NUM_COLORS]
            filled = axes.bar(x, sent, 0.8 * slot, color=color, alpha=0.75)[0]
            outline = axes.bar(x, exact, 0.92 * slot, fill=False, edgecolor=color, linewidth=1)[0]
            text = axes.annotate(
                f"{format_bytes(sent)}{'  ' if is_crowded else chr(10)}{exact / sent:.2f}x",
                xy=(x, max(sent, exact)),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                rotation=90 if is_crowded else 0,
                size=7,
                color=_TEXT,
            )
            for artist in (filled, outline, text):
                artist.set_gid(f"run-{index}-{group}")
    axes.margins(y=0.6 if is_crowded else 0.2)
    axes.set_xlim(-0.5, len(groups) - 0.5)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))
    return Drawing(panel, _svg(figure), _box(figure, axes))


def _byte_groups(runs: Sequence[RunData]) -> dict[str, list[tuple[float, float]]]:
    """Return the bytes that every run sends and would send in bf16, per axis and on the compressed sites.

    Axes that carry less than a hundredth of the largest are added up.
    """

    def total(row: dict[str, float] | None) -> tuple[float, float]:
        return (row["bytes_per_step"], row["bf16_bytes_per_step"]) if row else (0, 0)

    found = [run.communication.get("axes", {}) for run in runs]
    names = sorted({name for axes in found for name in axes}, key=lambda name: ("," in name, name))
    groups = {f"axis {name}": [total(axes.get(name)) for axes in found] for name in names}
    sizes = {name: max(max(sent, exact) for sent, exact in totals) for name, totals in groups.items()}
    small = [name for name, size in sizes.items() if size < 0.01 * max(sizes.values())]
    merged = [groups.pop(name) for name in small]
    if small:
        label = " + ".join(name.removeprefix("axis ") for name in small)
        groups[f"axes {label}"] = [(sum(s for s, _ in t), sum(e for _, e in t)) for t in zip(*merged, strict=True)]
    compressed = [total(run.communication.get("compressed")) for run in runs]
    return groups | ({"compressed sites": compressed} if any(sent for sent, _ in compressed) else {})


def _points(run: RunData, curve: Curve, scale: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps and values of a curve: for `points` those that exist, otherwise gaps stay NaN."""
    steps, values = run.columns["step"], run.speed(curve.key) if curve.key in _SPEEDS else run.column(curve.key)
    if scale in ("log", "log2"):
        values = np.where(values > 0, values, np.nan)
    if scale == "log2":
        values = np.log2(values)
    elif scale == "tera":
        values = 1e12 * values
    known = np.isfinite(values)
    if curve.style == "points":
        steps, values = steps[known], values[known]
    elif not known.any():
        steps, values = steps[:0], values[:0]
    return _thinned(steps, values)


def _thinned(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keep the smallest and the largest value of each of many stretches, so that no peak is lost."""
    if len(steps) <= _MAX_POINTS:
        return steps, values
    kept: set[int] = {0, len(steps) - 1}
    for part in np.array_split(np.arange(len(steps)), _MAX_POINTS // 2):
        known = part[np.isfinite(values[part])]
        kept |= {known[np.argmin(values[known])], known[np.argmax(values[known])]} if len(known) else {part[0]}
    indices = sorted(kept)
    return steps[indices], values[indices]


def _figure(panel: Panel) -> tuple[Figure, Axes]:
    """Return a figure whose axes leave the same margins, in inches, in every panel."""
    width = panel.width
    with rc_context({"font.size": 8}):
        figure = Figure(figsize=(width, _HEIGHT))
        axes = figure.add_axes((0.72 / width, 0.4 / _HEIGHT, 1 - 0.82 / width, 1 - 0.5 / _HEIGHT))
    axes.set_ylabel(panel.unit, color=_TEXT)
    axes.xaxis.label.set_color(_TEXT)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_GRID)
    axes.tick_params(colors=_TEXT, color=_GRID, length=3)
    axes.grid(color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _scale(axes: Axes, panel: Panel, values: np.ndarray) -> None:
    known = values[np.isfinite(values)]
    if panel.scale == "log":
        axes.set_yscale("log")
        plain = FuncFormatter(lambda value, _: _plain(value))
        axes.yaxis.set_major_formatter(plain)
        # Less than a decade has one labelled tick or none.
        axes.yaxis.set_minor_formatter(plain if known.max() < 20 * known.min() else NullFormatter())
    elif panel.scale == "fraction":
        axes.set_yscale("symlog", linthresh=_SMALLEST_FRACTION, linscale=0.5)
        axes.set_ylim(-0.15 * _SMALLEST_FRACTION, max(1e-5, 3 * known.max()))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))
    elif panel.scale == "tera":
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_ylim(bottom=0)
    elif panel.scale == "log2":
        axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.set_ylim(known.min() - 1, known.max() + 1)
    elif panel.unit == "ms":
        axes.set_ylim(0, 1.2 * np.quantile(known, 0.98))
    elif known.max() - known.min() < 1e-3 * abs(known.max()):
        # Noise in the last digits would fill the panel.
        middle = known.mean()
        axes.set_ylim(middle - 0.05 * abs(middle), middle + 0.05 * abs(middle))


def _plain(value: float) -> str:
    """Return 0.01, 1, 100, but 1e-5 and 1e6."""
    mantissa, _, exponent = f"{value:e}".partition("e")
    return f"{value:g}" if not value or -4 < int(exponent) < 5 else f"{float(mantissa):g}e{int(exponent)}"


def _box(figure: Figure, axes: Axes) -> tuple[float, float, float, float]:
    width, height = 72 * figure.get_size_inches()
    box = axes.get_position()
    return (box.x0 * width, (1 - box.y1) * height, box.x1 * width, (1 - box.y0) * height)


def _svg(figure: Figure) -> str:
    """Return a figure as an SVG element that stands well in a page with others."""
    text = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "taco_jax"}):
        figure.savefig(text, format="svg", transparent=True)
    svg = text.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'id="run-(\d+)-[^"]*"', r'class="run run-\1"', svg)
    # Other ids are repeated from panel to panel; those that are referred to name equal things.
    svg = re.sub(r' id="(?:figure|patch|axes|matplotlib|xtick|ytick|line2d|text|legend)[._]?[^"]*"', "", svg)
    svg = re.sub(r'(<svg[^>]*?) (?:width|height)="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg))
    for index, color in enumerate(_RUN_COLORS):
        svg = svg.replace(color, f"var(--run-{index})")
    return svg.replace(_TEXT, "var(--text)").replace(_GRID, "var(--grid)")
