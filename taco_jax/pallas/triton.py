"""The adaptive e4m3 codec as three fused Pallas kernels (Triton) for NVIDIA GPUs of sm_89 and up.

Plain jnp writes the rotated f32 values to memory and reads them again; here each hop is one pass: encode reads the
values and writes one byte each, reduce reads n bytes and writes one, decode reads one byte and writes a value.
The observation leaves encode and reduce as one row of partial sums per program.

Same contract, rounding points and additions as `taco_jax.pallas.xla`, hence the same bytes (sums of the observation
differ in order). The rotation is the butterfly of `taco_jax.hadamard` in the operations Triton has. A tile is worked on
in pieces of its columns: the upper index bits number the pieces, so that their rounds need no exchange between threads,
and a piece is as narrow as whole 32-byte sectors allow.

JAX 0.11 deprecated the backend (a DeprecationWarning when a program is lowered) and still compiles it. The kernels run
under `check_vma=True`. XLA cannot partition them: under a `shard_map` that leaves axes automatic, use `xla`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike

from taco_jax import compat
from taco_jax.config import Codec
from taco_jax.pallas.xla import _BEFORE_ROTATION, _OBSERVED, _UNDERFLOW

_SLOTS = 5
_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
_WARPS = 4
_PIECE = 16 * 32 * _WARPS  # 16 values a thread: 16-byte accesses to the bytes, and no spills
_MAX_PIECES = 4
_MIN_WIDTH = 32
_MIN_CAPABILITY = 8.9


def unsupported_reason(codec: Codec, dtype: DTypeLike) -> str | None:
    """Return why these kernels cannot serve the codec, or None."""
    if codec.format != "e4m3":
        return f"it serves the format e4m3, not {codec.format}"
    if codec.scale != "adaptive":
        return f'it serves scale="adaptive", not {codec.scale!r}'
    if jnp.dtype(dtype) not in _DTYPES:
        return f"it serves bf16, f16 and f32, not {jnp.dtype(dtype).name}"
    if axes := compat.automatic_axes():
        return f"XLA would gather the mesh axes that it partitions itself, {axes}, around every kernel"
    return None


def device_unsupported_reason(compute_capability: str) -> str | None:
    """Return why a GPU cannot run these kernels, or None; `compute_capability` as JAX spells it, e.g. "9.0"."""
    try:
        capability = float(compute_capability)
    except ValueError:
        return f"it is for NVIDIA GPUs, not {compute_capability or 'this device'}"
    if capability < _MIN_CAPABILITY:
        return f"the conversion to e4m3 needs compute capability {_MIN_CAPABILITY}, the device has {compute_capability}"
    return None


def encode(x: jax.Array, codec: Codec, alpha: jax.Array, *, observe: bool, interpret: bool = False):
    """Multiply by alpha, rotate, clamp and cast: reads x once and writes one byte a value.

    Args and Returns as for `xla.encode`, and:
        interpret: run the kernel's operations one by one on any device.
    """
    values = x.reshape(-1, codec.block)
    kernel = functools.partial(_encode_kernel, codec=codec, blocks=values.shape[0])
    outputs = _call(kernel, "taco_encode", codec, (values, alpha), jnp.uint8, observe, interpret)
    return outputs[0].reshape(x.shape), None, _total(outputs)


def decode(payload: jax.Array, scales: None, codec: Codec, alpha: jax.Array, dtype, *, interpret: bool = False):
    """Un-rotate, divide by alpha and cast: reads one byte a value and writes the value once. As `xla.decode`."""
    return decode_sum(payload[None], scales, codec, alpha, dtype, interpret=interpret)


def decode_sum(payloads: jax.Array, scales: None, codec: Codec, alpha: jax.Array, dtype, *, interpret: bool = False):
    """Decode u8[n, ..., C] and add the n values in rank order in f32. As `xla.decode_sum`."""
    assert scales is None
    parts = payloads.reshape(payloads.shape[0], -1, codec.block)
    kernel = functools.partial(_decode_kernel, codec=codec)
    outputs = _call(kernel, "taco_decode", codec, (parts, alpha), dtype, False, interpret)
    return outputs[0].reshape(payloads.shape[1:])


def reduce(
    payloads: jax.Array, scales: None, codec: Codec, alphas: jax.Array, *, observe: bool, interpret: bool = False
):
    """Add n payloads in the rotated domain and cast the sum: reads n bytes and writes one. As `xla.reduce`."""
    assert scales is None
    parts = payloads.reshape(payloads.shape[0], -1, codec.block)
    kernel = functools.partial(_reduce_kernel, codec=codec, blocks=parts.shape[1])
    outputs = _call(kernel, "taco_reduce", codec, (parts, alphas), jnp.uint8, observe, interpret)
    return outputs[0].reshape(payloads.shape[1:]), None, _total(outputs)


def _call(kernel, name: str, codec: Codec, operands, dtype, observe: bool, interpret: bool) -> list[jax.Array]:
    """Run a kernel on tiles of whole blocks; operands are [(n,) R, block] and the alphas, the result is [R, block]."""
    values, alphas = compat.vary_alike(operands[0], jnp.ravel(operands[1]))
    blocks, ranks = values.shape[-2], values.shape[:-2]
    rows = _PIECE // _width(codec)
    programs = pl.cdiv(blocks, rows)
    out_specs = [pl.BlockSpec((rows, codec.block), lambda i: (i, 0))]
    out_shape = [compat.shape_like((blocks, codec.block), dtype, values)]
    if observe:
        out_specs.append(pl.BlockSpec((None, _SLOTS), lambda i: (i, 0)))
        out_shape.append(compat.shape_like((programs, _SLOTS), jnp.float32, values))
    return pl.pallas_call(
        kernel,
        name=name,
        grid=(programs,),
        in_specs=[
            pl.BlockSpec((*ranks, rows, codec.block), lambda i: (*[0] * len(ranks), i, 0)),
            pl.BlockSpec(alphas.shape, lambda i: (0,)),
        ],
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=interpret,
    )(values, alphas)


def _total(outputs: list[jax.Array]) -> jax.Array | None:
    """Add the programs' observations."""
    return jnp.sum(outputs[1], axis=0) if len(outputs) > 1 else None


