"""What the figures of `experiments.fidelity` say: compared with what is expected, as tables and as a plot."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich import box
from rich.table import Table

from experiments.sites import MESSAGES

Rows = Sequence[Mapping[str, Any]]

DISTRIBUTIONS = {
    "gaussian": "Gaussian",
    "outliers": "8 of 1,024 channels x 50",
    "tokens_sigma1": "tokens x exp(g)",
    "tokens_sigma2": "tokens x exp(2 g)",
}
"""Name and title."""
ROUND_TRIPS: tuple[tuple[str, str, str, float], ...] = (
    ("e4m3_tensor", "gaussian", "snr_db", 31.5),
    ("e4m3_block128", "gaussian", "snr_db", 31.8),
    ("e5m2_block256_hadamard", "gaussian", "snr_db", 25.7),
    ("int8_block128_hadamard", "gaussian", "snr_db", 43.8),
    ("int6_block128_hadamard", "gaussian", "snr_db", 31.6),
    ("int4_block128_hadamard", "gaussian", "snr_db", 18.6),
    ("int4_block32_hadamard", "gaussian", "snr_db", 20.3),
    ("int8_block128_hadamard", "outliers", "snr_db", 48.6),
    ("taco_block", "outliers", "snr_db", 31.8),
    ("e4m3_block128", "outliers", "ordinary_snr_db", 31.6),
    ("taco_block", "outliers", "ordinary_snr_db", 18.5),
)
"""Codec, distribution, figure, and what was measured of it before, with other code, within 0.3 dB."""
# Two roundings of 43.8 dB leave 40.8.
ALL_REDUCES: tuple[tuple[str, str, float, float], ...] = (
    ("e4m3_block128", "gaussian", 28.7, 0.3),
    ("int8_block128_hadamard", "gaussian", 40.8, 0.3),
    ("e4m3_block128", "cancelling", 12.0, 1.0),
    ("int8_block128_hadamard", "cancelling", 24.0, 1.0),
)
"""Codec, distribution, and what is expected of every number of ranks, within so many dB."""
SAME_CODES = 0.9999
_TOLERANCE = 0.3
_MARKERS = ("o", "s", "D", "^", "v", "P", "X", "p", "<", ">", "h", "d", "8")


def checks(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return {"what", "found", "expected", "tolerance", "passed"} of every figure that something is expected of."""
    share = "share of equal codes without alpha", found["ablation"]["equal_codes"], 1.0, 1.0 - SAME_CODES
    compared = [*_expected_round_trips(found["roundtrip"]), *_expected_sums(found["allreduce"]), share]
    names = "what", "found", "expected", "tolerance"
    return [{**dict(zip(names, row, strict=True)), "passed": _near(*row[1:])} for row in compared]


def _near(value: float | None, expected: float, tolerance: float) -> bool:
    return value is not None and abs(value - expected) <= tolerance


def _expected_round_trips(rows: Rows) -> Iterator[tuple[str, float | None, float, float]]:
    for codec, distribution, figure, expected in ROUND_TRIPS:
        for row in _of(rows, codec=codec, distribution=distribution):
            ordinary = ", ordinary channels" if figure == "ordinary_snr_db" else ""
            yield f"round trip of {codec}, {distribution}{ordinary} (dB)", row[figure], expected, _TOLERANCE


def _expected_sums(rows: Rows) -> Iterator[tuple[str, float | None, float, float]]:
    for codec, distribution, expected, tolerance in ALL_REDUCES:
        for row in _of(rows, codec=codec, distribution=distribution):
            what = f"all-reduce of {row['ranks']} by {codec}, {distribution} (dB)"
            yield what, row["snr_db"], expected, tolerance


def tables(found: Mapping[str, Any]) -> Iterator[Table]:
    """Yield the tables that are printed."""
    yield _round_trips(found["roundtrip"], found["rows"])
    yield _all_reduces(found["allreduce"])
    model = f"of the {found['recipe']} GPT, {found['steps']} steps of training"
    for figure, title in (("roundtrip", "Each rank's part"), ("allreduce", "All-reduce of 4 ranks' parts")):
        yield _captured(
            found["captured"], figure, f"{title} {model}: dB (mean over steps and layers / lowest 1st-percentile row)"
        )


def _round_trips(rows: Rows, number: int) -> Table:
    title = f"Round trip of {number:,} tokens of 1,024 values: dB / of the 1st-percentile row"
    table = _table(title, "codec", "preset", "bytes")
    for column in ("Gaussian", "predicted", "expected", "outliers", "ordinary", "x exp(g)", "x exp(2 g)"):
        table.add_column(column, justify="right")
    expected = {codec: value for codec, distribution, _, value in ROUND_TRIPS if distribution == "gaussian"}
    for codec in _names(rows):
        by_name = {row["distribution"]: row for row in _of(rows, codec=codec)}
        gaussian, outliers, *tokens = (_pair(by_name[d]["snr_db"], by_name[d]["row_p1_db"]) for d in DISTRIBUTIONS)
        ordinary = _db(by_name["outliers"]["ordinary_snr_db"])
        others = _db(by_name["gaussian"]["predicted_db"]), _db(expected.get(codec))
        table.add_row(*_head(by_name["gaussian"]), gaussian, *others, outliers, ordinary, *tokens)
    return table


