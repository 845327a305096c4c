"""The codec in plain jnp: the reference for every other implementation, and what CPU, TPU and older GPUs run.

Shapes: values f32/bf16/f16[..., C] with C a multiple of the block, messages u8[..., M] as `taco_jax.wire` lays them
out (payload u8[..., P], P = C but for packed integers, scale bytes u8[..., C / block * scale_bytes] or None), alpha
f32[] a power of two in [2^-126, 2^126].
Rounding points: one cast to the format, one rounding up of a block's scale, one cast to the output type.
`scale="paper"` has functions of its own below: as published, messages are decoded in full before they are added. bf16
messages are u16[..., C], rounded values with nothing beside them.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from taco_jax import wire
from taco_jax.config import INTEGERS, Codec
from taco_jax.hadamard import rotate, signs
from taco_jax.pallas import integer_casts, packing
from taco_jax.pallas.arithmetic import (
    BEFORE_ROTATION,
    FORMAT_DTYPE,
    MIN_SCALE,
    OBSERVED,
    SATURATED,
    UNDERFLOW,
    block_scale,
    norm,
    power_of_two,
)

_PAPER_TAU, _PAPER_EPS, _PAPER_ALPHAS = 448.0, 1e-6, (1e-3, 1e3)


def unsupported_reason(codec: Codec, dtype: jnp.dtype) -> str | None:
    """Return why this implementation cannot serve the codec, or None: it serves all."""
    return None


def encode(
    x: jax.Array, codec: Codec, alpha: jax.Array, *, observe: bool, channels: int = 1, key: jax.Array | None = None
):
    """Rotate, scale, clamp and cast.

    Args:
        x: f32/bf16/f16[..., C].
        codec: format of the message.
        alpha: f32[].
        observe: whether to return the observation.
        channels: distance of a block's neighbours in a row (`codec.encode`); the message has block after block.
        key: of `jax.random`, for stochastic rounding.

    Returns:
        message u8[..., M], and the observation f32[5] of z = alpha x (None without `observe`).
    """
    v = _blocks(_gathered(x, codec, channels).astype(jnp.float32), codec)
    if codec.scale == "none":
        return _encode_rounded(v, codec, alpha, observe)
    if codec.scale == "paper":
        return _encode_paper(v, codec, alpha, observe)
    if codec.scale == "adaptive":
        z = jnp.where(jnp.isfinite(v), jnp.clip(v * alpha, -BEFORE_ROTATION, BEFORE_ROTATION), jnp.nan)
        if codec.hadamard:
            z = _rotated(z, codec) * norm(codec)
        codes = _cast(z, codec, key)
        seen = _observe(z, z, codes, codec, 1.0, v) if observe else None
        return _payload(codes, codec), seen
    amax = _amax(v)
    up, down = power_of_two(amax)
    y = _rotated(v * down, codec) if codec.hadamard else v * down
    scale = block_scale(_amax(y) * norm(codec) / codec.qmax, up, amax, codec)
    z = y * (norm(codec) / (scale * down))
    codes = _cast(z, codec, key)
    seen = _observe(v * alpha, z, codes, codec, scale * alpha, v) if observe else None
    return wire.pack(_payload(codes, codec), _scale_bytes(scale, codec)), seen


def decode(
    message: jax.Array, codec: Codec, alpha: jax.Array, dtype, *, channels: int = 1, residual: jax.Array | None = None
) -> jax.Array:
    """Un-rotate, then unscale; finite messages give finite values of `dtype`. A residual [..., C] is added in f32."""
    payload, scales = wire.unpack(message, codec)
    if codec.scale == "paper":
        x = _decode_paper(payload, scales, codec)
    elif codec.scale == "none":
        x = _values(payload, codec)
    else:
        x = _unrotated(_values(payload, codec), codec) * _scale(scales, codec, alpha)
    x = _scattered(_rows(_clamped(x, dtype)), codec, channels)
    return (x if residual is None else x + residual.astype(jnp.float32)).astype(dtype)


def decode_sum(messages: jax.Array, codec: Codec, alpha: jax.Array, dtype, *, channels: int = 1) -> jax.Array:
    """Decode u8[n, ..., M] and add the n values in rank order in f32; result [..., C] of `dtype`."""
    payloads, scales = wire.unpack(messages, codec)
    if codec.scale == "paper":
        x = _add(_decode_paper(payloads, scales, codec))
    elif codec.scale == "none":
        x = _add(_values(payloads, codec))
    else:
        total, scale = _sum(payloads, scales, codec, alpha)
        x = _unrotated(total, codec) * scale
    return _scattered(_rows(_clamped(x, dtype).astype(dtype)), codec, channels)


def reduce(messages: jax.Array, codec: Codec, alphas: jax.Array, *, observe: bool, key: jax.Array | None = None):
    """Add n messages in the rotated domain and encode the sum again; no transform, since H is linear.

    With `scale="paper"` each message is decoded in full and the sum encoded in full: two transforms.

    Args:
        messages: u8[n, ..., M].
        codec: format of both hops.
        alphas: f32[2], of the messages and of the result.
        observe: whether to return the observation of z = alphas[1] * sum.
        key: of `jax.random`, for stochastic rounding.

    Returns:
        message u8[..., M], observation f32[5] or None.
    """
    payloads, scales = wire.unpack(messages, codec)
    if codec.scale == "none":
        return _encode_rounded(_add(_values(payloads, codec)), codec, alphas[1], observe)
    if codec.scale == "paper":
        return _encode_paper(_clamped(_add(_decode_paper(payloads, scales, codec))), codec, alphas[1], observe)
    total, scale = _sum(payloads, scales, codec, alphas[0])
    if codec.scale == "adaptive":
        z = total * jnp.clip(alphas[1] / alphas[0], MIN_SCALE, BEFORE_ROTATION)
        codes = _cast(z, codec, key)
        seen = _observe(z, z, codes, codec, 1.0, total) if observe else None
        return _payload(codes, codec), seen
    amax = _amax(total)
    # The sum itself may exceed f32 in the rotated domain; a non-finite value of any rank is in the total.
    after = block_scale(amax / codec.qmax, scale, amax, codec)
    # Sums that cancel exactly leave after / scale at zero; 0 * inf would be NaN.
    z = total * (1.0 / jnp.maximum(after / scale, MIN_SCALE))
    codes = _cast(z, codec, key)
    seen = None
    if observe:
        whole = total * jnp.minimum(scale * alphas[1], OBSERVED)
        seen = _observe(whole, z, codes, codec, after * alphas[1], total)
    return wire.pack(_payload(codes, codec), _scale_bytes(after, codec)), seen


def _blocks(x: jax.Array, codec: Codec) -> jax.Array:
    return x.reshape(*x.shape[:-1], x.shape[-1] // codec.block, codec.block)


def _gathered(x: jax.Array, codec: Codec, channels: int) -> jax.Array:
    """Return [..., C] with the values of a block side by side that stand `channels` apart."""
    return _exchanged(x, codec.block, channels)


def _scattered(x: jax.Array, codec: Codec, channels: int) -> jax.Array:
    """Undo `_gathered`."""
    return _exchanged(x, channels, codec.block)


def _exchanged(x: jax.Array, rows: int, columns: int) -> jax.Array:
    if rows == 1 or columns == 1:
        return x
    tiles = x.reshape(*x.shape[:-1], x.shape[-1] // (rows * columns), rows, columns)
    return jnp.swapaxes(tiles, -1, -2).reshape(x.shape)


def _rows(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def _amax(x: jax.Array) -> jax.Array:
    """Return max |x| over the last axis, kept, and NaN if one is: XLA:CPU's reduction drops NaN (and is slow)."""
    return _fold(jnp.abs(x), jnp.maximum)


