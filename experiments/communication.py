"""The communication table of a training step: what travels, how often, over which axis, and whether that was asked for.

    collectives = read_collectives(compiled.as_text(), mesh_axes)
    plan = planned_collectives(jaxpr, mesh_axes)
    check(collectives, plan, {"mlp": ("forward", "backward")}, min_bytes=65536)
    rows = communication_rows(collectives, plan)

Bytes are those that leave one device.
"""

import io
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from experiments.hlo import read_collectives
from experiments.planned import planned_collectives
from experiments.traffic import Collective

__all__ = [
    "Collective",
    "CommunicationMismatch",
    "CommunicationRow",
    "check",
    "communication_json",
    "communication_rows",
    "communication_table",
    "communication_text",
    "planned_collectives",
    "read_collectives",
]

_COLUMNS = ("axis", "op", "site", "direction", "dtype", "compressed", "count/step", "bytes/step", "bf16 bytes/step",
            "ratio")  # fmt: skip


class CommunicationMismatch(RuntimeError):
    """The compiled step does not send what the configuration asks for."""


@dataclass(frozen=True)
class CommunicationRow:
    """All messages of a step that agree in axis, op, site, direction and compression.

    Attributes:
        dtype: HLO element types that travel.
        count: messages per step; a fraction where pipeline bubbles were weighted.
        bytes_per_step: bytes that leave one device per step.
        bf16_bytes_per_step: the same messages with every floating-point tensor in bf16.
    """

    axis: str
    op: str
    site: str
    direction: str
    dtype: str
    compressed: bool
    count: int | float
    bytes_per_step: int | float
    bf16_bytes_per_step: int | float


def communication_rows(collectives: Iterable[Collective], plan: Iterable[Collective] = ()) -> list[CommunicationRow]:
    """Sum collectives into rows, sorted by axis, compressed sites first.

    Args:
        collectives: from `read_collectives`.
        plan: from `planned_collectives`; gives the size of the tensors behind uint8 messages. Without it a message is
            taken to be half of its bf16 tensor, scales included.
    """
    expansion = _bf16_per_byte(plan)
    groups = defaultdict(list)
    for collective in collectives:
        groups[_row_key(collective)].append(collective)
    rows = []
    for key, members in groups.items():
        axis, op, site, direction, compressed = key
        size = sum(c.bytes_per_step for c in members)
        bf16 = size * expansion[key] if key in expansion else sum(c.bf16_bytes_per_step for c in members)
        dtype = ",".join(sorted({dtype for c in members for dtype, _ in c.operands}))
        count = sum(c.count for c in members)
        rows.append(
            CommunicationRow(axis, op, site, direction, dtype, compressed, _number(count), _number(size), _number(bf16))
        )
    return sorted(rows, key=lambda r: (r.axis, not r.compressed, r.site == "other", r.site, r.direction, r.op))


def check(
    collectives: Sequence[Collective],
    plan: Sequence[Collective],
    configured: Mapping[str, Collection[str]],
    min_bytes: int = 0,
) -> None:
    """Raise unless the compiled step compresses what the configuration asks for, byte for byte as planned.

    Only uint8 messages are compared with the plan: XLA combines, deduplicates, widens (bf16 to f32 on CPU) and rewrites
    (all-reduce to reduce-scatter) exact collectives as it likes, so that any tolerance for them would be a guess. They
    stay visible in the table.

    Args:
        collectives: from `read_collectives`.
        plan: from `planned_collectives`.
        configured: site -> directions (`forward`, `backward`) in which it is to be compressed, of the sites whose axis
            has more than one device; empty when compression is off.
        min_bytes: operands below this size may travel exactly.

    Raises:
        CommunicationMismatch: a planned uint8 message is missing, of another size or of another type; a configured site
            does not travel as uint8; or uint8 travels although nothing is configured.
    """
    if not any(configured.values()):
        if stray := [c for c in collectives if c.compressed]:
            raise CommunicationMismatch(f"compression is off, but uint8 messages travel: {_described(stray[:1])}")
        return
    # Where XLA combined messages of several sites so that they cannot be told apart, only the axis is compared.
    combined = {c.axis for c in collectives if c.compressed and "+" in c.site + c.direction}
    travelling, planned = _by_place(collectives, combined), _by_place(plan, combined)
    for place in sorted(travelling.keys() | planned.keys()):
        found, wanted = ([c for c in side.get(place, ()) if c.compressed] for side in (travelling, planned))
        if sum(c.bytes_per_step for c in found) != sum(c.bytes_per_step for c in wanted):
            raise CommunicationMismatch(
                f"{_place_name(place)}: the plan is to send {_described(wanted)} as uint8, "
                f"the compiled step sends {_described(travelling.get(place, ()))}"
            )
    for site, directions in configured.items():
        for direction in directions:
            _require_compressed(site, direction, plan, min_bytes)
    if not any(c.compressed for c in collectives):
        raise CommunicationMismatch(
            f"compression is on, but every message is smaller than min_bytes = {min_bytes} and travels exactly"
        )


