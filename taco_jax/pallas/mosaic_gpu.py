"""The codec of the preset `taco` as three Pallas kernels (Mosaic GPU) for NVIDIA Hopper, capability 9.x.

Each kernel walks tiles of rows: TMA brings the next ones into shared memory while one is worked on and takes the
results away; a few hundred programs share the tiles. Encode reads 2 bytes a value and writes 1, reduce reads n and
writes 1, decode reads 1 and writes 2; the observation leaves encode and reduce as five sums per program.

The rotation is a matrix product with the Hadamard matrix in bf16 on the tensor cores (wgmma), accumulated in f32.
- Exact: alpha x in bf16 (alpha is a power of two; below 2^-126 it rounds, far below e4m3's smallest step), the entries
  of H, the products, and decoded e4m3 values in bf16 (4 significant bits). Hence integers whose sums fit the
  accumulator give the bytes of `xla`.
- Rounded: the additions in the accumulator, in the hardware's order; then as in `xla` B^-1/2 in f32 and one cast.
  The tolerance is one step in at most 1e-4 of the codes against the butterfly (none of 10^6 when interpreted).
- Codes are decoded through bf16, because wgmma adds products of e4m3 operands in fewer bits than f32.
Reduce does not rotate: its bytes are those of `xla`.

Blackwell has no wgmma. XLA cannot partition the kernels: under a `shard_map` that leaves axes automatic, use `xla`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from taco_jax import compat
from taco_jax.config import Codec
from taco_jax.hadamard import matrix
from taco_jax.pallas.arithmetic import BEFORE_ROTATION, MIN_SCALE, OBSERVED, SATURATED, UNDERFLOW, norm

try:
    from jax.experimental.pallas import mosaic_gpu as plgpu
except ImportError:  # a jaxlib without it; `unsupported_reason` says so
    plgpu = None  # type: ignore[assignment]

_MIN_JAX = (0, 12)  # 0.11.1 fails to interpret these kernels, so that no test would cover it
_BLOCK = 128
_ROWS = 64  # of a wgmma
_STAGES = 2
_PROGRAMS = 2 * 132  # two fit an SM of an H200 by their shared memory
_REDUCE_BYTES = 32 * 1024  # of one stage of all ranks' tiles
_MAX_RANKS = 256  # of a TMA box
_SWIZZLE = 128  # bytes
_SUMS = 5


def unsupported_reason(codec: Codec, dtype: DTypeLike) -> str | None:
    """Return why these kernels cannot serve the codec, or None."""
    if plgpu is None or jax.__version_info__ < _MIN_JAX:
        return f"it needs JAX {'.'.join(map(str, _MIN_JAX))}, this is {jax.__version__}"
    if (codec.format, codec.scale) != ("e4m3", "adaptive"):
        return f'it serves e4m3 with scale="adaptive", not {codec.format} with {codec.scale!r}'
    if (codec.hadamard, codec.block) != ("block", _BLOCK):
        return f'it serves hadamard="block" with blocks of {_BLOCK}, not {codec.hadamard!r} with {codec.block}'
    if codec.rounding != "nearest" or codec.signs is not None:
        return "it rounds to nearest and rotates without signs"
    if codec.layout != "hidden":
        return f'it serves layout="hidden", whose blocks one copy brings, not {codec.layout!r}'
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"its matrix product is exact for bf16 only, not for {jnp.dtype(dtype).name}"
    if axes := compat.automatic_axes():
        return f"XLA would gather the mesh axes that it partitions itself, {axes}, around every kernel"
    return None


def device_unsupported_reason(codec: Codec, compute_capability: str) -> str | None:
    """Return why a GPU cannot run these kernels, or None; `compute_capability` as JAX spells it, e.g. "9.0"."""
    try:
        capability = float(compute_capability)
    except ValueError:
        return f"it is for NVIDIA GPUs, not {compute_capability or 'this device'}"
    if not 9.0 <= capability < 10.0:
        return f"wgmma exists on compute capability 9.x only, the device has {compute_capability}"
    return None


def encode(x: jax.Array, codec: Codec, alpha: jax.Array, *, observe: bool, channels: int = 1, interpret=None):
    """Multiply by alpha, rotate, clamp and cast: reads x once and writes one byte a value.

    Args and Returns as for `xla.encode`, and:
        interpret: parameters of Pallas' GPU interpret mode, which runs on a CPU.
    """
    assert channels == 1
    kernel = functools.partial(_encode_kernel, codec=codec)
    values = x.reshape(-1, codec.block)
    outputs = _call(kernel, "taco_encode", values, alpha, jnp.uint8, _ROWS, observe, interpret)
    return outputs[0].reshape(x.shape), _total(outputs)


def decode(
    message: jax.Array,
    codec: Codec,
    alpha: jax.Array,
    dtype,
    *,
    channels: int = 1,
    residual: jax.Array | None = None,
    interpret=None,
):
    """Un-rotate, divide by alpha and cast: reads one byte a value and writes the value once. As `xla.decode`.

    A residual is not fused: XLA adds it to the values in f32, in a pass of its own.
    """
    if residual is None:
        return decode_sum(message[None], codec, alpha, dtype, channels=channels, interpret=interpret)
    x = decode_sum(message[None], codec, alpha, jnp.float32, channels=channels, interpret=interpret)
    limit = float(jnp.finfo(dtype).max)
    return (jnp.clip(x, -limit, limit) + residual.astype(jnp.float32)).astype(dtype)


def decode_sum(messages: jax.Array, codec: Codec, alpha: jax.Array, dtype, *, channels: int = 1, interpret=None):
    """Un-rotate u8[n, ..., C] and add the n values in the accumulator, in rank order. Else as `xla.decode_sum`."""
    assert channels == 1
    parts = messages.reshape(messages.shape[0], -1, codec.block)
    kernel = functools.partial(_decode_kernel, codec=codec, ranks=parts.shape[0])
    outputs = _call(kernel, "taco_decode", parts, 1.0 / alpha, dtype, _ROWS, False, interpret)
    return outputs[0].reshape(messages.shape[1:])


def reduce(messages: jax.Array, codec: Codec, alphas: jax.Array, *, observe: bool, interpret=None):
    """Add n messages in the rotated domain and cast the sum: reads n bytes and writes one. As `xla.reduce`.

    Raises:
        NotImplementedError: for more messages than one copy reads.
    """
    ranks = messages.shape[0]
    if ranks > _MAX_RANKS:
        raise NotImplementedError(f"implementation 'mosaic_gpu': it adds at most {_MAX_RANKS} messages, not {ranks}")
    parts = messages.reshape(ranks, -1, codec.block)
    rows = 16
    while rows > 2 and ranks * rows * codec.block > _REDUCE_BYTES:
        rows //= 2
    kernel = functools.partial(_reduce_kernel, codec=codec)
    ratio = jnp.clip(alphas[1] / alphas[0], MIN_SCALE, BEFORE_ROTATION)
    outputs = _call(kernel, "taco_reduce", parts, ratio, jnp.uint8, rows, observe, interpret)
    return outputs[0].reshape(messages.shape[1:]), _total(outputs)


def _call(kernel, name: str, values, factor, dtype, rows: int, observe: bool, interpret) -> list[jax.Array]:
    """Run a kernel on tiles of `rows` blocks; values are [(n,) R, block], the result is [R, block].

    XLA computes the factor, because a division in a kernel becomes an approximate reciprocal.
    """
    h = jnp.asarray(matrix(_BLOCK), jnp.bfloat16)
    values, factor, h = compat.vary_alike(values, jnp.ravel(factor), h)
    blocks = values.shape[-2]
    tiles = pl.cdiv(blocks, rows)
    programs = min(tiles, _PROGRAMS)
    plan = _Plan(rows, programs, tiles, values.shape[0] if name == "taco_decode" else 1)
    out_type = [compat.shape_like((blocks, _BLOCK), dtype, values)]
    if observe:
        out_type.append(compat.shape_like((programs, _SUMS), jnp.float32, values))
    if not blocks:
        return [compat.vary(jnp.zeros(o.shape, o.dtype), compat.varying_axes(values)) for o in out_type]

    def body(values_g, factor_g, h_g, out_g, *rest, **scratch):
        walk = functools.partial(_walk, plan, values_g, out_g)
        kernel(walk, factor_g, h_g, rest[0] if observe else None, **scratch)

    body.__name__ = name
    run = plgpu.kernel(
        body,
        out_type=tuple(out_type),
        scratch_types=_scratch(plan, values, dtype, rotates=name != "taco_reduce"),
        grid=(programs,),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(),
        interpret=interpret,
    )
    return run(values, factor, h)


class _Plan(NamedTuple):
    """Rows of a tile, programs that take every `programs`-th tile, and copies that bring one."""

    rows: int
    programs: int
    tiles: int
    parts: int

    @property
    def steps(self) -> int:
        """Tiles of the first program, which has the most."""
        return pl.cdiv(self.tiles, self.programs)


def _scratch(plan: _Plan, values: jax.Array, dtype: DTypeLike, rotates: bool) -> dict:
    """Return the shared memory: stages of what is read and written, and where a tile is rotated its operands."""
    tile = (plan.rows, _BLOCK)
    ranks = () if rotates else values.shape[:1]
    stages = min(_STAGES if values.dtype == jnp.bfloat16 or not rotates else 2 * _STAGES, plan.steps * plan.parts)
    arrays = {
        "in_s": ((stages, *ranks, *tile), values.dtype),
        "out_s": ((min(_STAGES, plan.steps), *tile), dtype),
    }
    barriers = {"loaded": plgpu.Barrier(num_barriers=stages)}
    if rotates:
        arrays |= {"h_s": ((_BLOCK, _BLOCK), jnp.bfloat16), "z_s": (tile, jnp.bfloat16)}
        barriers["h_loaded"] = plgpu.Barrier()
    memory = {
        name: plgpu.SMEM(shape, kind, transforms=_swizzled(kind) if rotates else ())
        for name, (shape, kind) in arrays.items()
    }
    return {**memory, **barriers}


def _swizzled(dtype: DTypeLike) -> tuple:
    """Return the layout that wgmma reads and that threads access without bank conflicts."""
    tiling = 8, _SWIZZLE // jnp.dtype(dtype).itemsize
    # mypy takes a method without a body for an abstract one.
    return plgpu.TilingTransform(tiling), plgpu.SwizzleTransform(_SWIZZLE)  # type: ignore[abstract]


def _walk(plan: _Plan, values_g, out_g, work, carry, in_s, out_s, loaded):
    """Work on every `programs`-th tile, with the copies of the next ones in flight.

    `work(receive, release, carry)` returns the tile's result; `receive(part)` waits for a copy, `release(part)` reuses
    its buffer, after a `commit_smem` behind the last read. TMA reads zeros behind the last row and drops writes there.
    """
    program = lax.axis_index("program")
    stages, out_stages = in_s.shape[0], out_s.shape[0]
    steps = lax.div(plan.tiles - 1 - program, plan.programs) + 1
    copies = steps * plan.parts

    def rows(step):
        return pl.ds((program + step * plan.programs) * plan.rows, plan.rows)

    def fetch(copy):
        step, part = (copy, 0) if plan.parts == 1 else (lax.div(copy, plan.parts), lax.rem(copy, plan.parts))
        if len(values_g.shape) == 2:
            source = values_g.at[rows(step)]
        elif len(in_s.shape) == 4:
            source = values_g.at[:, rows(step)]
        else:
            source = values_g.at[part, rows(step)]
        slot = lax.rem(copy, stages)
        plgpu.copy_gmem_to_smem(source, in_s.at[slot], loaded.at[slot])

    def fetch_if_any(copy):
        pl.when(copy < copies)(lambda: fetch(copy))

    for copy in range(stages):
        fetch_if_any(jnp.int32(copy))

    def body(step, carry):
        def receive(part=0):
            slot = lax.rem(step * plan.parts + part, stages)
            plgpu.barrier_wait(loaded.at[slot])
            return in_s.at[slot]

        def release(part=0):
            fetch_if_any(step * plan.parts + part + stages)

        result, carry = work(receive, release, carry)
        slot = lax.rem(step, out_stages)
        plgpu.wait_smem_to_gmem(out_stages - 1, wait_read_only=True)
        out_s[slot] = result
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_s.at[slot], out_g.at[rows(step)])
        return carry

    carry = lax.fori_loop(0, steps, body, carry)
    plgpu.wait_smem_to_gmem(0)
    return carry


def _encode_kernel(walk, alpha_g, h_g, seen_g, *, h_s, z_s, h_loaded, codec: Codec, **buffers):
    plgpu.copy_gmem_to_smem(h_g, h_s, h_loaded)
    alpha = alpha_g[0]
    plgpu.barrier_wait(h_loaded)

    def work(receive, release, seen):
        source = plgpu.load(receive(), layout=plgpu.Layout.WGMMA).astype(jnp.float32)
        z = _clamp(source * alpha, BEFORE_ROTATION, jnp.abs(source) < jnp.inf)
        z_s[...] = z.astype(jnp.bfloat16)
        plgpu.commit_smem()
        release()

        def rotate(acc):
            plgpu.wgmma(acc, z_s, h_s)
            return acc[...]

        z = pl.run_scoped(rotate, plgpu.ACC((_ROWS, _BLOCK), jnp.float32)) * norm(codec)
        if seen_g is not None:
            rows = (jnp.sum(values, axis=1) for values in _observed(source, z, codec))
            seen = tuple(map(jnp.add, seen, rows))
        return _bytes(z, codec), seen

    seen = walk(work, _nothing((_ROWS,)) if seen_g is not None else (), **buffers)
    _write(seen, seen_g)


def _decode_kernel(walk, unit_g, h_g, seen_g, *, h_s, z_s, h_loaded, codec: Codec, ranks: int, **buffers):
    plgpu.copy_gmem_to_smem(h_g, h_s, h_loaded)
    unit = unit_g[0]
    dtype = buffers["out_s"].dtype
    limit = float(jnp.finfo(dtype).max)
    plgpu.barrier_wait(h_loaded)

    def work(receive, release, carry):
        def rotate(acc):
            def add(rank, _):
                codes = plgpu.load(receive(rank), layout=plgpu.Layout.WGMMA)
                plgpu.wgmma_wait(0)
                z_s[...] = _values(codes).astype(jnp.bfloat16)
                plgpu.commit_smem()
                release(rank)
                plgpu.wgmma(acc, z_s, h_s)

            lax.fori_loop(0, ranks, add, None)
            return acc[...]

        t = pl.run_scoped(rotate, plgpu.ACC((_ROWS, _BLOCK), jnp.float32)) * norm(codec)
        return _clamp(t * unit, limit, t == t).astype(dtype), carry

    walk(work, (), **buffers)


def _reduce_kernel(walk, ratio_g, h_g, seen_g, *, codec: Codec, **buffers):
    ratio = ratio_g[0]
    out_s = buffers["out_s"]

    def work(receive, release, seen):
        payload_s = receive()
        parts = (_values(payload_s[rank]) for rank in range(payload_s.shape[0]))
        total = functools.reduce(jnp.add, parts)
        plgpu.commit_smem()
        release()
        z = total * ratio
        if seen_g is not None:
            seen = tuple(map(jnp.add, seen, _observed(total, z, codec)))
        return _bytes(z, codec), seen

    seen = walk(work, _nothing(out_s.shape[1:]) if seen_g is not None else (), **buffers)
    _write(seen, seen_g)


def _clamp(z: jax.Array, limit: float, keep: jax.Array) -> jax.Array:
    """Clip to the limit, NaN where not kept: the hardware's minimum and maximum may lose a NaN."""
    return jnp.where(keep, jnp.clip(z, -limit, limit), jnp.nan)


