"""Compile, check and time one collective under several compressions, in turns so that noise hits all alike.

Sizes are nccl-tests': of the larger one of a device's operand and result, in bf16. The exact result is NumPy's, in
float64, of values that every process draws again for itself.
"""

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import taco_jax
from experiments.communication import CommunicationMismatch
from experiments.compiler_options import step_options
from experiments.hlo import read_collectives
from experiments.planned import planned_collectives
from taco_jax.scales import ALPHA, FORWARD, alpha_for

AXIS = "tp"
OPERATIONS = ("psum", "psum_scatter", "all_gather", "all_to_all", "ppermute")
NOT_SERVED = "lax.psum_scatter between processes does not end on XLA:CPU"
_BYTES_IN_A_ROW = 16 * 2**20
_MAX_CALLS = 20


@dataclass(frozen=True)
class Row:
    """One operation of one compression on a tensor of `size` bytes per device.

    Attributes:
        operation, compression: names; `none` is `jax.lax`.
        size: bytes of the bf16 tensor.
        skipped: why nothing was measured, else empty.
        seconds: median of a call.
        algorithm_gb_per_s: size by seconds.
        bus_gb_per_s: that times `bus_factor`.
        wire_bytes: bytes that leave one device per call, read from the compiled program.
        ratio: bytes that bf16 would send by `wire_bytes`.
        snr_db: of the result against the exact one; None if they are equal, or the result is not finite.
        exact: whether they are equal.
        speedup: seconds of `none` by seconds; None without it.
    """

    operation: str
    compression: str
    size: int
    skipped: str = ""
    seconds: float | None = None
    algorithm_gb_per_s: float | None = None
    bus_gb_per_s: float | None = None
    wire_bytes: int | None = None
    ratio: float | None = None
    snr_db: float | None = None
    exact: bool = False
    speedup: float | None = None


def bus_factor(operation: str, ranks: int) -> float:
    """Return the bytes a device sends per byte of the tensor: 2(n-1)/n for psum, 1 for ppermute, else (n-1)/n."""
    return {"psum": 2 * (ranks - 1) / ranks, "ppermute": 1.0}.get(operation, (ranks - 1) / ranks)


def crossover(sizes: Sequence[tuple[int, float]]) -> int | None:
    """Return the smallest size from which on every speed-up is above 1, of (size, speed-up) pairs; None if none is."""
    found = None
    for size, speedup in sorted(sizes, reverse=True):
        if speedup <= 1:
            break
        found = size
    return found


