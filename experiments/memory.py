"""What a device holds during a training step: the state, by its shardings, and the rest, as XLA assigns it.

program = step.build(config, mesh)
state = state_items(program)                      # needs no compilation
items = memory_items(program, compiled, "XLA:GPU for H200")
arrays = largest_arrays(compiled.as_text())
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from experiments.hlo import FREE_OPCODES, Instruction, array_bytes, parse_module
from experiments.step import Program

CAPACITIES = {
    "A100 80GB": 85_100_068_864,
    "H100 80GB": 84_942_979_072,
    "H200 141GB": 151_397_597_184,
    "B200 180GB": 191_514_411_008,
}
"""Bytes of memory of a device, as JAX's CUDA compiler describes them."""
PREALLOCATED = 0.75
"""Share of a GPU's memory that JAX takes unless XLA_PYTHON_CLIENT_MEM_FRACTION names another."""
SHARDINGS = "computed from the shardings"
TEMPORARIES = "activations and temporaries"

_ARRAY = re.compile(r"\b[a-z]\w*\[[\d,]*\]")
_SCOPE = re.compile(r"\b(embedding|layers|head|optimizer|gradients|scales)\b")
_CONTROL_FLOW = frozenset({"while", "conditional", "call"})


@dataclass(frozen=True)
class Item:
    """Something that each device holds.

    Attributes:
        name: what it is.
        bytes: on one device.
        source: whose figure that is.
        part_of: item that already counts these bytes; empty for one that adds to the total.
    """

    name: str
    bytes: int
    source: str
    part_of: str = ""


@dataclass(frozen=True)
class LargeArray:
    """An array that a compiled program makes, and the named scope of the step that it belongs to.

    Attributes:
        type: element type and shape on one device, as in HLO.
        bytes: on one device.
        scope: `embedding`, `layers`, `head`, `optimizer`, `gradients`, `scales` or `other`.
    """

    type: str
    bytes: int
    scope: str


def state_items(program: Program) -> list[Item]:
    """Return what the arrays that a step is given take on each device, from their shapes and shardings alone."""
    state = program.abstract_state()
    batch = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=program.batch_sharding)
        for name, x in program.abstract_batch.items()
    }
    trees = {
        "parameters": state["params"],
        "optimizer state": state["opt_state"],
        "scales": state["scales"],
        "batch": batch,
    }
    return [Item(name, _bytes_on_a_device(tree), SHARDINGS) for name, tree in trees.items()]


def memory_items(program: Program, compiled: Any, source: str) -> list[Item]:
    """Return the items of a device: those of `state_items`, then what XLA adds while the step runs.

    Args:
        program: of the step.
        compiled: the step.
        source: name for XLA's figure.
    """
    items, memory = state_items(program), compiled.memory_analysis()
    # Results that do not take the place of an argument are the step's as well.
    own = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    own += memory.generated_code_size_in_bytes
    gradients = Item("gradients", items[0].bytes, f"{SHARDINGS}: float32 like the parameters", TEMPORARIES)
    return [*items, Item(TEMPORARIES, own, source), gradients]


def total_bytes(items: Sequence[Item]) -> int:
    """Return the bytes of all items, none counted twice."""
    return sum(item.bytes for item in items if not item.part_of)


def largest_arrays(hlo_text: str, count: int = 5) -> list[LargeArray]:
    """Return the largest arrays that a compiled program makes, by type; not all are alive at once."""
    scopes: dict[str, Counter] = defaultdict(Counter)
    for instruction in _instructions(hlo_text):
        for type_ in _ARRAY.findall(instruction.type):
            scopes[type_].update(_SCOPE.findall(instruction.op_name)[:1])
    largest = sorted(scopes, key=array_bytes, reverse=True)[:count]
    return [LargeArray(t, array_bytes(t), next((s for s, _ in scopes[t].most_common(1)), "other")) for t in largest]


def memory_verdict(program: Program, items: Sequence[Item], arrays: Sequence[LargeArray]) -> str:
    """Return which item takes most of a device's memory and what would make it smaller."""
    counted = [item for item in items if not item.part_of]
    most = max(counted, key=lambda item: item.bytes)
    share = f"{most.name} take {most.bytes / max(total_bytes(items), 1):.0%} of the memory"
    if most.name != TEMPORARIES:
        return f"{share}; they are split over pp and tp, not over dp: more pp or tp makes them smaller"
    if not arrays:
        return share
    parameters = {_type_on_a_device(x) for x in jax.tree.leaves(program.abstract_state()["params"])}
    array = arrays[0]
    what, remedy = _explained(program, array, parameters)
    return f"{share}; the largest array is {array.type}, {array.bytes / 2**30:.2f} GiB, {what}: {remedy}"


def fitting(total: int, capacities: Mapping[str, int]) -> str:
    """Return how much of each device's memory a step would take."""
    parts = []
    for name, capacity in capacities.items():
        verdict = "" if total <= PREALLOCATED * capacity else " with XLA_PYTHON_CLIENT_MEM_FRACTION above 0.75"
        verdict = verdict if total <= capacity else " and does not fit"
        parts.append(f"{total / capacity:.0%} of the {capacity / 2**30:.1f} GiB of {name}{verdict}")
    return "; ".join(parts)


def _explained(program: Program, array: LargeArray, parameters: set[str]) -> tuple[str, str]:
    """Return what a large array is and what would make it smaller."""
    parallel, mesh = program.config.parallel, program.mesh.shape
    ticks = parallel.num_microbatches + mesh["pp"] - 1
    if array.type in parameters:
        return "of the size of a parameter", "more pp or tp makes it smaller"
    if array.scope == "layers" and array.type.partition("[")[2].startswith(f"{ticks},"):
        remedy = "more dp or pp, or a smaller data.batch_size, makes it smaller"
        if not parallel.remat:
            remedy = f"parallel.remat=true does away with most; {remedy}"
        return f"what the layers keep of {ticks} passes for the backward pass", remedy
    if array.scope == "layers":
        return "of one microbatch in the layers", "more parallel.num_microbatches or tp makes it smaller"
    if array.scope == "head":
        return "at the head, logits and the like", "more tp, pp or dp, or a smaller data.batch_size, makes it smaller"
    if array.scope == "embedding":
        return "at the embedding of all microbatches", "more dp or a smaller data.batch_size makes it smaller"
    return "outside the model's layers", "more dp or a smaller data.batch_size makes activations smaller"


def _instructions(hlo_text: str) -> Iterator[Instruction]:
    """Yield what has buffers of its own: nothing inside a fusion, and not what only names or passes on others'."""
    entry, computations = parse_module(hlo_text)
    waiting, seen = [entry], {entry}
    while waiting:
        for instruction in computations[waiting.pop()]:
            if instruction.opcode in _CONTROL_FLOW:
                inside = [name for _, name in instruction.callees if name in computations and name not in seen]
                waiting += inside
                seen.update(inside)
            elif instruction.opcode not in FREE_OPCODES and not instruction.opcode.endswith("-start"):
                yield instruction


def _bytes_on_a_device(tree: Any) -> int:
    return sum(x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree))


def _type_on_a_device(x: jax.ShapeDtypeStruct) -> str:
    assert x.sharding is not None
    return f"f32[{','.join(map(str, x.sharding.shard_shape(x.shape)))}]"
