"""The bytes of a message and how many of them travel."""

import itertools

import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from taco_jax import wire_bytes
from taco_jax.codec import encode
from taco_jax.config import Codec
from taco_jax.wire import message_size, pack, padded_columns, unpack

CODECS = {
    "block": Codec("e4m3", 128, "block"),
    "e8m0": Codec("e5m2", 32, scale_dtype="e8m0"),
    "int8": Codec("int8", 64, "block"),
    "int6": Codec("int6", 64),
    "int4": Codec("int4", 32),
    "adaptive": Codec("e4m3", 128, "block", "adaptive"),
}


WITH_PAPER = {**CODECS, "paper": Codec("e4m3", 256, "block", "paper")}


@pytest.mark.parametrize("codec", WITH_PAPER.values(), ids=WITH_PAPER)
def test_unpack_is_the_inverse_of_pack(codec):
    for lead, blocks in itertools.product([(), (3,), (2, 1)], (1, 2, 5)):
        columns = blocks * codec.block
        message = jnp.arange(np.prod(lead, dtype=int) * message_size(columns, codec)).astype(jnp.uint8)
        message = message.reshape(*lead, message_size(columns, codec))
        payload, scales = unpack(message, codec)
        assert payload.shape == (*lead, columns * {"int6": 6, "int4": 4}.get(codec.format, 8) // 8)
        assert (scales is None) == (codec.scale == "adaptive")
        assert scales is None or scales.shape == (*lead, blocks * codec.scale_bytes)
        assert pack(payload, scales).tolist() == message.tolist()


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_a_message_is_payload_then_little_endian_scales(codec):
    """Integers whose block maximum is a power of two times qmax leave no rounding to chance."""
    x = np.zeros((2, 2 * codec.block), np.float32)
    x[0, 0], x[0, 1], x[1, codec.block] = 8 * codec.qmax, -codec.qmax, codec.qmax / 4
    message, seen = encode(jnp.asarray(x), codec, jnp.float32(1.0))
    assert message.dtype == jnp.uint8 and seen is None
    expected = oracles.message(x, codec)
    assert message.shape == expected.shape == (2, message_size(2 * codec.block, codec))
    difference = np.flatnonzero(np.asarray(message) != expected)
    if codec.scale == "block" and not codec.hadamard:
        assert difference.size == 0
    # Zeros of either sign are the same value; a packed byte of zeros has no sign.
    assert all(expected.flat[i] & 0x7F == 0 for i in difference)


def test_adaptive_messages_are_exactly_half_of_bf16():
    taco = CODECS["adaptive"]
    for op in ("psum", "psum_scatter", "all_gather", "all_to_all", "ppermute"):
        hops = 2 if op == "psum" else 1
        values = {"all_gather": 7 * 8192, "ppermute": 8192}.get(op, 8192 * 7 // 8)
        assert wire_bytes((64, 128), taco, 8, op) == hops * values


@pytest.mark.parametrize("codec", WITH_PAPER.values(), ids=WITH_PAPER)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_wire_bytes_count_padding_and_scales(codec, ranks):
    for size in (1, 1000, ranks * codec.block, 4096):
        blocks_per_rank = -(-size // (ranks * codec.block))
        payload = {"int6": 3 * codec.block // 4, "int4": codec.block // 2}.get(codec.format, codec.block)
        part = blocks_per_rank * (payload + codec.scale_bytes)
        whole = -(-size // codec.block) * (payload + codec.scale_bytes)
        assert padded_columns(size, ranks, codec) == blocks_per_rank * codec.block
        expected = {
            "psum": 2 * (ranks - 1) * part,
            "pvary": 2 * (ranks - 1) * part,
            "psum_scatter": (ranks - 1) * part,
            "all_to_all": (ranks - 1) * part,
            "all_gather": (ranks - 1) * whole,
            "ppermute": whole,
        }
        assert {op: wire_bytes((size,), codec, ranks, op) for op in expected} == expected


def test_nothing_travels_within_one_rank_or_of_an_empty_array():
    assert wire_bytes((4096,), Codec(), 1) == 0
    assert wire_bytes((0, 8), Codec(), 4) == 0


def test_an_unknown_operation_names_the_known_ones():
    with pytest.raises(ValueError, match="'pmax'; there are psum, pvary, psum_scatter, all_to_all"):
        wire_bytes((8,), Codec(), 2, "pmax")
