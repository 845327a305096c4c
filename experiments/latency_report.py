"""What the figures of `experiments.latency` say: times, bytes and the size from which on compression pays."""

import csv
import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from experiments import link_figures
from experiments.collective_times import crossover
from experiments.collectives import with_unit

BASELINE = "none"
LONGEST = 1024
"""Positions in the cache."""
TOKENS = 16
"""Tokens that continue the prompt in a turn."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One compression of all messages, on one mesh and link, for one number of positions.

    Attributes:
        mesh: as `--mesh`, a device on each host.
        rate: of every link and direction.
        compression: preset.
        size: positions that a call reads: of a prompt, or 1 for a token that continues one.
        message: bytes of a tensor that is added over the devices, which is what `min_bytes` is compared with.
        seconds: median of a call; of its slowest process.
        fastest, slowest: call.
        turns: median of each turn, in which all compressions were timed behind each other.
        payload: bytes per call that a host's interface counted, without the headers of Ethernet, IP and TCP.
        planned: what the compiled program is to send to other hosts.
        limit: the `min_bytes` that is judged.
        exact: whether that limit leaves these messages as they are.
        snr_db: of the logits of a prompt against those of `none`.
        same_tokens: how many of the tokens are those of `none` before the first that is not; None for a prompt.
    """

    mesh: str
    rate: str
    compression: str
    size: int
    message: int
    seconds: float
    fastest: float
    slowest: float
    turns: list[float]
    payload: float
    planned: float
    limit: int
    exact: bool
    snr_db: float
    same_tokens: int | None

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What tells it from all others."""
        return self.mesh, self.rate, self.compression, self.size


def read_rows(path: Path) -> list[Row]:
    """Return the rows of results.jsonl."""
    return link_figures.read_rows(path, Row)


def speed_up(row: Row, base: Row) -> float:
    """Return the median over the turns of the seconds of `base` by those of `row`; other load hits both alike."""
    return statistics.median(_ratios(row, base))


def sure_speed_up(row: Row, base: Row) -> float:
    """Return the speed-up that every turn reaches: of five turns of equals one in 32 would say so."""
    return min(_ratios(row, base))


def _ratios(row: Row, base: Row) -> list[float]:
    return [b / r for b, r in zip(base.turns, row.turns, strict=True)]


def pays_from(rows: Sequence[Row], compression: str, baseline: str = BASELINE) -> int | None:
    """Return the smallest message from which on a compression is surely faster, of the rows of one mesh and link.

    None if it is not at the largest.
    """
    return crossover([(row.message, sure_speed_up(row, base)) for row, base in _pairs(rows, compression, baseline)])


def worst_choice(rows: Sequence[Row], compression: str) -> tuple[float, int]:
    """Return (factor, message): where the limit of the rows surely costs most, exact for compressed or the reverse.

    The factor is 1 where no size shows that it costs anything.
    """
    costs = [(1.0, 0)]
    for row, base in _pairs(rows, compression, BASELINE):
        costs.append((sure_speed_up(row, base) if row.exact else sure_speed_up(base, row), row.message))
    return max(costs)


def _pairs(rows: Sequence[Row], compression: str, baseline: str) -> Iterator[tuple[Row, Row]]:
    bases = {row.size: row for row in rows if row.compression == baseline}
    for row in rows:
        if row.compression == compression and row.size in bases:
            yield row, bases[row.size]


def places(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    """Return (mesh, rate) -> its rows, by size."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.size):
        found.setdefault((row.mesh, row.rate), []).append(row)
    return found


def times_table(mesh: str, rows: Sequence[Row]) -> Table:
    """Return the seconds of a mesh: a line for each link and number of positions."""
    names = _names(rows)
    shown = _table(f"{mesh}: milliseconds, median (fastest-slowest), speed-up over {BASELINE}")
    shown.caption = f"1 position: a token behind a prompt; *: min_bytes={rows[0].limit} leaves these messages exact"
    for column in ("link", "positions", "message", *names):
        shown.add_column(column, justify="left" if column == "link" else "right")
    for (_, rate), here in places(rows).items():
        shown.add_section()
        by_key = {(row.size, row.compression): row for row in here}
        for size in dict.fromkeys(row.size for row in here):
            base = by_key.get((size, BASELINE))
            own = [by_key.get((size, name)) for name in names]
            first = next(row for row in own if row is not None)
            exact = any(row.exact for row in own if row is not None and row.compression != BASELINE)
            message = with_unit(first.message) + ("*" if exact else " ")
            shown.add_row(rate, str(size), message, *(_time(row, base) for row in own))
    return shown


