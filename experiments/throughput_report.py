"""What the figures of `experiments.throughput` say: speed-ups beside their bound, as table, CSV and plot."""

import csv
import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from experiments import link_figures
from experiments.netns import bits_per_second
from taco_jax.sharding.mesh import parse_mesh

ALONE = "alone"
"""The step without communication."""
BASELINE = "bf16"
_COLUMNS = ("mesh", "link", "compression", "s/step", "spread", "MB/step", "plan", "busy", "codec", "f", "speed-up",
            "bound")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row:
    """One compression on one mesh and link.

    Attributes:
        mesh: as `--mesh`; dp within a host.
        hosts: processes, one each.
        rate: of every link and direction.
        compression: preset, or `alone`.
        seconds: median of a step; of its slowest process.
        fastest, slowest: step.
        steps: how many were timed.
        sent: bytes per step that a host's interface counted, all headers included.
        payload: those without the headers of Ethernet, IP and TCP.
        planned: what the compiled step is to send to other hosts.
        codec: seconds per step of encoding, adding and decoding its messages, all processes at it.
    """

    mesh: str
    hosts: int
    rate: str
    compression: str
    seconds: float
    fastest: float
    slowest: float
    steps: int
    sent: float
    payload: float
    planned: float
    codec: float

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells it from all others."""
        return self.mesh, self.rate, self.compression

    @property
    def busy(self) -> float:
        """Share of the step in which a link is sending."""
        return self.sent * 8 / bits_per_second(self.rate) / self.seconds


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A row beside the uncompressed one of the same mesh and link.

    Attributes:
        exposed: share f of the uncompressed step that is not the step alone.
        speed_up: uncompressed seconds by seconds.
        bound: 1 / (1 - f + f / r) with r the ratio of the bytes.
    """

    row: Row
    exposed: float
    speed_up: float
    bound: float


def read_rows(path: Path) -> list[Row]:
    """Return the rows of results.jsonl."""
    return link_figures.read_rows(path, Row)


def compare(rows: Iterable[Row]) -> list[Comparison]:
    """Return every compression beside the uncompressed row of its mesh and link, in the order of the rows."""
    rows = list(rows)
    by_place = {row.key: row for row in rows}
    found = []
    for row in rows:
        base, alone = (by_place.get((row.mesh, row.rate, name)) for name in (BASELINE, ALONE))
        if row.compression == ALONE or base is None or alone is None:
            continue
        exposed = max(0.0, 1.0 - alone.seconds * (1.0 + bubble(row.mesh)) / base.seconds)
        bound = 1.0 / (1.0 - exposed + exposed * row.payload / base.payload)
        found.append(Comparison(row, exposed, base.seconds / row.seconds, bound))
    return found


def num_microbatches(mesh: str) -> int:
    """Return how many microbatches a step has: one for each stage of a pipeline, so that messages stay large.

    What gloo says beside a message, 0.3 to 0.4 KB, is then less than 1 % of it.
    """
    return parse_mesh(mesh)["pp"]


def bubble(mesh: str) -> float:
    """Return what the pipeline's bubble adds to a step in units of its work: (pp - 1) / microbatches."""
    return (parse_mesh(mesh)["pp"] - 1) / num_microbatches(mesh)


def table(rows: Iterable[Row]) -> Table:
    """Return the table of all comparisons."""
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in _COLUMNS:
        shown.add_column(name, justify="left" if name in _COLUMNS[:3] else "right")
    before = None
    for c in compare(rows):
        if before not in (None, (c.row.mesh, c.row.rate)):
            shown.add_section()
        before = c.row.mesh, c.row.rate
        shown.add_row(*_cells(c))
    return shown


def _cells(c: Comparison) -> Sequence[str]:
    row = c.row
    return (
        row.mesh, row.rate, row.compression, f"{row.seconds:.3f}", f"{row.fastest:.2f}-{row.slowest:.2f}",
        f"{row.payload / 1e6:.3f}", f"{row.payload / row.planned - 1:+.2%}", f"{row.busy:.0%}",
        f"{row.codec / row.seconds:.1%}", f"{c.exposed:.2f}", f"{c.speed_up:.2f}x", f"{c.bound:.2f}x",
    )  # fmt: skip


def write_report(rows: Sequence[Row], folder: Path) -> None:
    """Write throughput.csv and throughput.png."""
    compared = compare(rows)
    with (folder / "throughput.csv").open("w", newline="") as file:
        fields = [field.name for field in dataclasses.fields(Row)]
        writer = csv.writer(file)
        writer.writerow([*fields, "busy", "exposed", "speed_up", "bound"])
        for c in compared:
            values = [getattr(c.row, name) for name in fields]
            writer.writerow([*values, c.row.busy, c.exposed, c.speed_up, c.bound])
    _plot(compared, folder / "throughput.png")


def _plot(compared: Sequence[Comparison], path: Path) -> None:
    """Draw the speed-up against the speed of the link, one panel per mesh, the bound as a dashed line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    meshes = list(dict.fromkeys(c.row.mesh for c in compared))
    speeds = sorted({_bits(c) / 1e6 for c in compared if math.isfinite(_bits(c))})
    figure, axes = pyplot.subplots(1, len(meshes), figsize=(4.5 * len(meshes), 4), sharey=True, squeeze=False)
    for panel, mesh in zip(axes[0], meshes, strict=True):
        for index, name in enumerate(("taco", "int8", "paper", "none", "int6", "int4")):
            points = [c for c in compared if (c.row.mesh, c.row.compression) == (mesh, name)]
            points = sorted((c for c in points if math.isfinite(bits_per_second(c.row.rate))), key=_bits)
            if not points:
                continue
            rates = [_bits(c) / 1e6 for c in points]
            panel.plot(rates, [c.speed_up for c in points], "o-", color=f"C{index}", label=name)
            panel.plot(rates, [c.bound for c in points], "--", color=f"C{index}", alpha=0.5)
        panel.axhline(1.0, color="grey", linewidth=0.8)
        panel.set(xscale="log", xlabel="link, Mbit/s", title=mesh)
        panel.xaxis.set_major_locator(ticker.FixedLocator(speeds))
        panel.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        panel.xaxis.set_minor_locator(ticker.NullLocator())
    axes[0][0].set_ylabel(f"speed-up over {BASELINE} (dashed: bound)")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _bits(c: Comparison) -> float:
    return bits_per_second(c.row.rate)
