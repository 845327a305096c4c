"""List the collectives that a traced program means to run: a walk over its jaxpr, before XLA has touched it.

It reads primitives, types and named scopes only, so that it can contradict both the library's own accounting and what
XLA made of the program.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
from jax import dtypes
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from experiments.traffic import Collective, axis_label, innermost_scope

_OPS = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "all_gather_reduced": "all-gather",
    "all_to_all": "all-to-all",
    "reduce_scatter": "reduce-scatter",
    "ppermute": "collective-permute",
}
_UNCOUNTABLE = ("ragged_all_to_all", "pbroadcast", "pbroadcast_dynamic", "psend", "precv")
_SHARE = re.compile(r"share\.(\d+)\.(\d+)")


@dataclass(frozen=True)
class _Place:
    """Where the walk stands: enclosing scopes, executions per step, and the share scopes that a cond has taken."""

    axis_sizes: Mapping[str, int]
    path: str = ""
    count: Fraction = Fraction(1)
    shares_taken: int = 0


@dataclass(frozen=True)
class _Found:
    """A collective and the position, among the equations of one jaxpr, of the one that is or contains it."""

    position: int
    collective: Collective


def planned_collectives(jaxpr: Jaxpr | ClosedJaxpr, axis_sizes: Mapping[str, int]) -> list[Collective]:
    """Return every collective of a traced program, with its executions per step.

    A `cond` under a named scope `share.<a>.<b>` runs its branches in a of b iterations, the innermost such scope
    deciding; any other branch counts fully. For a uint8 message, the tensor behind it is the largest floating-point
    array that enters the message's scope and reaches it.

    Args:
        jaxpr: of the whole step, e.g. `jax.make_jaxpr(step)(...)` or `jax.jit(step).trace(...).jaxpr`.
        axis_sizes: mesh axis name -> size; collectives over axes of size 1 are left out.

    Raises:
        ValueError: a collective stands in a `while` loop, whose trip count a jaxpr does not tell, runs over an axis
            that is not in `axis_sizes`, or is of a kind that cannot be counted.
    """
    found = _walk(_open(jaxpr), _Place(axis_sizes))
    return [f.collective for f in found]


def _walk(jaxpr: Jaxpr, place: _Place) -> list[_Found]:
    found = []
    for position, eqn in enumerate(jaxpr.eqns):
        path = _path(place, eqn)
        name = eqn.primitive.name.removesuffix("_start").removeprefix("unreduced_")
        if name in _OPS:
            collective = _collective(eqn, _OPS[name], path, place)
            found += [_Found(position, collective)] if collective else []
        elif name in _UNCOUNTABLE:
            raise ValueError(f"cannot count the bytes of {eqn.primitive.name} at {path or 'the top level'}")
        for inner, inside in _inner(eqn, replace(place, path=path)):
            deeper = _walk(inner, inside) if inside.count else []
            if deeper and eqn.primitive.name == "while":
                raise ValueError(f"the while loop at {path or 'the top level'} contains a collective: use a scan")
            found += [_Found(position, f.collective) for f in deeper]
    return _with_uncompressed_bytes(jaxpr, found, place)


def _path(place: _Place, eqn: JaxprEqn) -> str:
    return "/".join(part for part in (place.path, str(eqn.source_info.name_stack)) if part)


def _open(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def _inner(eqn: JaxprEqn, place: _Place) -> Iterator[tuple[Jaxpr, _Place]]:
    if eqn.primitive.name == "scan":
        place = replace(place, count=place.count * eqn.params["length"])
    elif eqn.primitive.name == "cond":
        shares = [Fraction(int(a), int(b)) for a, b in _SHARE.findall(place.path)]
        share = shares[-1] if len(shares) > place.shares_taken else Fraction(1)
        place = replace(place, count=place.count * share, shares_taken=len(shares))
    for value in eqn.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            if isinstance(inner, Jaxpr | ClosedJaxpr):
                yield _open(inner), place


def _collective(eqn: JaxprEqn, op: str, path: str, place: _Place) -> Collective | None:
    names = eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"]
    # vmap adds positional axes, which stay on the device.
    axes = [name for name in (names if isinstance(names, tuple | list) else (names,)) if isinstance(name, str)]
    if unknown := [name for name in axes if name not in place.axis_sizes]:
        raise ValueError(f"{eqn.primitive.name} at {path} runs over {unknown}, the mesh has {list(place.axis_sizes)}")
    size = math.prod(place.axis_sizes[name] for name in axes)
    if groups := eqn.params.get("axis_index_groups"):
        size = len(groups[0])
    permutation = eqn.params.get("perm")
    if size == 1 or (permutation is not None and all(source == target for source, target in permutation)):
        return None
    operands = tuple(_type_and_bytes(variable.aval) for variable in eqn.invars)
    return Collective(op, axis_label(set(axes), place.axis_sizes), size, operands, place.count, path)


def _type_and_bytes(aval: Any) -> tuple[str, int]:
    return _hlo_dtype(aval.dtype), math.prod(aval.shape) * dtypes.itemsize_bits(aval.dtype) // 8


def _elements(variable: Var) -> int:
    aval: Any = variable.aval
    return math.prod(aval.shape)


def _hlo_dtype(dtype: np.dtype) -> str:
    """Spell a dtype as HLO does: `float8_e4m3fn` -> `f8e4m3fn`, `uint8` -> `u8`, `bool` -> `pred`."""
    name = np.dtype(dtype).name
    if name == "bool":
        return "pred"
    for prefix, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "s"), ("complex", "c")):
        if name.startswith(prefix):
            return short + name.removeprefix(prefix).replace("_", "")
    return name


def _with_uncompressed_bytes(jaxpr: Jaxpr, found: list[_Found], place: _Place) -> list[_Found]:
    """Attach to each uint8 message whose scope opens in this jaxpr the bf16 bytes of the tensor behind it.

    Messages of one scope that come from the same tensor share it: each chunk takes its part, and an all-gather beside
    an all-to-all is the second hop of an all-reduce and carries the n-th part that this device has summed.
    """
    if not any(f.collective.compressed and f.collective.uncompressed_bytes is None for f in found):
        return found
    scopes = [innermost_scope(str(eqn.source_info.name_stack)) for eqn in jaxpr.eqns]
    messages: dict[tuple[Var, str], list[int]] = {}
    for index, f in enumerate(found):
        if f.collective.compressed and f.collective.uncompressed_bytes is None and scopes[f.position]:
            source = _source(jaxpr, f.position, scopes)
            if source is not None:
                messages.setdefault((source, f.collective.op), []).append(index)
    found = list(found)
    for (source, op), indices in messages.items():
        hop_size = 1
        if op == "all-gather" and (source, "all-to-all") in messages:
            hop_size = found[indices[0]].collective.group_size
        tensor_bytes = Fraction(2 * _elements(source), hop_size) * place.count
        total = sum(found[i].collective.payload_bytes * found[i].collective.count for i in indices)
        for i in indices:
            collective = found[i].collective
            share = tensor_bytes * collective.payload_bytes / total
            found[i] = replace(found[i], collective=replace(collective, uncompressed_bytes=share))
    return found


def _source(jaxpr: Jaxpr, position: int, scopes: list[str | None]) -> Var | None:
    """Return the largest floating-point variable that enters the scope of an equation and reaches it."""
    producer = {variable: i for i, eqn in enumerate(jaxpr.eqns) for variable in eqn.outvars}
    pending, seen, entering = [position], set(), []
    while pending:
        for variable in jaxpr.eqns[pending.pop()].invars:
            if isinstance(variable, Literal) or variable in seen:
                continue
            seen.add(variable)
            before = producer.get(variable)
            if before is not None and scopes[before] == scopes[position]:
                pending.append(before)
            elif dtypes.issubdtype(getattr(variable.aval, "dtype", bool), np.floating):
                entering.append(variable)
    return max(entering, key=_elements, default=None)