def _fold(x: jax.Array, combine) -> jax.Array:
    """Combine the values of the last axis, kept, half with half: the same order for any shape."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = combine(x[..., :half], x[..., half:])
    return x


def _cast(z: jax.Array, codec: Codec, key: jax.Array | None = None) -> jax.Array:
    """Return the codes u8 of f32 values, one a byte; integers in two's complement."""
    z = jnp.clip(z, -codec.qmax, codec.qmax)
    if codec.rounding == "stochastic":
        z = _rounded_at_random(z, codec, key)
    if codec.format in INTEGERS:
        # A cast of NaN to an integer is undefined; the block's scale carries the NaN.
        z = jnp.where(jnp.isnan(z), 0.0, jnp.round(z))
        return lax.bitcast_convert_type(z.astype(jnp.int8), jnp.uint8)
    if codec.format == "e3m4":
        return integer_casts.encode(z, codec.format)
    # XLA:CPU's casts to and from these formats are a chain of branches for each value.
    return lax.platform_dependent(
        z,
        cpu=lambda z: integer_casts.encode(z, codec.format),
        default=lambda z: lax.bitcast_convert_type(z.astype(FORMAT_DTYPE[codec.format]), jnp.uint8),
    )


def _rounded_at_random(z: jax.Array, codec: Codec, key: jax.Array | None) -> jax.Array:
    """Return a neighbour of z in the format, the upper one with the probability of the remainder to 2^-17."""
    assert key is not None
    unit, inverse = jnp.float32(1.0), jnp.float32(1.0)
    if codec.format not in INTEGERS:
        info = jnp.finfo(FORMAT_DTYPE[codec.format])
        power, _ = power_of_two(jnp.maximum(jnp.abs(z), float(info.smallest_normal)))
        unit, inverse = power * 2.0**-info.nmant, 2.0**info.nmant / power
    steps = z * inverse
    lower = jnp.floor(steps)
    threshold = (jax.random.bits(key, z.shape, jnp.uint16).astype(jnp.float32) + 0.5) * 2.0**-16
    return (lower + (threshold < steps - lower)) * unit


