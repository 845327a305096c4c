"""The bodies of the Triton kernels: encode, reduce and decode one tile of whole blocks.

A tile is worked on in pieces of its columns: the upper index bits number the pieces, so that their rounds of the
butterfly need no exchange between threads, and a piece is as narrow as whole 32-byte sectors allow.

Arrays are flat and a program computes where its blocks lie, so that payload and scales of a message are read and
written in place; blocks behind the last one are masked out here, since Pallas before JAX 0.12 does not do it.

What Triton's operations do to a NaN is avoided rather than relied upon: its minimum and maximum lose it on a GPU (and
keep it interpreted). Maxima are taken of the bits of magnitudes, which are ordered like the magnitudes, NaN above all.
Its division is off by up to two units in the last place; `_divided` puts that right.
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from taco_jax import wire
from taco_jax.config import INTEGERS, Codec
from taco_jax.pallas import arithmetic, integer_casts, packing

SLOTS = 5
WARPS = 4
_PIECE = 16 * 32 * WARPS  # 16 values a thread: 16-byte accesses to the bytes, and no spills
_MAX_PIECES = 4
_MIN_WIDTH = 32


@dataclass(frozen=True)
class Tiling:
    """How `blocks` blocks, `per_row` in each row of messages, are dealt out to programs, and how they cast.

    Neighbours in a block stand `channels` values apart in the values, side by side in the messages.
    """

    codec: Codec
    blocks: int
    per_row: int
    channels: int = 1
    integer_casts: bool = False

    @property
    def rows(self) -> int:
        """Blocks of one program."""
        return _PIECE // self.width

    @property
    def width(self) -> int:
        """Columns of one piece; integer casts need registers, hence half the pieces. Packed ones are quarters."""
        if self.packed:
            return self.codec.block // packing.QUARTERS
        pieces = _MAX_PIECES // 2 if self.integer_casts else _MAX_PIECES
        return max(_MIN_WIDTH, self.codec.block // pieces)

    @property
    def packed(self) -> bool:
        """Whether a byte of the payload holds bits of several values."""
        return self.codec.value_bits < 8

    @property
    def programs(self) -> int:
        """Size of the grid."""
        return pl.cdiv(self.blocks, self.rows)

    @property
    def columns(self) -> list[slice]:
        """The columns of each piece."""
        return [slice(start, start + self.width) for start in range(0, self.codec.block, self.width)]


class _Tile:
    """Where the blocks of this program lie: f32[rows, width] pieces of values and messages, f32[rows] scales."""

    def __init__(self, tiling: Tiling):
        self.tiling, self.codec = tiling, tiling.codec
        index = pl.program_id(0) * tiling.rows + lax.iota(jnp.int32, tiling.rows)
        self.mask = index < tiling.blocks if tiling.blocks % tiling.rows else None
        row = lax.div(index, jnp.int32(tiling.per_row)) if tiling.per_row < tiling.blocks else 0
        self.values = index * self.codec.block
        if tiling.channels > 1:
            # Quotient and remainder, of which Triton knows what they are of neighbours: its accesses stay wide.
            channels = jnp.int32(tiling.channels)
            self.values = lax.div(index, channels) * (tiling.channels * self.codec.block) + lax.rem(index, channels)
        size = wire.payload_size(self.codec.block, self.codec)
        self.payload = index * size + row * (tiling.per_row * self.codec.scale_bytes)
        self.scales = (row + 1) * (tiling.per_row * size) + index * self.codec.scale_bytes

    def load_values(self, ref, columns: slice) -> jax.Array:
        return self._load(ref, self._offsets(self.values, columns, self.tiling.channels)).astype(jnp.float32)

    def load_payload(self, ref, rank: int, columns: slice) -> jax.Array:
        return _decoded(self._load(ref, self._offsets(self.payload, columns), rank), self.tiling)

    def load_packed(self, ref, rank: int) -> list[jax.Array]:
        """Return the values of all pieces."""
        bits = self.codec.value_bits
        places = (self._offsets(self.payload, columns) for columns in self._packed_columns())
        pieces = [self._load(ref, place, rank).astype(jnp.int32) for place in places]
        return [code.astype(jnp.float32) for code in packing.unpack(pieces, bits)]

    def store_values(self, ref, columns: slice, values: jax.Array) -> None:
        self._store(ref, self._offsets(self.values, columns, self.tiling.channels), values)

    def store_payload(self, ref, columns: slice, codes: jax.Array) -> None:
        self._store(ref, self._offsets(self.payload, columns), codes)

    def store_packed(self, ref, codes: list[jax.Array]) -> None:
        """Store the codes of all pieces."""
        pieces = packing.pack([code.astype(jnp.int32) for code in codes], self.codec.value_bits)
        for columns, piece in zip(self._packed_columns(), pieces, strict=True):
            self.store_payload(ref, columns, piece.astype(jnp.uint8))

    def _packed_columns(self) -> list[slice]:
        return self.tiling.columns[: packing.PIECES[self.codec.value_bits]]

    def load_scale(self, ref, rank: int) -> jax.Array:
        """Return the factors f32[rows]."""
        low, *high = (
            self._load(ref, self.scales + byte, rank).astype(jnp.int32) for byte in range(self.codec.scale_bytes)
        )
        if not high:
            scale = lax.bitcast_convert_type(low << 23, jnp.float32)
            return jnp.where(low == 255, jnp.nan, scale)
        return lax.bitcast_convert_type((high[0] << 24) | (low << 16), jnp.float32)

    def store_scale(self, ref, scale: jax.Array) -> None:
        bits = lax.bitcast_convert_type(scale, jnp.int32)
        if self.codec.scale_dtype == "e8m0":
            self._store(ref, self.scales, jnp.where(scale == scale, bits >> 23, 255).astype(jnp.uint8))
            return
        for byte in range(2):
            self._store(ref, self.scales + byte, ((bits >> (16 + 8 * byte)) & 255).astype(jnp.uint8))

    def _offsets(self, start: jax.Array, columns: slice, distance: int = 1) -> jax.Array:
        column = lax.broadcasted_iota(jnp.int32, (self.tiling.rows, self.tiling.width), 1)
        return start[:, None] + (column + columns.start) * distance

    def _load(self, ref, offsets: jax.Array, rank: int | None = None) -> jax.Array:
        place = ref.at[offsets] if rank is None else ref.at[rank, offsets]
        mask = self._mask(offsets)
        return plgpu.load(place, mask=mask, other=None if mask is None else jnp.zeros((), ref.dtype))

    def _store(self, ref, offsets: jax.Array, values: jax.Array) -> None:
        plgpu.store(ref.at[offsets], values, mask=self._mask(offsets))

    def _mask(self, offsets: jax.Array) -> jax.Array | None:
        if self.mask is None or offsets.ndim == 1:
            return self.mask
        return jnp.broadcast_to(self.mask[:, None], offsets.shape)


def encode_kernel(x_ref, alpha_ref, message_ref, seen_ref=None, *, tiling: Tiling):
    """Rotate, scale, clamp and cast: as `xla.encode`."""
    tile, codec = _Tile(tiling), tiling.codec
    seen = _Seen(tiling) if seen_ref is not None else None
    scaled = _scaled_adaptive if codec.scale == "adaptive" else _scaled_block
    pieces = scaled(tile, x_ref, alpha_ref[0], message_ref, seen)
    if seen:
        seen.write(seen_ref)
    if len(pieces) > len(tiling.columns):
        pieces = _whole(pieces, codec)
    if tiling.packed:
        tile.store_packed(message_ref, [_encoded(z, tiling) for z in pieces])
        return
    for columns, z in zip(tiling.columns, pieces, strict=True):
        tile.store_payload(message_ref, columns, _encoded(z, tiling))


def _scaled_adaptive(tile: _Tile, x_ref, alpha, message_ref, seen) -> list[jax.Array]:
    """Return what is to be cast, in halves of pieces: the observation need not join them, which moves values about."""
    codec, pieces = tile.codec, []
    for columns in tile.tiling.columns:
        source = tile.load_values(x_ref, columns)
        pieces.append(_clamp(source * alpha, arithmetic.BEFORE_ROTATION, jnp.abs(source) < jnp.inf))
        if seen:
            seen.add_source(source)
    pieces = [z * arithmetic.norm(codec) for z in _rotate(pieces, codec)]
    if seen:
        for z in pieces:
            seen.add_signal(z)
            seen.add_code(z, None)
    return pieces


def _scaled_block(tile: _Tile, x_ref, alpha, message_ref, seen) -> list[jax.Array]:
    """Return what is to be cast, and store the scales."""
    codec, pieces = tile.codec, []
    for columns in tile.tiling.columns:
        pieces.append(tile.load_values(x_ref, columns))
        if seen:
            seen.add_source(pieces[-1])
            seen.add_signal(pieces[-1] * alpha)
    amax = _amax(pieces)
    up, down = arithmetic.power_of_two(amax)
    pieces = _whole(_rotate([source * down[:, None] for source in pieces], codec), codec)
    quotient = _divided(_amax(pieces) * arithmetic.norm(codec), codec.qmax)
    scale = arithmetic.block_scale(quotient, up, amax, codec)
    factor = _divided(arithmetic.norm(codec), scale * down)
    tile.store_scale(message_ref, scale)
    pieces = [y * factor[:, None] for y in pieces]
    if seen:
        for z in pieces:
            seen.add_code(z, scale * alpha)
    return pieces


def reduce_kernel(messages_ref, alpha_ref, message_ref, seen_ref=None, *, tiling: Tiling):
    """Add the ranks' codes and encode the sum, without a transform: as `xla.reduce`."""
    tile, codec = _Tile(tiling), tiling.codec
    seen = _Seen(tiling) if seen_ref is not None else None
    totals: list[jax.Array] = []
    if codec.scale == "block":
        ranks, unit, inverse = _rank_factors(tile, messages_ref)
        totals = _sums(tile, messages_ref, ranks)
        amax = _amax(totals)
        after = arithmetic.block_scale(_divided(amax, codec.qmax), unit, amax, codec)
        ratio = after * inverse
        factor = _divided(1.0, jnp.where(ratio < arithmetic.MIN_SCALE, arithmetic.MIN_SCALE, ratio))[:, None]
        whole, unit = jnp.minimum(unit * alpha_ref[1], arithmetic.OBSERVED)[:, None], after * alpha_ref[1]
        tile.store_scale(message_ref, after)
    else:
        factor = _power_of_two(jnp.clip(_exponent(alpha_ref[1]) - _exponent(alpha_ref[0]), -126, 100))
        whole, unit = factor, None
    packed = []
    for i, columns in enumerate(tiling.columns):
        total = totals[i] if totals else _sum(tile, messages_ref, columns, None)
        z = total * factor
        codes = _encoded(z, tiling)
        if tiling.packed:
            packed.append(codes)
        else:
            tile.store_payload(message_ref, columns, codes)
        if seen:
            seen.add_source(total)
            seen.add_signal(total * whole)
            seen.add_code(z, unit)
    if packed:
        tile.store_packed(message_ref, packed)
    if seen:
        seen.write(seen_ref)