def _encode_kernel(x_ref, alpha_ref, payload_ref, seen_ref=None, *, codec: Codec, blocks: int):
    seen = _Seen(codec, blocks) if seen_ref is not None else None
    pieces = []
    for columns in _columns(codec):
        source = x_ref[:, columns].astype(jnp.float32)
        pieces.append(_clamp(source * alpha_ref[0], _BEFORE_ROTATION, jnp.abs(source) < jnp.inf))
        if seen:
            seen.add_source(source)
    if codec.hadamard:
        pieces = [z * codec.block**-0.5 for z in _rotate(pieces)]
    if seen:
        for z in pieces:
            seen.add_encoded(z)
        seen.write(seen_ref)
    _store(payload_ref, pieces, codec, lambda z: _bytes(z, codec))


def _decode_kernel(payload_ref, alpha_ref, x_ref, *, codec: Codec):
    pieces = [_sum(payload_ref, columns) for columns in _columns(codec)]
    if codec.hadamard:
        pieces = [t * codec.block**-0.5 for t in _rotate(pieces)]
    unit = _power_of_two(-_exponent(alpha_ref[0]))
    limit = float(jnp.finfo(x_ref.dtype).max)
    _store(x_ref, pieces, codec, lambda t: _clamp(t * unit, limit, t == t).astype(x_ref.dtype))


def _reduce_kernel(payload_ref, alpha_ref, out_ref, seen_ref=None, *, codec: Codec, blocks: int):
    ratio = _power_of_two(jnp.clip(_exponent(alpha_ref[1]) - _exponent(alpha_ref[0]), -126, 100))
    seen = _Seen(codec, blocks) if seen_ref is not None else None
    for columns in _columns(codec):
        total = _sum(payload_ref, columns)
        out_ref[:, columns] = _bytes(total * ratio, codec)
        if seen:
            seen.add_source(total)
            seen.add_encoded(total * ratio)
    if seen:
        seen.write(seen_ref)


