"""What the implementations compute alike, each formula once; every function is plain jnp that kernels can trace too."""

import jax
import jax.numpy as jnp
from jax import lax

from taco_jax.config import Codec

FORMAT_DTYPE = {
    "e4m3": jnp.float8_e4m3fn,
    "e5m2": jnp.float8_e5m2,
    "e3m4": jnp.float8_e3m4,
    "int8": jnp.int8,
    "int6": jnp.int8,
    "int4": jnp.int8,
    "bf16": jnp.bfloat16,
}
"""Types of one code each, before `taco_jax.pallas.packing`."""
BEFORE_ROTATION = 2.0**100
"""Adaptive values are clipped to it: their rotation stays finite, and it is far above every format's maximum."""
OBSERVED = 2.0**16
"""Magnitudes are clipped to it before they are squared, so that sums of squares stay finite."""
UNDERFLOW = 2.0**-60
"""What a value too small to square counts for, so that alpha can follow it."""
SATURATED = 1.0001
"""Values beyond this multiple of the format's maximum count as saturated."""
MIN_SCALE = 2.0**-126
_MAX_SCALE = float(jnp.finfo(jnp.bfloat16).max)


def norm(codec: Codec) -> float:
    """Return the factor that makes the rotation orthonormal."""
    return codec.block**-0.5 if codec.hadamard else 1.0


def power_of_two(amax: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return 2^e and 2^-e, e = floor(log2(amax)) kept where both are normal, by their bits."""
    exponent = lax.bitcast_convert_type(amax, jnp.int32) >> 23
    exponent = jnp.clip(exponent, 1, 253)
    return (
        lax.bitcast_convert_type(exponent << 23, jnp.float32),
        lax.bitcast_convert_type((254 - exponent) << 23, jnp.float32),
    )


def block_scale(quotient: jax.Array, unit: jax.Array, witness: jax.Array, codec: Codec) -> jax.Array:
    """Return the scale (f32, exact in the wire's type) that brings a block to the format's maximum.

    The factor below one absorbs the rounding of the division, so that an exact quotient is not rounded up a step;
    what it lets over the maximum is clamped. NaN where the witness is not finite.

    Args:
        quotient: f32, maximum of the block in the given unit over the format's maximum, correctly rounded.
        unit: f32, power of two.
        witness: f32, not finite where the block holds something that is not.
        codec: gives the type of the scale.
    """
    scale = jnp.clip(quotient * unit * (1.0 - 2.0**-20), MIN_SCALE, _MAX_SCALE)
    kept = 0xFFFF0000 if codec.scale_dtype == "bf16" else 0xFF800000
    bits = lax.bitcast_convert_type(scale, jnp.uint32)
    scale = lax.bitcast_convert_type((bits + (0xFFFFFFFF - kept)) & jnp.uint32(kept), jnp.float32)
    limit = _MAX_SCALE if codec.scale_dtype == "bf16" else 2.0**127
    return jnp.where(jnp.abs(witness) < jnp.inf, jnp.minimum(scale, limit), jnp.nan)