def decode_kernel(messages_ref, alpha_ref, *refs, tiling: Tiling, summed: bool):
    """Add the ranks' codes, un-rotate, unscale and cast: as `xla.decode_sum`, or `xla.decode` of one message.

    Refs are the residual, if there is one, and the result.
    """
    *residual_ref, x_ref = refs
    tile, codec = _Tile(tiling), tiling.codec
    if codec.scale == "adaptive":
        factors, scale = None, _power_of_two(-_exponent(alpha_ref[0]))
    elif summed:
        factors, unit, _ = _rank_factors(tile, messages_ref)
        scale = unit[:, None]
    else:
        factors, scale = None, tile.load_scale(messages_ref, 0)[:, None]
    # As in `xla`: neither factor may underflow with a scale of 2^-126.
    ahead = 2.0 ** math.floor(math.log2(arithmetic.norm(codec)))
    pieces = [total * ahead for total in _sums(tile, messages_ref, factors)]
    limit = float(jnp.finfo(x_ref.dtype).max)
    for columns, t in zip(tiling.columns, _whole(_rotate(pieces, codec), codec), strict=True):
        value = t * (arithmetic.norm(codec) / ahead) * scale
        value = _clamp(value, limit, value == value)
        for ref in residual_ref:
            value = value + tile.load_values(ref, columns)
        tile.store_values(x_ref, columns, value.astype(x_ref.dtype))


