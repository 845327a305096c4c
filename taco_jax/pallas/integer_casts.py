"""Casts to and from the 8-bit float formats in integer arithmetic, for devices that lack them or are slow at it.

GPUs before sm_89 have none, none has e3m4, and XLA:CPU branches for each value.

The bytes are those of the cast: rounded to nearest, ties to even, once.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from taco_jax.pallas.arithmetic import FORMAT_DTYPE

_F32_MANTISSA, _F32_BIAS = 23, 127
_NAN = 0x7F
"""A NaN of each format, the one that the GPU's own cast gives."""


def encode(z: jax.Array, format: str) -> jax.Array:
    """Return the codes u8 of f32 values; beyond the format's maximum it saturates, NaN gives 0x7F."""
    info = jnp.finfo(FORMAT_DTYPE[format])
    dropped = _F32_MANTISSA - info.nmant
    magnitude = jnp.minimum(jnp.abs(z), float(info.max))
    bits = _bits(magnitude)
    # Half a step less one, and one more where the last kept bit is odd: a carry moves on to the exponent.
    rounded = (bits + ((1 << (dropped - 1)) - 1) + ((bits >> dropped) & 1)) >> dropped
    normal = rounded - ((_F32_BIAS + info.minexp - 1) << info.nmant)
    # Added to a number whose unit in the last place is the format's smallest value, it is rounded to a multiple.
    anchor = float(info.smallest_subnormal) * 2.0**_F32_MANTISSA
    subnormal = _bits(magnitude + anchor) - int(np.float32(anchor).view(np.int32))
    code = jnp.where(magnitude < float(info.smallest_normal), subnormal, normal) | ((_bits(z) >> 24) & 0x80)
    return jnp.where(z == z, code, _NAN).astype(jnp.uint8)


def decode(codes: jax.Array, format: str) -> jax.Array:
    """Return the f32 values of codes u8, exactly."""
    code = codes.astype(jnp.int32)
    if format == "e5m2":
        return _half(code << 8).astype(jnp.float32)
    sign, magnitude = (code & 0x80) << 8, code & 0x7F
    # Two bits or one lower than in f16: the exponent has the offset 15 there and 3 or 7 here, which the factor makes up
    # for.
    if format == "e3m4":
        value = _half(sign | (magnitude << 6)).astype(jnp.float32) * 2.0**12
        beyond = jnp.where(magnitude == 0x70, jnp.inf * value, jnp.nan)
        return jnp.where(magnitude >= 0x70, beyond, value)
    value = _half(sign | (magnitude << 7)).astype(jnp.float32) * 2.0**8
    return jnp.where(magnitude == 0x7F, jnp.nan, value)


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _half(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits.astype(jnp.int16), jnp.float16)