def bytes_table(mesh: str, rows: Sequence[Row]) -> Table:
    """Return the bytes per call of a mesh, which no link changes: planned, and how far the interfaces were from it."""
    names = _names(rows)
    shown = _table(f"{mesh}: bytes per call and host, planned (counted)")
    for column in ("positions", *names):
        shown.add_column(column, justify="right")
    for size in sorted({row.size for row in rows}):
        cells = []
        for name in names:
            own = [row for row in rows if (row.size, row.compression) == (size, name)]
            off = max((row.payload / row.planned - 1 for row in own), key=abs, default=0.0)
            cells.append(f"{own[0].planned:,.0f} ({off:+.1%})" if own else "-")
        shown.add_row(str(size), *cells)
    shown.caption = f"as {BASELINE}, logits and tokens: " + "; ".join(
        _quality(rows, name) for name in names if name != BASELINE
    )
    return shown


def limits_table(mesh: str, rows: Sequence[Row]) -> Table:
    """Return from which message on each compression pays on the links of a mesh, and what the limit costs there."""
    limit = f"min_bytes={rows[0].limit} costs"
    shown = _table(f"{mesh}: compression pays from this message on, in every turn")
    for column in ("link", "compression", f"over {BASELINE}", "over bf16", limit):
        shown.add_column(column, justify="left" if column in ("link", "compression") else "right")
    names = [name for name in _names(rows) if name != BASELINE]
    for (_, rate), here in places(rows).items():
        shown.add_section()
        for name in names:
            over_bf16 = _from(pays_from(here, name, "bf16")) if "bf16" in names and name != "bf16" else "-"
            factor, message = worst_choice(here, name)
            cost = f"{factor:.2f}x at {with_unit(message)}" if factor > 1 else "nothing sure"
            shown.add_row(rate, name, _from(pays_from(here, name)), over_bf16, cost)
    return shown


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.compression for row in rows))


def _time(row: Row | None, base: Row | None) -> str:
    if row is None:
        return "-"
    text = f"{_ms(row.seconds)} ({_ms(row.fastest)}-{_ms(row.slowest)})"
    return text if base is None or row is base else f"{text} {speed_up(row, base):.2f}x"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"


def _from(message: int | None) -> str:
    return "never" if message is None else with_unit(message)


def _quality(rows: Sequence[Row], name: str) -> str:
    own = [row for row in rows if row.compression == name]
    text = f"{name} {own[0].snr_db:.0f} dB"
    same = [row.same_tokens for row in own if row.same_tokens is not None]
    return f"{text}, {min(same)} of {TOKENS + 1} tokens" if same else text


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Write a line per row, with its speed-up over `none`."""
    fields = [field.name for field in dataclasses.fields(Row) if field.name != "turns"]
    bases = {(row.mesh, row.rate, row.size): row for row in rows if row.compression == BASELINE}
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*fields, "speed_up"])
        for row in rows:
            base = bases.get((row.mesh, row.rate, row.size))
            ratio = "" if base is None else speed_up(row, base)
            writer.writerow([*(getattr(row, name) for name in fields), ratio])


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw the time of a call against the size of its messages, one panel per mesh and link."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    meshes, rates = ([*dict.fromkeys(getattr(row, name) for row in rows)] for name in ("mesh", "rate"))
    size = 3.6 * len(rates), 3.2 * len(meshes)
    figure, axes = pyplot.subplots(len(meshes), len(rates), figsize=size, sharex=True, sharey="row", squeeze=False)
    by_place = places(rows)
    for i, mesh in enumerate(meshes):
        for panel, rate in zip(axes[i], rates, strict=True):
            here = by_place.get((mesh, rate), [])
            for name in _names(rows):
                points = [(row.message, row.seconds * 1e3) for row in here if row.compression == name]
                panel.plot([x for x, _ in points], [y for _, y in points], "o-", label=name, markersize=3)
            panel.axvline(rows[0].limit, color="grey", linewidth=0.8, linestyle=":")
            panel.set(yscale="log", title=f"{mesh}, {rate}" if rate != "none" else f"{mesh}, unshaped")
            panel.set_xscale("log", base=2)
        axes[i][0].set_ylabel("ms per call")
    for panel in axes[-1]:
        panel.set_xlabel("message, bytes")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
