"""Read the collectives of a compiled program from its optimised HLO text, and how often each runs per step.

The text prints a loop body once, so the counts are products of the trip counts that XLA recorded; asynchronous forms
(`-start`/`-done`, wrapped computations, fusions around a collective) count once.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from experiments.traffic import Collective, axis_label, combined_names, element_bits

_OPS = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
_UNCOUNTABLE = ("ragged-all-to-all", "collective-broadcast", "send", "recv")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{\s*$")
# The type is a word or a tuple that may hold tuples and comments such as /*index=5*/.
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_CALLEES = re.compile(
    r"\b(calls|to_apply|body|condition|branch_computations|true_computation|false_computation|called_computations)"
    r"=(\{[^}]*\}|%?[\w.\-]+)"
)
_TRIP_COUNT = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_OPERAND = re.compile(r"%([\w.\-]+)")
FREE_OPCODES = frozenset({
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "add-dependency", "domain",
})  # fmt: skip
"""What names or arranges buffers and starts nothing on a device."""
_SHARE_OR_COND = re.compile(r"share\.(\d+)\.(\d+)|(?<=/)(cond)(?=/|$)")


@dataclass(frozen=True)
class Instruction:
    """One line of HLO; `rest` is what follows the opening parenthesis: operands, then attributes."""

    name: str
    type: str
    opcode: str
    rest: str

    @property
    def op_name(self) -> str:
        """Path of named scopes and transformations that led to it."""
        match = _OP_NAME.search(self.rest)
        return match.group(1) if match else ""

    @cached_property
    def operands(self) -> list[str]:
        """Names of the operands, in order."""
        depth, end = 1, 0
        while depth and end < len(self.rest):
            depth += {"(": 1, ")": -1}.get(self.rest[end], 0)
            end += 1
        return _OPERAND.findall(self.rest[:end])

    @cached_property
    def callees(self) -> list[tuple[str, str]]:
        """(attribute, computation) pairs; a quoted string may contain anything and is skipped."""
        plain = _STRING.sub('""', self.rest)
        return [(kind, name) for kind, names in _CALLEES.findall(plain) for name in re.findall(r"[\w.\-]+", names)]

    @property
    def communication(self) -> str | None:
        """The communication that this instruction itself is or starts, None for one that only calls it."""
        op = self.opcode.removesuffix("-start")
        if op not in _OPS and op not in _UNCOUNTABLE:
            return None
        return None if any(kind == "calls" for kind, _ in self.callees) else op


def read_collectives(hlo_text: str, mesh_axes: Mapping[str, int]) -> list[Collective]:
    """Return every collective that moves data, from the text of a compiled program.

    A collective inside `conditional` counts fully unless the branch was written in a named scope `share.<a>.<b>`, which
    states that it runs in a of b iterations. Instructions that XLA combined come back as the messages they carry.

    Args:
        hlo_text: `compiled.as_text()`, from CPU or GPU, scheduled or not.
        mesh_axes: axis name -> size, in the row-major order of the devices.

    Returns:
        Collectives in the order of the program, without those whose group is a single device.

    Raises:
        ValueError: a loop around a collective has no known trip count, a device does not exist in the mesh, the text
            has no entry computation, or a kind of communication occurs that cannot be counted.
    """
    return _Program(hlo_text, mesh_axes).collectives()


class _Program:
    """The computations of one HLO module."""

    def __init__(self, text: str, mesh_axes: Mapping[str, int]):
        self.mesh_axes = mesh_axes
        self.entry, self.computations = parse_module(text)
        self._reaches: dict[str, bool] = {}

    def collectives(self) -> list[Collective]:
        return list(self._visit(self.entry, Fraction(1), ()))

    def _communicates(self, name: str) -> bool:
        if name not in self._reaches:
            self._reaches[name] = any(
                i.communication or any(self._communicates(c) for _, c in self._callees(i))
                for i in self.computations[name]
            )
        return self._reaches[name]

    def _callees(self, instruction: Instruction) -> list[tuple[str, str]]:
        # `-update` and `-done` repeat the computation that `-start` runs.
        if instruction.opcode.endswith(("-done", "-update")):
            return []
        return [(kind, name) for kind, name in instruction.callees if name in self.computations]

    def _visit(self, name: str, count: Fraction, conditionals: tuple[str, ...]) -> Iterator[Collective]:
        types = {i.name: i.type for i in self.computations[name]}
        for instruction in self.computations[name]:
            if instruction.communication:
                yield from self._messages(instruction, types, count, conditionals)
                continue
            for kind, callee in self._callees(instruction):
                if not self._communicates(callee):
                    continue
                inside = count * trip_count(instruction, kind) if instruction.opcode == "while" else count
                branch = (instruction.op_name,) if instruction.opcode == "conditional" else ()
                yield from self._visit(callee, inside, conditionals + branch)

    def _messages(
        self, instruction: Instruction, types: dict[str, str], count: Fraction, conditionals: tuple[str, ...]
    ) -> Iterator[Collective]:
        op = instruction.communication
        assert op
        if op in _UNCOUNTABLE:
            raise ValueError(f"cannot count the bytes of {op} %{instruction.name}")
        groups = _groups(instruction, math.prod(self.mesh_axes.values()))
        axes = _spanned(groups, self.mesh_axes)
        if not axes:
            return
        axis = axis_label(axes, self.mesh_axes)
        size = math.prod(self.mesh_axes[a] for a in axes) if op == "collective-permute" else len(groups[0])
        count = count * _branch_share((*conditionals, instruction.op_name))
        for op_name, operands in _messages_of(instruction.op_name, _operands(instruction, types)):
            yield Collective(op, axis, size, operands, count, op_name, groups, instruction=instruction.name)


def parse_module(text: str) -> tuple[str, dict[str, list[Instruction]]]:
    """Return the name of the entry computation, and the instructions of every computation in the order of the text.

    Raises:
        ValueError: if there is no entry computation.
    """
    entry, body = "", None
    computations: dict[str, list[Instruction]] = {}
    for line in text.splitlines():
        if line.startswith("}"):
            body = None
        elif body is None:
            if header := _HEADER.match(line):
                body = computations.setdefault(header.group(2), [])
                entry = header.group(2) if header.group(1) else entry
        elif match := _INSTRUCTION.match(line):
            name, type_, opcode, rest = match.groups()
            body.append(Instruction(name, type_, opcode, rest))
    if not entry:
        raise ValueError("this is not the text of a compiled program: it has no ENTRY computation")
    return entry, computations


def array_sizes(type_: str) -> list[tuple[str, int]]:
    """Return (element type, bytes) of each array in the text of a type; tokens and the like are left out."""
    sizes = []
    for dtype, dimensions in _ARRAY.findall(type_):
        bits = element_bits(dtype)
        if bits is not None:
            elements = math.prod(int(d.removeprefix("<=")) for d in dimensions.split(",") if d)
            sizes.append((dtype, elements * bits // 8))
    return sizes


def array_bytes(type_: str) -> int:
    """Return the bytes of all arrays in the text of a type."""
    return sum(size for _, size in array_sizes(type_))


def _operands(instruction: Instruction, types: dict[str, str]) -> tuple[tuple[str, int], ...]:
    sizes = [size for name in instruction.operands for size in array_sizes(types[name])]
    if not sizes:
        raise ValueError(f"%{instruction.name} has no array operand: {', '.join(instruction.operands)}")
    return tuple(sizes)


def _messages_of(op_name: str, operands: tuple[tuple[str, int], ...]) -> list[tuple[str, tuple[tuple[str, int], ...]]]:
    """Undo a combination: its operands stand in the order of its names."""
    names = combined_names(op_name)
    if len(names) == len(operands):
        return [(name, (operand,)) for name, operand in zip(names, operands, strict=True)]
    return [(op_name, operands)]


def trip_count(loop: Instruction, kind: str) -> int:
    """Return how often a loop that contains a collective runs its computation `kind`, `body` or `condition`.

    Raises:
        ValueError: if XLA does not know.
    """
    match = _TRIP_COUNT.search(loop.rest)
    if not match:
        raise ValueError(
            f"the loop %{loop.name} ({loop.op_name or 'no op_name'}) contains a collective, "
            "but XLA does not know its trip count"
        )
    return int(match.group(1)) + (kind == "condition")


def _branch_share(paths: tuple[str, ...]) -> Fraction:
    """Multiply the shares of the enclosing branches, given the paths of the conditionals and of the collective.

    Paths nest: each lists the shares of the conditionals around it, so that the longest list is the whole truth. The
    collective's own path stands in for a conditional whose metadata XLA dropped; a conditional that XLA removed counts
    no more, which is why no more shares apply than conditionals remain.
    """
    conditionals = len(paths) - 1
    longest = max((_shares(path) for path in paths), key=len)
    return math.prod(longest[-conditionals:], start=Fraction(1)) if conditionals else Fraction(1)


def _shares(path: str) -> list[Fraction]:
    """List the shares in a path that belong to a `cond`: the last one before it."""
    shares, pending = [], None
    for numerator, denominator, cond in _SHARE_OR_COND.findall(path):
        if not cond:
            pending = Fraction(int(numerator), int(denominator))
        elif pending is not None:
            shares.append(pending)
            pending = None
    return shares


def _groups(instruction: Instruction, devices: int) -> tuple[tuple[int, ...], ...]:
    attributes = instruction.rest
    pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", attributes)
    explicit = pairs or re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", attributes)
    if explicit:
        groups = tuple(_integers(group) for group in re.findall(r"\{([\d,]+)\}", explicit.group(1)))
        if not pairs and not groups:
            groups = (tuple(range(devices)),)
    elif iota := re.search(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", attributes):
        order = _iota(iota.group(2))
        size = _integers(iota.group(1))[-1]
        groups = tuple(order[start : start + size] for start in range(0, len(order), size))
    elif mesh := re.search(r"replica_groups=mesh\[(.*?)\](?:,? ?device_ids=\((.*?\)?)\))? \{(.*?)\}", attributes):
        groups = _mesh_groups(*mesh.groups())
    else:
        raise ValueError(f"cannot read the replica groups of %{instruction.name}: {attributes[:200]}")
    if any(device >= devices for group in groups for device in group):
        raise ValueError(f"%{instruction.name} names a device outside the mesh of {devices} devices: {groups}")
    return groups


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def _iota(text: str) -> tuple[int, ...]:
    """Expand `[dims]` or `[dims]T(permutation)`: row-major numbers, transposed."""
    dims, _, permutation = text.partition("T")
    sizes = _integers(dims.strip("[]"))
    return _transposed(tuple(range(math.prod(sizes))), sizes, _integers(permutation.strip("()")) or range(len(sizes)))


def _transposed(values: tuple[int, ...], sizes: tuple[int, ...], permutation) -> tuple[int, ...]:
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    indices = itertools.product(*(range(sizes[p]) for p in permutation))
    return tuple(values[sum(i * strides[p] for i, p in zip(index, permutation, strict=True))] for index in indices)


def _mesh_groups(mesh: str, device_ids: str | None, axes: str) -> tuple[tuple[int, ...], ...]:
    """Expand `'a'=2,'b'=4` and `'a','b':(2)2`: a sub-axis :(m)k is the k-fold factor after the leading m."""
    sizes = {name: int(size) for name, size in re.findall(r"'?(\w+)'?=(\d+)", mesh)}
    chosen = [(n, int(m or 1), int(k or 0)) for n, m, k in re.findall(r"'?(\w+)'?(?::\((\d+)\)(\d+))?", axes)]
    factors: list[int] = []
    positions: dict[tuple[str, int], int] = {}
    for name, size in sizes.items():
        # Cut each axis at the borders of its chosen sub-axes, so that a group is a product of whole factors.
        borders = {1, size}
        for n, m, k in chosen:
            if n == name:
                borders |= {m, m * (k or size)}
        cuts = sorted(borders)
        for low, high in itertools.pairwise(cuts):
            positions[name, low] = len(factors)
            factors.append(high // low)
    inner = [
        positions[key]
        for name, m, k in chosen
        for key in sorted(positions)
        if key[0] == name and m <= key[1] < m * (k or sizes[name])
    ]
    outer = [i for i in range(len(factors)) if i not in inner]
    total = math.prod(sizes.values())
    if device_ids is None:
        order = tuple(range(total))
    else:
        order = _iota(device_ids) if device_ids.startswith("[") else _integers(device_ids)
    flat = _transposed(order, tuple(factors), outer + inner)
    size = math.prod(factors[i] for i in inner)
    return tuple(flat[start : start + size] for start in range(0, total, size))


def _spanned(groups: tuple[tuple[int, ...], ...], mesh_axes: Mapping[str, int]) -> set[str]:
    """Return the axes along which a member of a group differs from its first member."""
    sizes = tuple(mesh_axes.values())
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    axes = set()
    for group in groups:
        for device in group[1:]:
            for name, stride, size in zip(mesh_axes, strides, sizes, strict=True):
                if (device // stride) % size != (group[0] // stride) % size:
                    axes.add(name)
    return axes
