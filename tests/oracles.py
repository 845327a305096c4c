"""The codec and its collectives in float64 NumPy, written from the specification; imports nothing of taco_jax.

A codec is any object with `format`, `block`, `hadamard`, `scale` and `scale_dtype`. Values are [..., C], C a
multiple of the block; coded values are q[..., blocks, block] on the format's grid with factors s[..., blocks, 1]:
value = R^T q s.
"""

import math

import ml_dtypes
import numpy as np

QMAX = {"e4m3": 448.0, "e5m2": 57344.0, "e3m4": 15.5, "int8": 127.0, "int6": 31.0, "int4": 7.0}
FLOAT8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e3m4": ml_dtypes.float8_e3m4}
MANTISSA_BITS = {"e4m3": 3, "e5m2": 2, "e3m4": 4}
LOWEST_EXPONENT = {"e4m3": -6, "e5m2": -14, "e3m4": -2}
SMALLEST_SCALE = 2.0**-126
PAPER_TAU, PAPER_EPS, PAPER_ALPHAS = 448.0, 1e-6, (1e-3, 1e3)
LARGEST_SCALE = {"bf16": float(ml_dtypes.finfo(ml_dtypes.bfloat16).max), "e8m0": 2.0**127}


def hadamard(size: int) -> np.ndarray:
    """H[i, j] = (-1)^(number of ones in i & j): Sylvester's matrix without its recursion."""
    index = np.arange(size)
    return 1.0 - 2.0 * (np.bitwise_count(index[:, None] & index[None, :]) % 2)


def step(z: np.ndarray, format: str) -> np.ndarray:
    """Distance between neighbours of the format around z."""
    if format.startswith("int"):
        return np.ones_like(z)
    _, exponent = np.frexp(z)
    return np.exp2(np.maximum(exponent - 1, LOWEST_EXPONENT[format]) - MANTISSA_BITS[format])


def to_grid(z: np.ndarray, format: str) -> np.ndarray:
    """Clamp to the format's maximum and round to the nearest value of the format, ties to even."""
    z = np.clip(np.asarray(z, np.float64), -QMAX[format], QMAX[format])
    unit = step(z, format)
    return np.rint(z / unit) * unit