def _quantised(z: jax.Array, codec: Codec) -> jax.Array:
    return _clamp(z, codec.qmax, z == z).astype(jnp.float8_e4m3fn)


def _bytes(z: jax.Array, codec: Codec) -> jax.Array:
    return lax.bitcast_convert_type(_quantised(z, codec), jnp.uint8)


def _values(codes: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)


def _nothing(shape: tuple[int, ...]) -> tuple[jax.Array, ...]:
    return (jnp.zeros(shape, jnp.float32),) * 4


def _observed(source: jax.Array, z: jax.Array, codec: Codec) -> tuple[jax.Array, ...]:
    """Return squares, saturated, non-finite and squared error of each value, as `xla._observe` adds them up."""
    floor = jnp.where(source != 0, UNDERFLOW, 0.0)
    magnitude = jnp.maximum(jnp.minimum(jnp.abs(z), codec.qmax), floor)
    error = jnp.clip(z, -OBSERVED, OBSERVED) - _quantised(z, codec).astype(jnp.float32)
    return (
        jnp.where(z == z, magnitude * magnitude, 0.0),
        jnp.where(jnp.abs(z) > codec.qmax * SATURATED, 1.0, 0.0),
        jnp.where(jnp.abs(source) < jnp.inf, 0.0, 1.0),
        jnp.where(z == z, error * error, 0.0),
    )


def _write(seen: tuple, seen_g) -> None:
    if seen_g is None:
        return
    squares, saturated, nonfinite, noise = (jnp.sum(s) for s in seen)
    program = lax.axis_index("program")
    for slot, value in enumerate((squares, jnp.float32(0.0), saturated, nonfinite, noise)):
        seen_g[program, slot] = value


def _total(outputs) -> jax.Array | None:
    """Add the programs' observations."""
    return jnp.sum(outputs[1], axis=0) if len(outputs) > 1 else None
