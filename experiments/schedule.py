"""Read from the scheduled HLO of a GPU program what runs beside its messages, and how much it launches.

Where a module says `is_scheduled=true`, the order of its text is the order in which work and transfers start.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from experiments.hlo import FREE_OPCODES, Instruction, array_bytes, parse_module, read_collectives, trip_count
from experiments.traffic import Collective

_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_OUR_KERNEL = re.compile(r"(?:^|/)(taco_\w+)/[^/]+$")
_COMMUNICATION = re.compile(r"(all-|reduce-scatter|collective-|ragged-|send|recv)")
_CONTROL = {"while", "call", "conditional", "async-start"}


@dataclass(frozen=True)
class Work:
    """Something that the device is told to run.

    Attributes:
        name: of our kernel (`taco_encode`), else of the HLO instruction.
        kind: `kernel` (ours), `gemm`, `fusion`, `copy`, `loop` or `other`.
        moved_bytes: operands and results together; more than it moves where it takes a slice of an operand.
    """

    name: str
    kind: str
    moved_bytes: int


@dataclass(frozen=True)
class Transfer:
    """One instruction that sends uint8 messages, in the schedule of its computation.

    Attributes:
        messages: what it sends; several where XLA combined them.
        asynchronous: whether other work may run between its start and its end.
        beside: what starts between the two, in order.
    """

    messages: tuple[Collective, ...]
    asynchronous: bool
    beside: tuple[Work, ...]

    @property
    def count(self) -> Fraction:
        """Messages per step: each array that travels is one, also where XLA combined several."""
        return sum((m.count * len(m.operands) for m in self.messages), Fraction(0))

    @property
    def wire_bytes(self) -> Fraction:
        """Bytes that leave one device, per execution."""
        return sum((m.bytes_per_step / m.count for m in self.messages), Fraction(0))

    @property
    def cover(self) -> tuple[Work, ...]:
        """What of `beside` takes long enough to count: GEMMs, our kernels, and fusions or copies that move as much."""
        return tuple(w for w in self.beside if _is_long(w, self.wire_bytes))

    @property
    def hidden(self) -> bool:
        """Whether it travels while something else of some length runs."""
        return self.asynchronous and bool(self.cover)


def read_transfers(hlo_text: str, mesh_axes: Mapping[str, int]) -> list[Transfer]:
    """Return the transfers of uint8 messages of a scheduled GPU program, in the order of the text.

    Args:
        hlo_text: `compiled.as_text()`.
        mesh_axes: axis name -> size, in the row-major order of the devices.

    Raises:
        ValueError: if the program is not scheduled, and as for `experiments.hlo.read_collectives`.
    """
    if "is_scheduled=true" not in hlo_text.split("\n", 1)[0]:
        raise ValueError("this HLO is not scheduled, so its order says nothing about time")
    messages: dict[str, list[Collective]] = {}
    for collective in read_collectives(hlo_text, mesh_axes):
        if collective.compressed:
            messages.setdefault(collective.instruction, []).append(collective)
    module = _Module(hlo_text)
    return [transfer for name in module.computations for transfer in module.transfers(name, messages)]


def count_launches(hlo_text: str) -> Counter[str]:
    """Return how many pieces of work of each kind one step launches, collectives excluded.

    A loop body counts times its trip count, every branch of a conditional once, and a fusion or a custom call once.

    Raises:
        ValueError: if a loop has no known trip count.
    """
    module = _Module(hlo_text)
    return module.launches(module.entry)


class _Module:
    """The computations of one HLO module, for questions about launches."""

    def __init__(self, text: str):
        self.entry, self.computations = parse_module(text)

    def transfers(self, name: str, messages: Mapping[str, list[Collective]]) -> Iterator[Transfer]:
        body = self.computations[name]
        types = {i.name: i.type for i in body}
        for position, start in enumerate(body):
            sent = messages.get(start.name)
            if not sent:
                continue
            done = self._end_of(body, position)
            between = body[position + 1 : done]
            beside = tuple(work for i in between if (work := self._work(i, types)))
            yield Transfer(tuple(sent), start.opcode.endswith("-start"), beside)

    def launches(self, name: str) -> Counter[str]:
        body = self.computations[name]
        types = {i.name: i.type for i in body}
        total: Counter[str] = Counter()
        for instruction in body:
            if instruction.opcode not in _CONTROL:
                work = self._work(instruction, types)
                total.update([work.kind] if work else [])
                continue
            for attribute, callee in instruction.callees:
                # The device counts the trips of a loop whose number is known; it launches no condition.
                if callee not in self.computations or attribute == "condition":
                    continue
                times = trip_count(instruction, attribute) if instruction.opcode == "while" else 1
                for kind, count in self.launches(callee).items():
                    total[kind] += times * count
        return total

    def _end_of(self, body: list[Instruction], position: int) -> int:
        """Return the position of the `-done` of an asynchronous instruction, its own if it has none."""
        for later in range(position + 1, len(body)):
            if body[later].opcode.endswith("-done") and body[position].name in body[later].operands:
                return later
        return position

    def _work(self, instruction: Instruction, types: Mapping[str, str]) -> Work | None:
        """Return what an instruction launches; None for buffers' names, communication and the end of something."""
        opcode = instruction.opcode.removesuffix("-start")
        if opcode in FREE_OPCODES or opcode.endswith(("-done", "-update")) or _COMMUNICATION.match(opcode):
            return None
        called = [name for _, name in instruction.callees if name in self.computations]
        if opcode in ("fusion", "async") and any(self._contains(name, _COMMUNICATION) for name in called):
            return None
        moved = sum(array_bytes(types.get(name, "")) for name in instruction.operands) + array_bytes(instruction.type)
        kernel = _OUR_KERNEL.search(instruction.op_name) if opcode == "custom-call" else None
        if kernel:
            return Work(kernel[1], "kernel", moved)
        target = _TARGET.search(instruction.rest) if opcode == "custom-call" else None
        if target and re.search(r"cublas|cudnn|gemm", target[1]):
            return Work(instruction.name, "gemm", moved)
        if opcode in ("dot", "convolution") or any(self._contains(name, re.compile("dot$")) for name in called):
            return Work(instruction.name, "loop" if opcode == "while" else "gemm", moved)
        kind = {"fusion": "fusion", "copy": "copy", "while": "loop"}.get(opcode, "other")
        return Work(instruction.name, kind, moved)

    def _contains(self, name: str, opcode: re.Pattern) -> bool:
        """Return whether a computation, or one that it calls, has an instruction with such an opcode."""
        return any(
            opcode.match(i.opcode) or any(self._contains(c, opcode) for _, c in i.callees if c in self.computations)
            for i in self.computations[name]
        )


def _is_long(work: Work, wire_bytes: Fraction) -> bool:
    return work.kind in ("kernel", "gemm", "loop") or (work.kind != "other" and work.moved_bytes >= wire_bytes)