def payload_bytes(q: np.ndarray, format: str) -> np.ndarray:
    """u8 of the same shape as q, or u8[..., blocks, block * bits / 8] of packed integers.

    Bit b of the byte i of the piece k (a quarter of the block's size) is bit b of the value i of the quarter k, where
    that has as many bits; the bits above are those of the quarters that have no piece of their own.
    """
    if format not in ("int6", "int4"):
        return q.astype(FLOAT8.get(format, np.int8)).view(np.uint8)
    width, pieces = {"int6": (6, 3), "int4": (4, 2)}[format]
    bits = np.unpackbits(q.astype(np.int8).view(np.uint8)[..., None], axis=-1, bitorder="little")[..., :width]
    quarters = bits.reshape(*q.shape[:-1], 4, q.shape[-1] // 4, width)
    own, others = quarters[..., :pieces, :, :], quarters[..., pieces:, :, :]
    if format == "int6":
        # The fourth quarter's bits two by two: [..., 1, i, 6] -> [..., 3, i, 2].
        others = np.moveaxis(others[..., 0, :, :].reshape(*others.shape[:-3], others.shape[-2], 3, 2), -2, -3)
    return np.packbits(np.concatenate([own, others], -1), axis=-1, bitorder="little").reshape(
        *q.shape[:-1], q.shape[-1] * width // 8
    )


def payload_codes(payload: np.ndarray, format: str, block: int) -> np.ndarray:
    """The values of the bytes of a row, float64[..., C]; inverse of `payload_bytes`."""
    if format in FLOAT8:
        return payload.view(FLOAT8[format]).astype(np.float64)
    if format == "int8":
        return payload.view(np.int8).astype(np.float64)
    width, pieces = {"int6": (6, 3), "int4": (4, 2)}[format]
    bits = np.unpackbits(payload[..., None], axis=-1, bitorder="little")
    bits = bits.reshape(*payload.shape[:-1], -1, pieces, block // 4, 8)
    own, others = bits[..., :width], bits[..., width:]
    if format == "int6":
        others = np.moveaxis(others, -3, -2).reshape(*others.shape[:-3], 1, block // 4, 6)
    code = np.concatenate([own, others], -3) @ (1 << np.arange(width))
    return (np.where(code >= 1 << (width - 1), code - (1 << width), code)).reshape(*payload.shape[:-1], -1) * 1.0


def scale_bytes(s: np.ndarray, scale_dtype: str) -> np.ndarray:
    """u8[..., blocks * bytes of a scale] of s[..., blocks, 1]; NaN is 255 in e8m0."""
    if scale_dtype == "e8m0":
        safe = np.where(np.isnan(s), 1.0, s)
        return np.where(np.isnan(s), 255, np.log2(safe) + 127)[..., 0].astype(np.uint8)
    return s[..., 0].astype(ml_dtypes.bfloat16).view(np.uint8)


def round_up(s: np.ndarray, scale_dtype: str) -> np.ndarray:
    """Smallest value of the scale's type that is not below s."""
    mantissa, exponent = np.frexp(s)
    bits = {"bf16": 8, "e8m0": 0}[scale_dtype]
    if scale_dtype == "e8m0":
        return np.where(mantissa == 0.5, np.ldexp(0.5, exponent), np.ldexp(1.0, exponent))
    return np.ldexp(np.ceil(np.ldexp(mantissa, bits)), exponent - bits)


def block_scale(amax: np.ndarray, codec) -> np.ndarray:
    """s = amax / qmax rounded up, kept within the normal numbers of float32; NaN where amax is not finite."""
    with np.errstate(invalid="ignore"):
        s = round_up(np.maximum(amax / QMAX[codec.format], SMALLEST_SCALE), codec.scale_dtype)
        return np.where(np.isfinite(amax), np.minimum(s, LARGEST_SCALE[codec.scale_dtype]), np.nan)


def blocks(x: np.ndarray, codec) -> np.ndarray:
    """[..., C] -> float64[..., C / block, block]."""
    return np.asarray(x, np.float64).reshape(*x.shape[:-1], -1, codec.block)


def rows(y: np.ndarray) -> np.ndarray:
    """Inverse of `blocks`."""
    return y.reshape(*y.shape[:-2], -1)


def rotate(y: np.ndarray, codec) -> np.ndarray:
    """The orthonormal transform of each block, after its signs; or nothing."""
    return (y * signs(codec)) @ hadamard(codec.block) * codec.block**-0.5 if codec.hadamard else y


def unrotate(y: np.ndarray, codec) -> np.ndarray:
    """The transposed transform."""
    return y @ hadamard(codec.block).T * codec.block**-0.5 * signs(codec) if codec.hadamard else y


def signs(codec) -> np.ndarray | float:
    """The diagonal of +1 and -1 of the seed."""
    if codec.signs is None:
        return 1.0
    return np.random.default_rng(codec.signs).choice(np.asarray([-1.0, 1.0], np.float32), codec.block)


def paper_factors(y: np.ndarray, codec) -> tuple[np.ndarray, np.ndarray]:
    """(s, alpha) in float32's precision of blocks that are rotated already: a rotation keeps the RMS.

    s is 0 below float32's normal numbers, as it is for a block of zeros.
    """
    rms = np.sqrt(np.square(y).mean(-1, keepdims=True) + PAPER_EPS)
    alpha = np.clip(PAPER_TAU / rms, *PAPER_ALPHAS).astype(np.float32).astype(np.float64)
    s = (np.abs(alpha * y).max(-1, keepdims=True) / QMAX[codec.format]).astype(np.float32).astype(np.float64)
    return np.where(s < SMALLEST_SCALE, 0.0, s), alpha


def code(y: np.ndarray, codec, alpha: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """(q, s) of blocks that are rotated already."""
    amax = np.abs(y).max(-1, keepdims=True)
    if codec.scale == "paper":
        s, own_alpha = paper_factors(y, codec)
        s = np.maximum(s, SMALLEST_SCALE) / own_alpha
    else:
        s = block_scale(amax, codec) if codec.scale == "block" else np.full_like(amax, 1.0 / alpha)
    return to_grid(y / s, codec.format), s


def encode(x: np.ndarray, codec, alpha: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """(q, s) of values [..., C]."""
    return code(rotate(blocks(x, codec), codec), codec, alpha)


def message(x: np.ndarray, codec, alpha: float = 1.0) -> np.ndarray:
    """The bytes of a row: its payload, then the scales of its blocks (as published: every s, then every alpha)."""
    q, s = encode(x, codec, alpha)
    parts = [rows(payload_bytes(q, codec.format))]
    if codec.scale == "block":
        parts.append(scale_bytes(s, codec.scale_dtype))
    if codec.scale == "paper":
        factors = paper_factors(rotate(blocks(x, codec), codec), codec)
        parts += [np.ascontiguousarray(f[..., 0].astype("<f4")).view(np.uint8) for f in factors]
    return np.concatenate(parts, -1)


def decode(q: np.ndarray, s: np.ndarray, codec) -> np.ndarray:
    """Values [..., C]."""
    return rows(unrotate(q, codec) * s)


def round_trip(x: np.ndarray, codec, alpha: float = 1.0) -> np.ndarray:
    """decode(encode(x)), x of any shape, flattened and padded to whole blocks."""
    flat = pad(np.asarray(x, np.float64).reshape(-1), codec.block)
    return decode(*encode(flat, codec, alpha), codec)[: x.size].reshape(x.shape)


def all_reduce(xs: np.ndarray, codec, alphas: tuple[float, float] = (1.0, 1.0)) -> np.ndarray:
    """Two hops on xs[n, ...]: the sum of the decoded parts, coded once more; block order is that of the flat array."""
    ranks = len(xs)
    size = math.prod(xs.shape[1:])
    flat = pad(np.asarray(xs, np.float64).reshape(ranks, -1), codec.block * ranks)
    q, s = encode(flat, codec, alphas[0])
    total = (q * s).sum(0)
    return decode(*code(total, codec, alphas[1]), codec)[:size].reshape(xs.shape[1:])


def pad(x: np.ndarray, multiple: int) -> np.ndarray:
    """Append zeros to the last axis up to a multiple."""
    missing = -x.shape[-1] % multiple
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])


def error_budget(x: np.ndarray, codec, alpha: float = 1.0) -> np.ndarray:
    """Largest possible Euclidean error of each block of x[..., C]: half a step per (rotated) value."""
    y = rotate(blocks(x, codec), codec)
    _, s = code(y, codec, alpha)
    z = np.clip(y / s, -QMAX[codec.format], QMAX[codec.format])
    half = 0.5 * step(z, codec.format) * s + np.abs(y - z * s)
    return np.sqrt(np.square(half).sum(-1))


def block_errors(x: np.ndarray, y: np.ndarray, codec) -> np.ndarray:
    """Euclidean distance of x[..., C] and y[..., C] block by block."""
    return np.sqrt(np.square(blocks(x, codec) - blocks(y, codec)).sum(-1))


def snr_db(x: np.ndarray, y: np.ndarray) -> float:
    """10 log10(sum x^2 / sum (x - y)^2)."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    with np.errstate(divide="ignore"):
        return float(10 * np.log10(np.square(x).sum() / np.square(x - y).sum()))
