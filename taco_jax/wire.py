"""Layout of one message: the payload bytes of a row, then the scale bytes of its blocks, in one uint8 array.

bf16 travels as uint16: XLA:CPU moves 16-bit floats as 32-bit ones.
"""

import math

import jax
import jax.numpy as jnp

from taco_jax.config import Codec


def payload_size(columns: int, codec: Codec) -> int:
    """Return the bytes that `columns` values (a multiple of the block) take without their scales."""
    return columns * codec.value_bits // 8


def message_size(columns: int, codec: Codec) -> int:
    """Return the bytes of a row of `columns` values (a multiple of the block)."""
    return payload_size(columns, codec) + columns // codec.block * codec.scale_bytes


def message_columns(size: int, codec: Codec) -> int:
    """Return the values of a row whose message has `size` bytes; inverse of `message_size`."""
    return size * codec.block // message_size(codec.block, codec)


def pack(payload: jax.Array, scales: jax.Array | None) -> jax.Array:
    """Join payload u8[..., P] and scale bytes u8[..., C / block * scale_bytes] into one message."""
    return payload if scales is None else jnp.concatenate([payload, scales], axis=-1)


def unpack(message: jax.Array, codec: Codec) -> tuple[jax.Array, jax.Array | None]:
    """Split a message u8[..., M] into payload and scale bytes; inverse of `pack`."""
    if not codec.scale_bytes:
        return message, None
    size = payload_size(message_columns(message.shape[-1], codec), codec)
    return message[..., :size], message[..., size:]


def padded_columns(size: int, axis_size: int, codec: Codec, channels: int = 1) -> int:
    """Return the values each of `axis_size` ranks owns when `size` values are cut into whole blocks.

    With several channels blocks run across them, so that a rank owns whole blocks of all.
    """
    unit = codec.block * channels
    return math.ceil(size / (axis_size * unit)) * unit


def wire_bytes(shape: tuple[int, ...], codec: Codec, axis_size: int, op: str = "psum") -> int:
    """Return the bytes one device sends for a collective, padding and scales included.

    With M = bytes of 1/n of the message: psum 2 (n-1) M (two hops), psum_scatter, all_to_all (n-1) M,
    all_gather (n-1) times the whole local message, ppermute the whole local message.

    Args:
        shape: shape of the operand per shard; where it is split, `layout="tokens"` counts a split of another axis than
            the last.
        codec: format of the message.
        axis_size: number of ranks n in the group.
        op: `psum`, `pvary` (its backward psum), `psum_scatter`, `all_gather`, `all_to_all` or `ppermute`.

    Raises:
        ValueError: for an unknown `op`.
    """
    size = math.prod(shape)
    if axis_size == 1 or size == 0:
        return 0
    channels = codec.channels(shape)
    part = message_size(padded_columns(size, axis_size, codec, channels), codec)
    whole = message_size(padded_columns(size, 1, codec, channels), codec)
    table = {
        "psum": 2 * (axis_size - 1) * part,
        "pvary": 2 * (axis_size - 1) * part,
        "psum_scatter": (axis_size - 1) * part,
        "all_to_all": (axis_size - 1) * part,
        "all_gather": (axis_size - 1) * whole,
        "ppermute": whole,
    }
    if op not in table:
        raise ValueError(f"no collective is called {op!r}; there are {', '.join(table)}")
    return table[op]