def _all_reduces(rows: Rows) -> Table:
    table = _table("All-reduce of Gaussian parts, dB", "codec", "preset", "bytes")
    cases = list(dict.fromkeys((row["distribution"], row["ranks"]) for row in rows))
    for distribution, ranks in cases:
        table.add_column(f"{ranks} ranks" if distribution == "gaussian" else f"{ranks}, cancelling", justify="right")
    for codec in _names(rows):
        own = _of(rows, codec=codec)
        table.add_row(*_head(own[0]), *(_db(row["snr_db"]) for row in own))
    return table


def _captured(rows: Rows, figure: str, title: str) -> Table:
    table = _table(title, "codec", "preset", "bytes")
    places = [(site, way) for way in ("forward", "backward") for site, ways in MESSAGES.items() if way in ways]
    for site, way in places:
        table.add_column(f"{site} {way}", justify="right")
    for codec in _names(rows):
        own = _of(rows, codec=codec)
        cells = (_of(own, site=site, direction=way) for site, way in places)
        table.add_row(*_head(own[0]), *(_pair(*_mean_and_lowest(cell, figure)) for cell in cells))
    return table


def _mean_and_lowest(rows: Rows, figure: str) -> tuple[float | None, float | None]:
    mean, lowest = (_counted(rows, f"{figure}_{part}") for part in ("snr_db", "row_p1_db"))
    return (fmean(mean) if mean else None), min(lowest, default=None)


def _counted(rows: Rows, key: str) -> list[float]:
    return [row[key] for row in rows if row[key] is not None]


def _table(title: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, padding=(0, 1, 0, 0), pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name == "bytes" else "left")
    return table


def _head(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["codec"], row["preset"] or "", f"{row['bytes_per_element']:.3f}"


def _names(rows: Rows) -> list[str]:
    return list(dict.fromkeys(row["codec"] for row in rows))


def _of(rows: Rows, **values: str) -> Rows:
    return [row for row in rows if all(row[key] == value for key, value in values.items())]


def _db(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _pair(value: float | None, lowest: float | None) -> str:
    return f"{_db(value) or 'exact'} / {_db(lowest) or 'exact'}"


def write_plot(found: Mapping[str, Any], path: Path) -> None:
    """Draw the ratio against the bytes of a value, a panel for each distribution; bf16 as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = list(_panels(found))
    names = _names(found["roundtrip"])
    figure, axes = pyplot.subplots(2, len(panels) // 2, figsize=(16, 9), sharex=True, sharey=True)
    for panel, (title, value) in zip(axes.flat, panels, strict=True):
        for number, name in enumerate(names):
            row = _of(found["roundtrip"], codec=name)[0]
            decibels = value(name)
            if decibels is None:
                continue
            if row["bytes_per_element"] >= 2:
                panel.axhline(decibels, color="grey", linestyle="--", linewidth=1, label=f"{name}, 2 bytes")
                continue
            style = {"markersize": 9, "markerfacecolor": "none", "markeredgewidth": 1.8, "linestyle": "none"}
            marker = _MARKERS[number % len(_MARKERS)]
            panel.plot(row["bytes_per_element"], decibels, marker=marker, color=f"C{number % 10}", label=name, **style)
        panel.set_title(title, fontsize=10)
        panel.grid(alpha=0.3)
    for panel in axes[:, 0]:
        panel.set_ylabel("SNR, dB")
    for panel in axes[-1]:
        panel.set_xlabel("bytes per value, scales included")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=5, fontsize=11, frameon=False)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _panels(found: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[str], float | None]]]:
    """Yield each panel's title and the function from a codec to its ratio."""

    def round_trip(distribution: str, figure: str) -> Callable[[str], float | None]:
        return lambda name: _of(found["roundtrip"], codec=name, distribution=distribution)[0][figure]

    def captured(direction: str, lowest: bool) -> Callable[[str], float | None]:
        rows = _of(found["captured"], direction=direction)
        return lambda name: _mean_and_lowest(_of(rows, codec=name), "allreduce")[lowest]

    yield DISTRIBUTIONS["gaussian"], round_trip("gaussian", "snr_db")
    yield DISTRIBUTIONS["outliers"], round_trip("outliers", "snr_db")
    yield "the ordinary channels beside them", round_trip("outliers", "ordinary_snr_db")
    yield f"{DISTRIBUTIONS['tokens_sigma2']}, 1st-percentile row", round_trip("tokens_sigma2", "row_p1_db")
    for lowest, what in ((False, "all-reduce of 4"), (True, "1st-percentile row of the sum")):
        yield f"captured activations, {what}", captured("forward", lowest)
        yield f"captured cotangents, {what}", captured("backward", lowest)
