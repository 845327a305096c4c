"""Draw runs as one page of HTML that needs nothing else: `python -m experiments.plot RUN... [--out=plot.html]`.

RUN is a run folder. Exit code 2 and one line for a folder that cannot be read, or without matplotlib.
"""

import html
import itertools
import json
import math
import string
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from experiments.config import ConfigError
from experiments.rundata import RunData, format_bytes, read_runs

if TYPE_CHECKING:
    from experiments.panels import Drawing

PROGRAM = "python -m experiments.plot"


@dataclass(frozen=True)
class Options:
    """Draw the curves of runs into one HTML file."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN...", help="run folders")]
    out: Annotated[Path, tyro.conf.arg(metavar="FILE", help="the page")] = Path("plot.html")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page; returns the exit code."""
    options = tyro.cli(Options, prog=PROGRAM, args=argv)
    try:
        if not options.runs:
            raise ConfigError("name one or more run folders")
        text = page(read_runs(list(options.runs)))
        options.out.write_text(text, encoding="utf-8")
    except OSError as error:
        return _fail(f"cannot write {options.out}: {error.strerror}")
    except ConfigError as error:
        return _fail(error)
    print(f"{options.out} ({len(text) / 1e6:.1f} MB)")
    return 0


def page(runs: Sequence[RunData]) -> str:
    """Return the page of some runs as HTML.

    Raises:
        ConfigError: without matplotlib.
    """
    try:
        from experiments.panels import NUM_COLORS, draw, draw_bytes, site_panels, training_panels
    except ImportError as error:
        if error.name != "matplotlib":
            raise
        raise ConfigError("drawing needs matplotlib: pip install matplotlib") from None
    drawings = [d for panel in training_panels() if (d := draw(panel, runs))]
    sites = {title: [d for panel in panels if (d := draw(panel, runs))] for title, panels in site_panels(runs).items()}
    sent = draw_bytes(runs)
    curves = [
        {"box": d.box, "limits": d.limits, "curves": d.curves} for d in [*drawings, *itertools.chain(*sites.values())]
    ]
    data = json.dumps({"runs": [run.name for run in runs], "panels": curves}, allow_nan=False)
    template = resources.files("experiments").joinpath("plot.html").read_text(encoding="utf-8")
    return string.Template(template).substitute(
        title=html.escape(", ".join(run.name for run in runs)),
        legend="".join(_chip(index, run, NUM_COLORS) for index, run in enumerate(runs)),
        summary=_table(runs, NUM_COLORS),
        training=_section("Training", drawings, "two"),
        communication=_section("Communication", [sent] if sent else [], "one"),
        sites="".join(_section(title, section, "four") for title, section in sites.items()),
        # What looks like a tag would end the script or comment it out.
        data=data.replace("<", "\\u003c"),
    )


def _chip(index: int, run: RunData, num_colors: int) -> str:
    color = f"var(--run-{index % num_colors})"
    return (
        f'<button type="button" class="chip" data-run="{index}" aria-pressed="true" style="--color: {color}">'
        f"{html.escape(run.name)}</button>"
    )


def _figure(drawing: "Drawing") -> str:
    panel = drawing.panel
    keys = "".join(f'<span class="key {c.style}">{html.escape(c.label)}</span>' for c in _used(drawing))
    note = f'<span class="note">{html.escape(panel.note)}</span>' if panel.note else ""
    kind = " data-curves" if drawing.curves else ""
    return (
        f"<figure{kind}><figcaption><b>{html.escape(panel.title)}</b>{keys}{note}</figcaption>{drawing.svg}</figure>\n"
    )


def _used(drawing: "Drawing") -> list[Any]:
    used = {curve["label"] for curve in drawing.curves}
    return [curve for curve in drawing.panel.curves if curve.label in used]


def _section(title: str, drawings: Sequence["Drawing"], kind: str) -> str:
    figures = "".join(map(_figure, drawings))
    return f'<h2>{title}</h2>\n<div class="grid {kind}">{figures}</div>' if drawings else ""


def _table(runs: Sequence[RunData], num_colors: int) -> str:
    """Return the summary, one line per run."""
    columns = [(name, unit, [value(run) for run in runs]) for name, unit, value in _SUMMARY]
    columns = [column for column in columns if any(cell != _NONE for cell in column[2])]
    head = "".join(f"<th>{name}<small>{unit}</small></th>" for name, unit, _ in columns)
    lines = [
        f'<tr data-run="{index}"><th><i style="background: var(--run-{index % num_colors})"></i>'
        f"{html.escape(run.name)}</th>" + "".join(f"<td>{html.escape(cells[index])}</td>" for *_, cells in columns)
        for index, run in enumerate(runs)
    ]
    return f"<table><thead><tr><th>run</th>{head}</tr></thead><tbody>{'</tr>'.join(lines)}</tr></tbody></table>"


_NONE = "\N{EN DASH}"


def _number(value: float | None, form: str = "{:.4f}") -> str:
    return form.format(value) if value is not None and math.isfinite(value) else _NONE


def _total(run: RunData, *keys: str) -> Any:
    found: Any = run.communication
    for key in keys:
        found = (found or {}).get(key)
    return found


def _sent(run: RunData) -> str:
    row = _total(run, "axes", "tp")
    return f"{format_bytes(row['bytes_per_step'])} / {format_bytes(row['bf16_bytes_per_step'])}" if row else _NONE


_SUMMARY: list[tuple[str, str, Callable[[RunData], str]]] = [
    ("mesh", "", lambda run: str(run.config.get("mesh", _NONE))),
    ("compression", "", lambda run: str(run.config.get("compression", _NONE))),
    ("steps", "", lambda run: f"{int(run.columns['step'][-1]):,}"),
    ("loss", "training", lambda run: _number(run.last("loss"))),
    ("loss", "validation", lambda run: _number(run.last("val_loss"))),
    ("SNR", "fwd / bwd, dB", lambda run: _snr(run)),
    ("tp bytes/step/device", "sent / in bf16", _sent),
    ("tp ratio", "bf16 / sent", lambda run: _number(_total(run, "axes", "tp", "ratio"), "{:.2f}x")),
    ("compressed", "bf16 / sent", lambda run: _number(_total(run, "compressed", "ratio"), "{:.2f}x")),
    ("step", "median ms", lambda run: _number(run.median_speed("step_ms"), "{:,.0f}")),
    ("tokens/s", "median", lambda run: _number(run.median_speed("tokens_per_s"), "{:,.0f}")),
    ("MFU", "median, %", lambda run: _number(100 * run.median_speed("mfu"), "{:.1f}")),
]


def _snr(run: RunData) -> str:
    values = run.last("snr_forward"), run.last("snr_backward")
    return " / ".join(_number(value, "{:.1f}") for value in values) if math.isfinite(values[0]) else _NONE


def _fail(error: Exception | str) -> int:
    print(f"{PROGRAM}: error: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
