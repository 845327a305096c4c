"""Encode, decode, sum and re-encode whole messages (one uint8 array each); the implementation is chosen here.

Messages are u8[..., M], M = `wire.message_size(C)`, for values [..., C] with C a multiple of the block.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from taco_jax import wire
from taco_jax.config import Codec
from taco_jax.pallas import registry
from taco_jax.scales import alpha_for

NEUTRAL = 1.0
"""The alpha of a codec whose scales travel with the message."""
Key = jax.Array
"""A key of `jax.random`, either kind."""


def encode(
    x: Float[Array, "*rows c"],
    codec: Codec,
    alpha: Float[Array, ""],
    *,
    observe: bool = False,
    channels: int = 1,
    key: Key | None = None,
    implementation: str | None = None,
) -> tuple[UInt8[Array, "*rows m"], Float[Array, "5"] | None]:
    """Encode values into one message.

    Args:
        x: f32/bf16/f16[..., C].
        codec: format of the message.
        alpha: f32[], power of two; scales the values of an adaptive codec and the unit of the observation.
        observe: whether to return f32[5] (sum of squares, 0, saturated, non-finite, squared error) of alpha x.
        channels: distance of a block's neighbours in a row; above 1 for `layout="tokens"`, where a row holds one token
            of so many values after another and C is a multiple of block * channels.
        key: of `jax.random`, for `rounding="stochastic"` and nothing else; equal keys give equal bytes.
        implementation: see `pallas.registry.resolve`.

    Returns:
        message u8[..., M] and the observation or None.

    Raises:
        ValueError: for a key that is missing or of no use.
    """
    module = registry.resolve(implementation, codec, x.dtype)
    return module.encode(x, codec, alpha, observe=observe, channels=channels, **_random(codec, key))


def decode(
    message: UInt8[Array, "*rows m"],
    codec: Codec,
    alpha: Float[Array, ""],
    dtype: DTypeLike,
    *,
    channels: int = 1,
    residual: Float[Array, "*rows c"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "*rows c"]:
    """Decode u8[..., M] to values [..., C] of `dtype`; a residual [..., C] is added in f32, before the one rounding."""
    module = registry.resolve(implementation, codec, dtype)
    return module.decode(message, codec, alpha, dtype, channels=channels, residual=residual)


def decode_sum(
    messages: UInt8[Array, "n *rows m"],
    codec: Codec,
    alpha: Float[Array, ""],
    dtype: DTypeLike,
    *,
    channels: int = 1,
    implementation: str | None = None,
) -> Float[Array, "*rows c"]:
    """Decode u8[n, ..., M] and add over the first axis in rank order, in f32; values [..., C] of `dtype`."""
    module = registry.resolve(implementation, codec, dtype)
    return module.decode_sum(messages, codec, alpha, dtype, channels=channels)


def reduce(
    messages: UInt8[Array, "n *rows m"],
    codec: Codec,
    alphas: Float[Array, "2"],
    dtype: DTypeLike,
    *,
    observe: bool = False,
    key: Key | None = None,
    implementation: str | None = None,
) -> tuple[UInt8[Array, "*rows m"], Float[Array, "5"] | None]:
    """Add messages u8[n, ..., M] in the transformed domain and encode the sum.

    Args:
        messages: the n ranks' messages.
        codec: format of both hops.
        alphas: f32[2], of the messages and of the result.
        dtype: type of the values the caller sends; picks the implementation.
        observe: whether to return the observation of alphas[1] * sum.
        key: as for `encode`.
        implementation: see `pallas.registry.resolve`.

    Returns:
        message u8[..., M] and the observation or None.
    """
    module = registry.resolve(implementation, codec, dtype)
    return module.reduce(messages, codec, alphas, observe=observe, **_random(codec, key))


def round_trip(
    x: Float[Array, "*shape"], codec: Codec, alpha: float | jax.Array | None = None, *, key: Key | None = None
) -> Float[Array, "*shape"]:
    """Return decode(encode(x)), of the shape and dtype of `x`; blocks run as `codec.layout` says.

    Args:
        x: any shape, floating point.
        codec: format of the message.
        alpha: scale of an adaptive codec; None takes the power of two that `taco_jax.scales` would settle on for `x`.
        key: of `jax.random`, for stochastic rounding.
    """
    channels = codec.channels(x.shape)
    columns = wire.padded_columns(x.size, 1, codec, channels)
    flat = jnp.pad(x.reshape(-1), (0, columns - x.size))
    if alpha is None:
        alpha = alpha_for(x) if codec.scale == "adaptive" else NEUTRAL
    alpha = jnp.asarray(alpha, jnp.float32)
    message, _ = encode(flat, codec, alpha, channels=channels, key=key)
    return decode(message, codec, alpha, x.dtype, channels=channels)[: x.size].reshape(x.shape)


def snr_db(x: Float[Array, "*shape"], y: Float[Array, "*shape"]) -> Float[Array, ""]:
    """Return 10 log10(sum x^2 / sum (x - y)^2), the signal-to-noise ratio of `y` as a copy of `x`, in dB."""
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return 10.0 * jnp.log10(jnp.sum(jnp.square(x)) / jnp.sum(jnp.square(x - y)))


def _random(codec: Codec, key: Key | None) -> dict[str, Key]:
    """Return the argument of an implementation that rounds stochastically."""
    if (codec.rounding == "stochastic") != (key is not None):
        given = "none is given" if key is None else "one is given, which nothing would use"
        raise ValueError(f"rounding={codec.rounding!r}: a key of jax.random is for stochastic rounding; {given}")
    return {} if key is None else {"key": key}