def communication_json(rows: Sequence[CommunicationRow]) -> dict[str, Any]:
    """Return the rows and their totals for communication.json: per axis, over all axes, and of the compressed sites."""
    fields = ("axis", "op", "site", "direction", "compressed", "count", "bytes_per_step", "bf16_bytes_per_step")
    return {
        "collectives": [{field: getattr(row, field) for field in fields} for row in rows],
        "totals": {
            "axes": {axis: _total([r for r in rows if r.axis == axis]) for axis in _axes(rows)},
            "all": _total(rows),
            "compressed": _total([r for r in rows if r.compressed]),
        },
    }


def communication_table(rows: Sequence[CommunicationRow]) -> Table:
    """Return a table for a terminal: one line per row, then the totals."""
    return _table(rows, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


def communication_text(rows: Sequence[CommunicationRow]) -> str:
    """Return the table as aligned Markdown, for log files and documents."""
    text = io.StringIO()
    Console(file=text, width=10_000, color_system=None).print(_table(rows, box=box.MARKDOWN))
    return "\n".join(line.strip() for line in text.getvalue().splitlines() if line.strip())


def _table(rows: Sequence[CommunicationRow], **style: Any) -> Table:
    table = Table(**style)
    for name in _COLUMNS:
        # On a narrow terminal a cell folds; an ellipsis would cut numbers.
        table.add_column(name, justify="right" if name in _COLUMNS[6:] else "left", overflow="fold")
    for row in rows:
        table.add_row(
            row.axis, row.op, row.site, row.direction, row.dtype, "yes" if row.compressed else "no",
            f"{row.count:,}" if isinstance(row.count, int) else f"{row.count:,.2f}",
            *_sizes(row.bytes_per_step, row.bf16_bytes_per_step),
        )  # fmt: skip
    totals = communication_json(rows)["totals"]
    named = [(f"all of {axis}", total) for axis, total in totals["axes"].items()]
    for name, total in [*named, ("all axes", totals["all"]), ("compressed sites", totals["compressed"])]:
        sizes = _sizes(total["bytes_per_step"], total["bf16_bytes_per_step"])
        table.add_row(name, *[""] * 6, *sizes, style="bold")
    return table


def _row_key(collective: Collective) -> tuple[str, str, str, str, bool]:
    return collective.axis, collective.op, collective.site, collective.direction, collective.compressed


def _bf16_per_byte(plan: Iterable[Collective]) -> dict[tuple[str, str, str, str, bool], Fraction]:
    """Return what a byte of each compressed message would be in bf16."""
    groups = defaultdict(list)
    for collective in plan:
        if collective.compressed:
            groups[_row_key(collective)].append(collective)
    return {
        key: sum((c.bf16_bytes_per_step for c in members), Fraction(0)) / sum(c.bytes_per_step for c in members)
        for key, members in groups.items()
    }


def _by_place(
    collectives: Iterable[Collective], combined: Collection[str]
) -> dict[tuple[str, str, str], list[Collective]]:
    places = defaultdict(list)
    for c in collectives:
        places[(c.axis, "", "") if c.axis in combined else (c.axis, c.site, c.direction)].append(c)
    return places


def _require_compressed(site: str, direction: str, plan: Sequence[Collective], min_bytes: int) -> None:
    messages = [c for c in plan if c.site == site and c.direction == direction]
    name = f"site {site!r} {direction}"
    if not messages:
        known = sorted({f"{c.site} {c.direction}" for c in plan if c.site != "other"})
        raise CommunicationMismatch(f"{name} is to be compressed, but nothing is sent there; sites: {known}")
    large = [c for c in messages if not c.compressed and max(size for _, size in c.operands) >= min_bytes]
    if large and not any(c.compressed for c in messages):
        raise CommunicationMismatch(f"{name} is to be compressed, but the step sends {_described(large)} there")


def _place_name(place: tuple[str, str, str]) -> str:
    axis, site, direction = place
    return f"site {site!r} {direction} on axis {axis}" if site else f"all sites on axis {axis}"


def _described(collectives: Iterable[Collective]) -> str:
    """Name what is sent, e.g. `all-to-all u8 1,024 bytes per step`."""
    parts = [f"{c.op} {c.dtype} {float(c.bytes_per_step):,.0f} bytes per step" for c in collectives]
    return " and ".join(dict.fromkeys(parts)) or "nothing"


def _total(rows: Sequence[CommunicationRow]) -> dict[str, Any]:
    size, bf16 = sum(r.bytes_per_step for r in rows), sum(r.bf16_bytes_per_step for r in rows)
    return {"bytes_per_step": size, "bf16_bytes_per_step": bf16, "ratio": bf16 / size if size else None}


def _axes(rows: Sequence[CommunicationRow]) -> list[str]:
    return list(dict.fromkeys(row.axis for row in rows))


def _sizes(size: float, bf16: float) -> tuple[str, str, str]:
    return _with_unit(size), _with_unit(bf16), f"{bf16 / size:.3f}" if size else "-"


def _with_unit(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def _number(value: Fraction | int) -> int | float:
    return int(value) if value == int(value) else float(value)