def _width(codec: Codec) -> int:
    return max(_MIN_WIDTH, codec.block // _MAX_PIECES)


def _columns(codec: Codec) -> list[slice]:
    width = _width(codec)
    return [slice(start, start + width) for start in range(0, codec.block, width)]


def _store(ref, pieces: list[jax.Array], codec: Codec, convert) -> None:
    columns = _columns(codec)
    if len(pieces) > len(columns):
        pieces = [_joined(*halves) for halves in zip(pieces[::2], pieces[1::2], strict=True)]
    for place, piece in zip(columns, pieces, strict=True):
        ref[:, place] = convert(piece)


def _rotate(pieces: list[jax.Array]) -> list[jax.Array]:
    """`hadamard.rotate` of rows cut into pieces; returns the halves of the pieces.

    Joining the halves of the last round moves values between threads, which the observation does not need; the store
    does, for whole sectors.
    """
    pieces = [half for piece in pieces for half in _rotate_piece(piece)]
    distance = 2
    while distance < len(pieces):
        pairs = [(pieces[i & ~distance], pieces[i | distance]) for i in range(len(pieces))]
        pieces = [a - b if i & distance else a + b for i, (a, b) in enumerate(pairs)]
        distance *= 2
    return pieces


def _rotate_piece(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    rows, size = x.shape
    rounds = size.bit_length() - 1
    for i in range(rounds):
        even, odd = jnp.unstack(x.reshape(rows, size // 2, 2), axis=-1)
        halves = even + odd, even - odd
        if i < rounds - 1:
            x = _joined(*halves)
    return halves


def _joined(left: jax.Array, right: jax.Array) -> jax.Array:
    """Concatenate the columns, in the operations that Triton has."""
    rows, size = left.shape
    return jnp.stack([left, right], axis=-1).transpose(0, 2, 1).reshape(rows, 2 * size)


def _clamp(z: jax.Array, limit: float, keep: jax.Array) -> jax.Array:
    """Clip to the limit, NaN where not kept: Triton's minimum and maximum lose a NaN."""
    return jnp.where(keep, jnp.clip(z, -limit, limit), jnp.nan)


def _quantised(z: jax.Array, codec: Codec) -> jax.Array:
    return _clamp(z, codec.qmax, z == z).astype(jnp.float8_e4m3fn)


def _bytes(z: jax.Array, codec: Codec) -> jax.Array:
    return lax.bitcast_convert_type(_quantised(z, codec), jnp.uint8)


def _sum(payload_ref, columns: slice) -> jax.Array:
    """Return the f32 sum of the ranks' bytes in rank order."""
    ranks = payload_ref.shape[0]
    parts = (lax.bitcast_convert_type(payload_ref[r, :, columns], jnp.float8_e4m3fn) for r in range(ranks))
    return functools.reduce(jnp.add, (part.astype(jnp.float32) for part in parts))


def _exponent(alpha: jax.Array) -> jax.Array:
    """Return log2 of a power of two; exact, which Triton's division is not."""
    return (lax.bitcast_convert_type(alpha, jnp.int32) >> 23) - 127


def _power_of_two(exponent: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


class _Seen:
    """The observation of one tile (`xla._observe`), added up value by value before one sum over the threads."""

    def __init__(self, codec: Codec, blocks: int):
        self.codec, self.blocks = codec, blocks
        self.parts: dict[str, jax.Array] = {}

    def add_source(self, source: jax.Array) -> None:
        source = self._inside(source)
        self._add("nonzero", (source != 0).astype(jnp.float32))
        self._add("nonfinite", (~(jnp.abs(source) < jnp.inf)).astype(jnp.float32))

    def add_encoded(self, z: jax.Array) -> None:
        z = self._inside(z)
        limit = self.codec.qmax
        clamped = jnp.clip(z, -limit, limit)
        error = jnp.clip(z, -_OBSERVED, _OBSERVED) - _quantised(z, self.codec).astype(jnp.float32)
        self._add("squares", jnp.where(z == z, clamped * clamped, 0.0))
        self._add("noise", jnp.where(z == z, error * error, 0.0))
        self._add("saturated", (jnp.abs(z) > limit * 1.0001).astype(jnp.float32))

    def write(self, seen_ref) -> None:
        # Flat, so that each thread adds all it holds before threads exchange anything.
        total = {name: jnp.sum(part.reshape(-1)) for name, part in self.parts.items()}
        squares = jnp.maximum(total["squares"], total["nonzero"] * _UNDERFLOW**2)
        for slot, value in enumerate((squares, 0.0, total["saturated"], total["nonfinite"], total["noise"])):
            seen_ref[slot] = value

    def _add(self, name: str, part: jax.Array) -> None:
        self.parts[name] = self.parts[name] + part if name in self.parts else part

    def _inside(self, x: jax.Array) -> jax.Array:
        """Replace what lies behind the last block by zeros, which count for nothing."""
        rows = x.shape[0]
        if self.blocks % rows == 0:
            return x
        row = pl.program_id(0) * rows + lax.broadcasted_iota(jnp.int32, x.shape, 0)
        return jnp.where(row < self.blocks, x, 0.0)