def _payload(codes: jax.Array, codec: Codec) -> jax.Array:
    """Return the bytes u8[..., P] of codes u8[..., blocks, block]."""
    if codec.value_bits < 8:
        quarters = jnp.split(codes, packing.QUARTERS, axis=-1)
        codes = jnp.concatenate(packing.pack(quarters, codec.value_bits), axis=-1)
    return _rows(codes)


def _values(payload: jax.Array, codec: Codec) -> jax.Array:
    """Return the values f32[..., blocks, block] in units of the scale; inverse of `_payload` of codes."""
    if codec.value_bits >= 8:
        return _decoded(_blocks(payload, codec), codec)
    size = wire.payload_size(codec.block, codec)
    packed = payload.reshape(*payload.shape[:-1], payload.shape[-1] // size, size)
    quarters = packing.unpack(jnp.split(packed, packing.PIECES[codec.value_bits], axis=-1), codec.value_bits)
    return _decoded(jnp.concatenate(quarters, axis=-1), codec)


def _decoded(codes: jax.Array, codec: Codec) -> jax.Array:
    def cast(codes: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(codes, FORMAT_DTYPE[codec.format]).astype(jnp.float32)

    if codec.format in (*INTEGERS, "bf16"):
        return cast(codes)
    if codec.format == "e3m4":
        return integer_casts.decode(codes, codec.format)
    return lax.platform_dependent(codes, cpu=lambda codes: integer_casts.decode(codes, codec.format), default=cast)


def _rotated(x: jax.Array, codec: Codec) -> jax.Array:
    return rotate(x if codec.signs is None else x * signs(codec.block, codec.signs))


def _unrotated(q: jax.Array, codec: Codec) -> jax.Array:
    if not codec.hadamard:
        return q
    # XLA may fold the factor behind the butterfly into a scale of 2^-126, so it must not be below one; a power of
    # two ahead of it is exact.
    ahead = 2.0 ** math.floor(math.log2(norm(codec)))
    factor = norm(codec) / ahead
    return rotate(q * ahead) * (factor if codec.signs is None else factor * signs(codec.block, codec.signs))


def _clamped(x: jax.Array, dtype=jnp.float32) -> jax.Array:
    """Clip f32 to the range of `dtype`."""
    limit = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -limit, limit)


def _sum(payloads, scales, codec: Codec, alpha) -> tuple[jax.Array, jax.Array]:
    """Return (t, s) with sum of decoded = s t; unrolled, since jnp.sum over ranks is not in rank order.

    s is a power of two, so that the products are exact (8 bits times 8): fused multiply-adds change no bit.
    """
    q = _values(payloads, codec)
    scale = _scale(scales, codec, alpha)
    if codec.scale == "adaptive":
        parts, unit = q, scale
    else:
        largest = scale[0]
        for s in scale[1:]:
            largest = jnp.maximum(largest, s)
        unit, inverse = power_of_two(largest)
        parts = q * (scale * inverse)
    return _add(parts), unit


def _add(parts: jax.Array) -> jax.Array:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _encode_paper(v: jax.Array, codec: Codec, alpha: jax.Array, observe: bool):
    """Encode blocks as published: alpha_k = tau / RMS, rotate, s_k = amax / qmax, both factors sent in f32.

    Where the published formula divides zero by zero (a zero block, and one so small that s_k leaves f32's normal range)
    the codes are zeros. So they are, with s_k = 0, for a block that holds a NaN or an infinity.
    """
    sound = jnp.where(jnp.isfinite(_amax(v)), v, 0.0)
    # Clamped between product and sum here and below: a fused multiply-add would round as the program around it decides.
    mean_square = _fold(_clamped(jnp.square(sound)), jnp.add) / codec.block
    own_alpha = jnp.clip(_PAPER_TAU / jnp.sqrt(mean_square + _PAPER_EPS), *_PAPER_ALPHAS)
    z = rotate(_clamped(sound * own_alpha)) * norm(codec)
    scale = _amax(z) / codec.qmax
    scale = jnp.where(scale < MIN_SCALE, 0.0, scale)
    codes = jnp.where(scale > 0, z / jnp.where(scale > 0, scale, 1.0), 0.0)
    payload = _cast(codes, codec)
    seen = _observe(v * alpha, codes, payload, codec, scale / own_alpha * alpha, v) if observe else None
    return _pack_paper(payload, scale, own_alpha), seen


def _pack_paper(payload: jax.Array, scale: jax.Array, own_alpha: jax.Array) -> jax.Array:
    """Join codes u8[..., blocks, block] and both factors f32[..., blocks, 1] of each block."""
    factors = jnp.concatenate([scale[..., 0], own_alpha[..., 0]], axis=-1)
    return wire.pack(_rows(payload), _rows(lax.bitcast_convert_type(factors, jnp.uint8)))


def _decode_paper(payload: jax.Array, scales: jax.Array | None, codec: Codec) -> jax.Array:
    """Return the values f32[..., blocks, block]: H(q) s / (sqrt(block) alpha), s once per block since H is linear."""
    assert scales is not None
    words = scales.reshape(*scales.shape[:-1], scales.shape[-1] // 4, 4)
    scale, own_alpha = jnp.split(lax.bitcast_convert_type(words, jnp.float32), 2, axis=-1)
    # Where nothing was received (an open permutation) both factors are zero.
    own_alpha = jnp.where(own_alpha > 0, own_alpha, 1.0)
    return _clamped(_unrotated(_values(payload, codec), codec) * scale[..., None] / own_alpha[..., None])


def _encode_rounded(v: jax.Array, codec: Codec, alpha: jax.Array, observe: bool):
    """Round f32[..., blocks, block] to bf16, u16[..., C]; finite stays finite."""
    rounded = jnp.where(jnp.isinf(v), v, jnp.clip(v, -codec.qmax, codec.qmax)).astype(jnp.bfloat16)
    seen = _observe(v * alpha, v, rounded, codec, alpha, v) if observe else None
    return _rows(lax.bitcast_convert_type(rounded, jnp.uint16)), seen


def _scale_bytes(scale: jax.Array, codec: Codec) -> jax.Array:
    bits = lax.bitcast_convert_type(scale[..., 0], jnp.uint32)
    if codec.scale_dtype == "e8m0":
        return jnp.where(jnp.isnan(scale[..., 0]), jnp.uint32(255), bits >> 23).astype(jnp.uint8)
    pairs = lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.uint8)
    return _rows(pairs)


def _scale(scales: jax.Array | None, codec: Codec, alpha: jax.Array) -> jax.Array:
    """Return the factor of each block, f32[..., blocks, 1], or 1 / alpha."""
    if scales is None:
        return 1.0 / alpha
    if codec.scale_dtype == "e8m0":
        bits = scales.astype(jnp.uint32) << 23
        return jnp.where(scales == 255, jnp.nan, lax.bitcast_convert_type(bits, jnp.float32))[..., None]
    pairs = scales.reshape(*scales.shape[:-1], scales.shape[-1] // 2, 2)
    bits = lax.bitcast_convert_type(pairs, jnp.uint16).astype(jnp.uint32) << 16
    return lax.bitcast_convert_type(bits, jnp.float32)[..., None]


def _observe(z, encoded, codes, codec: Codec, unit, source) -> jax.Array:
    """Return (sum of squares, 0, saturated, non-finite, sum of squared error) in units of z; count is static."""
    limit = codec.qmax if codec.scale == "adaptive" else OBSERVED
    valid = jnp.isfinite(z)
    magnitude = jnp.clip(jnp.abs(z), jnp.where(source != 0, UNDERFLOW, 0.0), limit)
    squares = jnp.sum(jnp.where(valid, jnp.square(magnitude), 0.0))
    saturated = jnp.sum(jnp.abs(encoded) > codec.qmax * SATURATED, dtype=jnp.float32)
    q = _decoded(codes, codec)
    error = (jnp.clip(encoded, -OBSERVED, OBSERVED) - q) * jnp.minimum(unit, OBSERVED)
    noise = jnp.sum(jnp.where(jnp.isfinite(error), jnp.square(error), 0.0))
    nonfinite = jnp.sum(~jnp.isfinite(source), dtype=jnp.float32)
    return jnp.stack([squares, jnp.zeros_like(squares), saturated, nonfinite, noise])
