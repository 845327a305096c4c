"""Time the codec's operations on a device, in turns with a copy and a cast of the tensor that they compress.

The seconds of a call are those of a row of calls, waited for once, divided by their number: below the time that the
host takes for a call (`calls` measures it with a copy of one value) they are the host's. Calls take turns on as many
operands as overflow the caches.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.kernel_programs import OPERATIONS, Program, Target, alpha_shape, compile_program, floor

_ROTATED_BYTES = 128 * 2**20
"""Of operands in all: more than the 50 MiB of an H200's second-level cache."""
_COPY_BYTES = 4
"""Per value of a copy of the bf16 tensor."""


@dataclass(frozen=True)
class Timing:
    """Median seconds of one operation on a bf16 tensor of so many MiB.

    Attributes:
        mib: size of the tensor.
        preset, operation, implementation: as in `Program`.
        seconds: of one call.
        gb_per_s: the bytes of the floor per second, whatever the program moves: comparable between implementations.
        share_of_copy: of the bytes per second of the copy that took turns with it.
        over_xla: seconds of plain jnp under jit by seconds.
        over_cast: seconds of a cast of the tensor from f32 to bf16 by seconds.
        copy_seconds, cast_seconds: of those, in the same turns.
    """

    mib: int
    preset: str
    operation: str
    implementation: str
    seconds: float
    gb_per_s: float
    share_of_copy: float
    over_xla: float
    over_cast: float
    copy_seconds: float
    cast_seconds: float


@dataclass(frozen=True)
class Effort:
    """How often: `rounds` times every program in turn, each `calls` times in a row."""

    rounds: int
    calls: int


def seconds_of_calls(target: Target, effort: Effort) -> float:
    """Return the median seconds of a call that does next to nothing: a copy of one value."""
    one = jax.device_put(jnp.zeros(1, jnp.bfloat16), NamedSharding(target.mesh, P()))
    copy = jax.jit(jnp.copy)
    return _medians({"copy": lambda _: copy(one)}, effort)["copy"]


def timings(programs: list[Program], target: Target, ranks: int, mib: int, effort: Effort) -> Iterator[Timing]:
    """Yield the timings of all programs on a bf16 tensor of `mib` MiB, one operation of one preset after the other."""
    columns = mib * 2**20 // 2 // ranks
    here = NamedSharding(target.mesh, P())
    one = jax.device_put(jnp.float32(2), here)
    wide = jax.device_put(jax.random.normal(jax.random.key(0), (ranks, columns), jnp.float32), here)
    values = _rotated(wide.astype(jnp.bfloat16))
    wide = _rotated(wide)
    copy, cast = jax.jit(jnp.copy), jax.jit(lambda x: x.astype(jnp.bfloat16))
    for preset in dict.fromkeys(p.preset for p in programs):
        encode = compile_program(Program(preset, "encode", "xla"), target, ranks, columns)
        messages = _rotated(encode(values[0], one)[0])
        for operation in OPERATIONS:
            chosen = [p for p in programs if (p.preset, p.operation) == (preset, operation)]
            operands = values if operation == "encode" else messages
            calls = {
                "copy": lambda i: copy(values[i % len(values)]),
                "cast": lambda i: cast(wide[i % len(wide)]),
            }
            for program in chosen:
                alpha = jax.device_put(jnp.full(alpha_shape(program), 2, jnp.float32), here)
                calls[program.implementation] = _call(compile_program(program, target, ranks, columns), operands, alpha)
            seconds = _medians(calls, effort)
            for program in chosen:
                yield _timing(program, mib, ranks, seconds)


def _timing(program: Program, mib: int, ranks: int, seconds: Mapping[str, float]) -> Timing:
    size = mib * 2**20 // 2
    own, copy, cast = (seconds[name] for name in (program.implementation, "copy", "cast"))
    rate = floor(program, ranks) * size / own
    return Timing(
        mib=mib,
        **vars(program),
        seconds=own,
        gb_per_s=rate / 1e9,
        share_of_copy=rate / (_COPY_BYTES * size / copy),
        over_xla=seconds["xla"] / own,
        over_cast=cast / own,
        copy_seconds=copy,
        cast_seconds=cast,
    )


def _call(compiled: jax.stages.Compiled, operands: list[jax.Array], alpha: jax.Array) -> Callable[[int], Any]:
    return lambda i: compiled(operands[i % len(operands)], alpha)


def _rotated(x: jax.Array) -> list[jax.Array]:
    return [x, *(jnp.copy(x) for _ in range(1, -(-_ROTATED_BYTES // x.nbytes)))]


def _medians(calls: Mapping[str, Callable[[int], Any]], effort: Effort) -> dict[str, float]:
    measured: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        jax.block_until_ready(call(0))
    for turn in range(effort.rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            for i in range(effort.calls):
                result = call(turn * effort.calls + i)
            jax.block_until_ready(result)
            measured[name].append((time.perf_counter() - start) / effort.calls)
    return {name: statistics.median(seconds) for name, seconds in measured.items()}