def measure(
    mesh: Mesh, sizes: Sequence[int], operations: Sequence[str], compressions: Sequence[str], rounds: int, seed: int
) -> Iterator[list[Row]]:
    """Yield the rows of each operation on each size, the sizes in order.

    Raises:
        CommunicationMismatch: if a program does not send what its compression means to.
    """
    ranks = mesh.size
    for size in sizes:
        values = [_drawn(size // 2, seed, rank) for rank in range(ranks)]
        total = functools.reduce(np.add, (v.astype(np.float64) for v in values), np.zeros(size // 2))
        for operation in operations:
            yield _rows(_Case(mesh, operation, size, values, total), compressions, rounds)


@dataclass(frozen=True)
class _Case:
    """One operation on one size: what the ranks hold and the float64 sum of it."""

    mesh: Mesh
    operation: str
    size: int
    values: list[np.ndarray]
    total: np.ndarray

    @property
    def length(self) -> int:
        """Number of values that one device hands in."""
        return self.size // 2 // (self.mesh.size if self.operation == "all_gather" else 1)

    def operand(self) -> jax.Array:
        """Return the tensors of all ranks, each on its device."""
        sharding = NamedSharding(self.mesh, P(AXIS))

        def part(index: Any) -> np.ndarray:
            return self.values[(index[0].start or 0) // self.length][: self.length]

        return jax.make_array_from_callback((self.mesh.size * self.length,), sharding, part)

    def scales(self) -> np.ndarray:
        """Return the state of an adaptive codec that has seen these values, f32[2, 2, 5]."""
        state = np.array(taco_jax.init_scales({"": "taco"})[""])
        for hop, x in enumerate((self.values[0], self.total)):
            state[FORWARD, hop, ALPHA] = alpha_for(jnp.asarray(x, jnp.float32))
        return state

    def exact(self, rank: int) -> np.ndarray:
        """Return the exact result of a rank."""
        n, part = self.mesh.size, self.size // 2 // self.mesh.size
        own = slice(rank * part, (rank + 1) * part)
        if self.operation == "psum":
            return self.total
        if self.operation == "psum_scatter":
            return self.total[own]
        if self.operation == "ppermute":
            return self.values[(rank - 1) % n]
        parts = own if self.operation == "all_to_all" else slice(part)
        return np.concatenate([v[parts] for v in self.values])


def _drawn(length: int, seed: int, rank: int) -> np.ndarray:
    generator = np.random.default_rng((seed, length, rank))
    return generator.standard_normal(length, np.float32).astype(ml_dtypes.bfloat16)


def _program(case: _Case, compression: taco_jax.Compression) -> Any:
    n = case.mesh.size
    options = {
        "psum": {},
        "psum_scatter": {"scatter_dimension": 0, "tiled": True},
        "all_gather": {"axis": 0, "tiled": True},
        "all_to_all": {"split_axis": 0, "concat_axis": 0, "tiled": True},
        "ppermute": {"perm": [(i, (i + 1) % n) for i in range(n)]},
    }[case.operation]
    collective = getattr(taco_jax, case.operation)

    def call(x, scales):
        state = scales if compression.is_adaptive else None
        return collective(x, AXIS, compression=compression, scales=state, name="measured", **options)

    out = P() if case.operation == "psum" else P(AXIS)
    return jax.jit(jax.shard_map(call, mesh=case.mesh, in_specs=(P(AXIS), P()), out_specs=out))


def _rows(case: _Case, compressions: Sequence[str], rounds: int) -> list[Row]:
    x = case.operand()
    host_scales = case.scales()
    scales = jax.make_array_from_callback(
        host_scales.shape, NamedSharding(case.mesh, P()), lambda index: host_scales[index]
    )
    calls: dict[str, Callable[[], jax.Array]] = {}
    rows: dict[str, Row] = {}
    for name in compressions:
        # Whatever its size: the crossover is what `min_bytes` is to be.
        compression = taco_jax.Compression.named(name, min_bytes=0)
        row = Row(case.operation, name, case.size)
        if not served(case.mesh, case.operation, compression):
            rows[name] = replace(row, skipped=NOT_SERVED)
            continue
        traced = _program(case, compression).trace(x, scales)
        compiled = traced.lower().compile(compiler_options=step_options(case.mesh) or None)
        sent = sent_bytes(case, compression, name, compiled.as_text() or "", traced.jaxpr)
        snr = _snr_db(case, compiled(x, scales))
        rows[name] = replace(
            row,
            snr_db=snr if math.isfinite(snr) else None,
            exact=snr == math.inf,
            wire_bytes=sent,
            ratio=bus_factor(case.operation, case.mesh.size) * case.size / sent,
        )
        calls[name] = functools.partial(compiled, x, scales)
    seconds = _medians(calls, rounds, max(1, min(_MAX_CALLS, _BYTES_IN_A_ROW // case.size)))
    return [_timed(row, seconds, case.mesh.size) for row in rows.values()]


def served(mesh: Mesh, operation: str, compression: taco_jax.Compression) -> bool:
    """Return whether the platform runs the operation at all."""
    several = len({device.process_index for device in mesh.devices.flat}) > 1
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    return not (on_cpu and several and operation == "psum_scatter" and compression.is_exact)


def sent_bytes(case: _Case, compression: taco_jax.Compression, name: str, hlo: str, jaxpr) -> int:
    """Return the bytes that leave one device, by the compiled program.

    Raises:
        CommunicationMismatch: if a compression sends other bytes than the plan and the library's formula say.
    """
    axes = {AXIS: case.mesh.size}
    found = read_collectives(hlo, axes)
    sent = sum((c.bytes_per_step for c in found), Fraction(0))
    if compression.forward is not None:
        meant = sum((c.bytes_per_step for c in planned_collectives(jaxpr, axes)), Fraction(0))
        formula = taco_jax.wire_bytes((case.length,), compression.forward, case.mesh.size, case.operation)
        wanted = "u16" if compression.forward.value_bits == 16 else "u8"
        strays = sorted({c.dtype for c in found if c.dtype != wanted})
        if strays or not sent == meant == formula:
            raise CommunicationMismatch(
                f"{case.operation} of {case.size} bytes with {name}: the program sends {int(sent)} bytes"
                f"{' as ' + ', '.join(strays) if strays else ''}, the plan {int(meant)}, the formula {formula}"
            )
    return int(sent)


def _snr_db(case: _Case, result: jax.Array) -> float:
    """Return the ratio of signal to error in dB over the results of this process's devices."""
    ranks = {device: rank for rank, device in enumerate(case.mesh.devices.flat)}
    signal = noise = 0.0
    for shard in result.addressable_shards:
        exact = case.exact(ranks[shard.device]).astype(np.float64)
        signal += float(np.sum(np.square(exact)))
        noise += float(np.sum(np.square(np.asarray(shard.data).astype(np.float64) - exact)))
    return 10 * math.log10(signal / noise) if noise > 0 else math.nan if math.isnan(noise) else math.inf


def _medians(calls: dict[str, Callable[[], jax.Array]], rounds: int, count: int) -> dict[str, float]:
    measured: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(count):
                # XLA:CPU may run calls that overlap in another order on each device, which then wait for each other.
                jax.block_until_ready(call())
            if turn:
                measured[name].append((time.perf_counter() - start) / count)
    return {name: statistics.median(seconds) for name, seconds in measured.items()}


def _timed(row: Row, seconds: dict[str, float], ranks: int) -> Row:
    own, lax = seconds.get(row.compression), seconds.get("none")
    if own is None:
        return row
    rate = row.size / own / 1e9
    return replace(
        row,
        seconds=own,
        algorithm_gb_per_s=rate,
        bus_gb_per_s=rate * bus_factor(row.operation, ranks),
        speedup=None if lax is None else lax / own,
    )