def _rank_factors(tile: _Tile, ref) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """Return the ranks' scales over the power of two below the largest, that power and its inverse."""
    scales = [tile.load_scale(ref, rank) for rank in range(ref.shape[0])]
    largest = functools.reduce(jnp.maximum, (lax.bitcast_convert_type(s, jnp.int32) for s in scales))
    unit, inverse = arithmetic.power_of_two(lax.bitcast_convert_type(largest, jnp.float32))
    return [s * inverse for s in scales], unit, inverse


def _sums(tile: _Tile, ref, factors: list[jax.Array] | None) -> list[jax.Array]:
    """Return `_sum` of all pieces."""
    if not tile.tiling.packed:
        return [_sum(tile, ref, columns, factors) for columns in tile.tiling.columns]
    totals: list[jax.Array] = []
    for rank in range(ref.shape[0]):
        parts = tile.load_packed(ref, rank)
        if factors is not None:
            parts = [part * factors[rank][:, None] for part in parts]
        totals = [a + b for a, b in zip(totals, parts, strict=True)] if totals else parts
    return totals


def _sum(tile: _Tile, ref, columns: slice, factors: list[jax.Array] | None) -> jax.Array:
    """Return the f32 sum of the ranks' codes, times their factors, in rank order."""
    parts = (tile.load_payload(ref, rank, columns) for rank in range(ref.shape[0]))
    if factors is not None:
        parts = (part * factor[:, None] for part, factor in zip(parts, factors, strict=True))
    return functools.reduce(jnp.add, parts)


