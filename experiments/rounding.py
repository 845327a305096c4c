"""Predict the signal-to-noise ratio of a codec on Gaussian values by integrating the rounding error of its format.

Nothing of the library's codec runs here: a format is its grid (ml_dtypes), a scale policy the scale it would choose for
N(0, 1), and a transform nothing at all, since it leaves independent Gaussian values as they are.
"""

import functools
import math

import ml_dtypes
import numpy as np

from taco_jax.config import INTEGERS, Codec
from taco_jax.scales import TARGET_LOG2_RMS

_FORMATS = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m4": ml_dtypes.float8_e3m4,
    "bf16": ml_dtypes.bfloat16,
}
_MAXIMA, _POINTS = 256, 4096
_TAIL = 9.0  # standard deviations; what lies beyond has no weight
_FINEST = 2.0**-10  # codes on a finer grid than this, of values whose RMS is about 2, carry no power


def round_trip_snr_db(codec: Codec) -> float:
    """Return the SNR of decode(encode(x)), x ~ N(0, 1), in dB: -10 log10 D, D = E[(x - s Q(x / s))^2]."""
    return -10.0 * math.log10(_noise(codec, 1.0))


def all_reduce_snr_db(codec: Codec, ranks: int) -> float:
    """Return the SNR of a two-hop all-reduce of independent N(0, 1) values, in dB: -10 log10(D + D').

    n parts bring the noise n D to a sum of power n, and coding the sum, ~ N(0, n), adds D' of its power again. D' is D
    but for the place where a power of two puts the RMS, and but for this: the ranks of an adaptive codec share a grid,
    so that sums of a few codes lie on a grid too, where halves are frequent and round with the largest error.
    """
    again = _noise_of_a_sum_of_codes(codec, ranks) if codec.scale == "adaptive" else _noise(codec, math.sqrt(ranks))
    return -10.0 * math.log10(_noise(codec, 1.0) + again)


@functools.cache
def _noise(codec: Codec, rms: float) -> float:
    """Return the noise of one rounding of N(0, rms^2) in units of its power."""
    if codec.scale in ("adaptive", "none"):
        return float(_mean_square_error(np.array([_TAIL]), np.array([1.0 / (_alpha(rms) * rms)]), codec)[0])
    # In units of the RMS: the maximum of a block is m with density 2 block phi(m) (2 Phi(m) - 1)^(block - 1), and the
    # other values are those below it.
    maximum = (np.arange(_MAXIMA) + 0.5) * (_TAIL / _MAXIMA)
    below = np.array([math.erf(m / math.sqrt(2.0)) for m in maximum])
    density = np.exp(-0.5 * maximum**2) * below ** (codec.block - 1)
    scale = _sent(maximum * rms / codec.qmax, codec) / rms
    own = (maximum - scale * _rounded(maximum / scale, codec)) ** 2
    error = own / codec.block + _mean_square_error(maximum, scale, codec) * (1.0 - 1.0 / codec.block)
    return float(np.average(error, weights=density))


def _noise_of_a_sum_of_codes(codec: Codec, ranks: int) -> float:
    """Return the noise of coding the sum of n adaptive messages: their codes' distribution, n times with itself."""
    first, second = _alpha(1.0), _alpha(math.sqrt(ranks))
    x = _TAIL * (2.0 * (np.arange(1 << 18) + 0.5) / (1 << 18) - 1.0)
    top = math.ceil(_TAIL * first / _FINEST)
    places = np.rint(_rounded(first * x, codec) / _FINEST).astype(int) + top
    shares = np.bincount(places.clip(0, 2 * top), weights=np.exp(-0.5 * x**2), minlength=2 * top + 1)
    size = 2 * top * ranks + 1
    shares = np.fft.irfft(np.fft.rfft(shares / shares.sum(), size) ** ranks, size)
    z = (np.arange(size) - top * ranks) * (_FINEST * second / first)
    return float(np.sum(shares * (z - _rounded(z, codec)) ** 2)) / (ranks * second**2)


def _alpha(rms: float) -> float:
    return 2.0 ** round(TARGET_LOG2_RMS - math.log2(rms))


def _sent(scale: np.ndarray, codec: Codec) -> np.ndarray:
    """Round scales up to the type that travels."""
    if codec.scale == "paper":
        return scale
    mantissa, exponent = np.frexp(scale)
    bits = {"bf16": 8, "e8m0": 0}[codec.scale_dtype]
    rounded = np.ceil(mantissa * 2.0**bits) if bits else np.where(mantissa > 0.5, 1.0, 0.5)
    return np.ldexp(rounded, exponent - bits)


def _rounded(z: np.ndarray, codec: Codec) -> np.ndarray:
    """Return Q(z): the nearest value of the format, ties to even."""
    z = z.clip(-codec.qmax, codec.qmax)
    return np.rint(z) if codec.format in INTEGERS else z.astype(np.float32).astype(_FORMATS[codec.format]).astype(float)


def _mean_square_error(limit: np.ndarray, scale: np.ndarray, codec: Codec) -> np.ndarray:
    """Return E[(x - s Q(x / s))^2 | |x| < limit] for x ~ N(0, 1), for each pair of limit and scale s."""
    x = limit[:, None] * ((np.arange(_POINTS) + 0.5) / _POINTS)
    weights = np.exp(-0.5 * x**2)
    error = x - scale[:, None] * _rounded(x / scale[:, None], codec)
    return np.sum(weights * error**2, axis=-1) / np.sum(weights, axis=-1)
