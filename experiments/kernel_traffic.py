"""Count the bytes that a compiled program moves between kernels and device memory, from its optimised HLO text.

Every instruction outside of fusions that becomes a kernel reads its operands and writes its results, once each: what a
kernel reads again from caches is free. An operand that is only sliced counts the slices, an update in place the update.
"""

from dataclasses import dataclass

from experiments.hlo import FREE_OPCODES, Instruction, array_bytes, parse_module, trip_count

_SLICES = ("slice", "dynamic-slice", "gather")


@dataclass(frozen=True)
class Traffic:
    """Bytes of device memory read and written, and how many kernels ran."""

    read: int = 0
    written: int = 0
    kernels: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.read + other.read, self.written + other.written, self.kernels + other.kernels)

    def __mul__(self, count: int) -> "Traffic":
        return Traffic(self.read * count, self.written * count, self.kernels * count)


def read_traffic(hlo_text: str) -> Traffic:
    """Return the traffic of one run of a program, loop bodies times their trip counts.

    Args:
        hlo_text: `compiled.as_text()`, from CPU or GPU.

    Raises:
        ValueError: a loop has no known trip count, or the program has a conditional, whose branch is not known.
    """
    entry, computations = parse_module(hlo_text)
    return _traffic(entry, computations)


def _traffic(name: str, computations: dict[str, list[Instruction]]) -> Traffic:
    total, types = Traffic(), {i.name: i.type for i in computations[name]}
    for instruction in computations[name]:
        callees = [(kind, callee) for kind, callee in instruction.callees if callee in computations]
        opcode = instruction.opcode
        if opcode in FREE_OPCODES or opcode.endswith(("-done", "-update")):
            continue
        if opcode == "conditional":
            raise ValueError(f"cannot count %{instruction.name}: which branch of a conditional runs is not known")
        if opcode == "while":
            for kind, callee in callees:
                try:
                    count = trip_count(instruction, kind)
                except ValueError:
                    raise ValueError(f"cannot count %{instruction.name}: XLA does not know its trip count") from None
                total += _traffic(callee, computations) * count
        elif opcode in ("call", "async-start"):
            for _, callee in callees:
                total += _traffic(callee, computations)
        elif opcode == "fusion":
            total += _fusion(instruction, types, computations[callees[0][1]])
        else:
            total += _kernel(instruction, types)
    return total


def _kernel(instruction: Instruction, types: dict[str, str]) -> Traffic:
    operands = instruction.operands
    result = array_bytes(instruction.type)
    if instruction.opcode in _SLICES:
        return Traffic(result, result, 1)
    if instruction.opcode == "dynamic-update-slice":
        update = array_bytes(types[operands[1]])
        return Traffic(update, update, 1)
    read = sum(array_bytes(types[name]) for name in dict.fromkeys(operands))
    # The result of a started copy is a tuple of destination, source and context.
    return Traffic(read, read if instruction.opcode == "copy-start" else result, 1)


def _fusion(instruction: Instruction, types: dict[str, str], body: list[Instruction]) -> Traffic:
    by_name = {i.name: i for i in body}
    read, seen = 0, set()
    for parameter in body:
        if parameter.opcode != "parameter":
            continue
        operand = instruction.operands[int(parameter.rest.split(")")[0])]
        if operand not in seen:
            read += _fused_read(parameter, body)
            seen.add(operand)
    root = body[-1]
    results = [by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]
    return Traffic(read, sum(_fused_write(result, by_name) for result in results), 1)


def _fused_read(source: Instruction, body: list[Instruction]) -> int:
    """Return what a fused kernel reads of one operand: no more than the operand."""
    total, whole = 0, array_bytes(source.type)
    for user in body:
        operands = user.operands
        if source.name not in operands or user is source:
            continue
        if user.opcode in _SLICES and operands[0] == source.name:
            total += array_bytes(user.type)
        elif user.opcode == "bitcast":
            total += _fused_read(user, body)
        elif user.opcode != "dynamic-update-slice" or operands[0] != source.name:
            total += whole
    return min(total, whole)


def _fused_write(result: Instruction, by_name: dict[str, Instruction]) -> int:
    inner = result
    while inner.opcode == "bitcast":
        inner = by_name[inner.operands[0]]
    if inner.opcode == "dynamic-update-slice":
        return array_bytes(by_name[inner.operands[1]].type)
    return array_bytes(result.type)