def _amax(pieces: list[jax.Array]) -> jax.Array:
    """Return max |x| over the columns of all pieces, f32[rows], NaN if one is."""
    bits = (lax.bitcast_convert_type(jnp.abs(piece), jnp.int32) for piece in pieces)
    return lax.bitcast_convert_type(jnp.max(functools.reduce(jnp.maximum, bits), axis=1), jnp.float32)


def _divided(numerator, divisor) -> jax.Array:
    """Return numerator / divisor, correctly rounded, for divisors of at most 12 significant bits.

    The quotient's upper and lower halves times such a divisor are exact, hence so is the remainder; what it adds moves
    the quotient to its nearest neighbour. No quotient lies near enough to a tie for the correction's own error.
    """
    inverse = 1.0 / divisor
    quotient = numerator * inverse
    upper = lax.bitcast_convert_type(lax.bitcast_convert_type(quotient, jnp.int32) & -0x1000, jnp.float32)
    remainder = (numerator - upper * divisor) - (quotient - upper) * divisor
    return quotient + remainder * inverse


def _rotate(pieces: list[jax.Array], codec: Codec) -> list[jax.Array]:
    """`hadamard.rotate` of rows cut into pieces; returns halves of pieces, or the pieces without a transform."""
    if not codec.hadamard:
        return pieces
    halves = [half for piece in pieces for half in _rotate_piece(piece)]
    distance = 2
    while distance < len(halves):
        pairs = [(halves[i & ~distance], halves[i | distance]) for i in range(len(halves))]
        halves = [a - b if i & distance else a + b for i, (a, b) in enumerate(pairs)]
        distance *= 2
    return halves


def _whole(halves: list[jax.Array], codec: Codec) -> list[jax.Array]:
    """Return the pieces that `_rotate` left in halves."""
    if not codec.hadamard:
        return halves
    return [_joined(*both) for both in zip(halves[::2], halves[1::2], strict=True)]


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


def _encoded(z: jax.Array, tiling: Tiling) -> jax.Array:
    """Return the bytes of values, clamped to the format's range and rounded once."""
    codec = tiling.codec
    if codec.format in INTEGERS:
        # Added to 1.5 * 2^23 a value is rounded to an integer, ties to even, that the lowest bits hold; NaN gives 0.
        z = jnp.where(z == z, jnp.clip(z, -codec.qmax, codec.qmax), 0.0) + 1.5 * 2.0**23
        return (lax.bitcast_convert_type(z, jnp.int32) & 255).astype(jnp.uint8)
    if tiling.integer_casts:
        return integer_casts.encode(z, codec.format)
    z = _clamp(z, codec.qmax, z == z).astype(arithmetic.FORMAT_DTYPE[codec.format])
    return lax.bitcast_convert_type(z, jnp.uint8)


def _decoded(payload: jax.Array, tiling: Tiling) -> jax.Array:
    """Return the f32 values of bytes."""
    if tiling.integer_casts and tiling.codec.format not in INTEGERS:
        return integer_casts.decode(payload, tiling.codec.format)
    return lax.bitcast_convert_type(payload, arithmetic.FORMAT_DTYPE[tiling.codec.format]).astype(jnp.float32)


def _exponent(alpha: jax.Array) -> jax.Array:
    """Return log2 of a power of two; exact, which Triton's division is not."""
    return (lax.bitcast_convert_type(alpha, jnp.int32) >> 23) - 127


def _power_of_two(exponent: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


class _Seen:
    """The observation of one tile (`xla._observe`), added up value by value before one sum over the threads.

    Blocks behind the last one are loaded as zeros, which count for nothing.
    """

    def __init__(self, tiling: Tiling):
        self.tiling, self.codec = tiling, tiling.codec
        self.parts: dict[str, jax.Array] = {}

    def add_source(self, source: jax.Array) -> None:
        self._count("nonzero", source != 0)
        self._count("nonfinite", ~(jnp.abs(source) < jnp.inf))

    def add_signal(self, signal: jax.Array) -> None:
        limit = self.codec.qmax if self.codec.scale == "adaptive" else arithmetic.OBSERVED
        self._add("squares", _square(jnp.clip(signal, -limit, limit), jnp.abs(signal) < jnp.inf))

    def add_code(self, z: jax.Array, unit: jax.Array | None) -> None:
        """Add what is cast; `unit` f32[rows] times z is in units of the signal."""
        error = jnp.clip(z, -arithmetic.OBSERVED, arithmetic.OBSERVED) - _decoded(_encoded(z, self.tiling), self.tiling)
        if unit is not None:
            error = error * jnp.minimum(unit, arithmetic.OBSERVED)[:, None]
        self._add("noise", _square(error, (z == z) & (jnp.abs(error) < jnp.inf)))
        self._count("saturated", jnp.abs(z) > self.codec.qmax * arithmetic.SATURATED)

    def write(self, seen_ref) -> None:
        # Flat, so that each thread adds all it holds before threads exchange anything.
        total = {name: jnp.sum(part.reshape(-1)) for name, part in self.parts.items()}
        squares = jnp.maximum(total["squares"], total["nonzero"] * arithmetic.UNDERFLOW**2)
        for slot, value in enumerate((squares, 0.0, total["saturated"], total["nonfinite"], total["noise"])):
            seen_ref[slot] = value

    def _count(self, name: str, which: jax.Array) -> None:
        self._add(name, which.astype(jnp.float32))

    def _add(self, name: str, part: jax.Array) -> None:
        self.parts[name] = self.parts[name] + part if name in self.parts else part


def _square(x: jax.Array, keep: jax.Array) -> jax.Array:
    return jnp.where(keep, x * x, 0.0)
