"""The codecs under test and one compiled shape to try them on."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracles
import pytest

from taco_jax import codec as codecs
from taco_jax.config import Codec

FP8 = Codec("e4m3")
E8M0 = Codec("e4m3", scale_dtype="e8m0")
TACO_BLOCK = Codec("e4m3", 128, "block")
INT8 = Codec("int8", 128, "block")
INT6 = Codec("int6", 128, "block")
INT4 = Codec("int4", 128, "block")
PAPER = Codec("e4m3", 256, "block", "paper")
TACO = Codec("e4m3", 128, "block", "adaptive")
BF16 = Codec("bf16", scale="none")
ADAPTIVE = Codec("e5m2", 64, scale="adaptive")
STATELESS = {
    "fp8": FP8,
    "e8m0": E8M0,
    "taco_block": TACO_BLOCK,
    "e5m2": Codec("e5m2", 256, "block"),
    "int8": INT8,
    "int8-plain": Codec("int8", 128),
    "int6": INT6,
    "int4-32": Codec("int4", 32, "block"),
    "e3m4": Codec("e3m4"),
    "paper": PAPER,
}
ALL = {**STATELESS, "taco": TACO, "adaptive": ADAPTIVE}
FEW = {"fp8": FP8, "taco_block": TACO_BLOCK, "int8": INT8, "taco": TACO, "paper": PAPER}

every_codec = pytest.mark.parametrize("codec", ALL.values(), ids=ALL)
every_stateless_codec = pytest.mark.parametrize("codec", STATELESS.values(), ids=STATELESS)
a_few_codecs = pytest.mark.parametrize("codec", FEW.values(), ids=FEW)

RANKS, COLUMNS = 4, 512
"""One shape for most tests: another shape is another compilation."""
ONE, ONES = jnp.float32(1.0), jnp.ones(2)
HALF_STEP = {"e4m3": 2.0**-4, "e5m2": 2.0**-3, "e3m4": 2.0**-5, "int8": 1 / 254, "int6": 1 / 62, "int4": 1 / 14}
"""Of the format at its maximum, relative to that."""
ROUNDING = 2.0**-20
"""Float32 arithmetic of a round trip relative to the length of a block, generously."""

encode = jax.jit(functools.partial(codecs.encode, observe=True), static_argnums=1)
decode = jax.jit(codecs.decode, static_argnums=(1, 3))
reduce = jax.jit(functools.partial(codecs.reduce, observe=True), static_argnums=(1, 3))
decode_sum = jax.jit(codecs.decode_sum, static_argnums=(1, 3))


def gaussian(*shape, seed=0, dtype=np.float32):
    """Standard normal values."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def ranks(*values):
    """The ranks' rows f32[RANKS, COLUMNS]: each value (an array is repeated) fills a row, zeros the other rows."""
    rows = np.zeros((RANKS, COLUMNS), np.float32)
    for row, value in zip(rows, values, strict=False):
        row[:] = np.resize(value, COLUMNS)
    return rows


def trip(x, codec, alpha=1.0):
    """decode(encode(x)) of at most RANKS * COLUMNS values, through the common shape."""
    x = np.asarray(x, np.float32)
    rows = np.zeros(RANKS * COLUMNS, np.float32)
    rows[: x.size] = x.reshape(-1)
    message, _ = encode(rows.reshape(RANKS, COLUMNS), codec, jnp.float32(alpha))
    return np.asarray(decode(message, codec, jnp.float32(alpha), jnp.float32)).reshape(-1)[: x.size].reshape(x.shape)


def wire_scales(message, codec):
    """The factor of each block, float64[..., blocks], from the bytes behind the payload; as published, s / alpha."""
    scales = np.ascontiguousarray(np.asarray(message)[..., COLUMNS * codec.value_bits // 8 :])
    if codec.scale == "paper":
        s, alpha = np.split(scales.view("<f4").astype(np.float64), 2, axis=-1)
        return s / alpha
    if codec.scale_dtype == "e8m0":
        return np.exp2(scales.astype(np.float64) - 127)
    return scales.view(ml_dtypes.bfloat16).astype(np.float64)


def sums(parts, codec, alphas=(1.0, 1.0)):
    """The sum of the ranks' rows, decoded at once (one rounding) and after coding it again (two)."""
    alphas = jnp.asarray(alphas, jnp.float32)
    messages, _ = encode(parts, codec, alphas[0])
    message, _ = reduce(messages, codec, alphas, jnp.float32)
    once = decode_sum(messages, codec, alphas[0], jnp.float32)
    return np.asarray(once), np.asarray(decode(message, codec, alphas[1], jnp.float32))


def assert_within_budget(x, y, codec, alpha=1.0):
    """No block is further from x than half a step of the format allows."""
    budget = oracles.error_budget(x, codec, alpha)
    length = np.linalg.norm(oracles.blocks(x, codec), axis=-1)
    assert (oracles.block_errors(x, np.asarray(y), codec) <= budget * (1 + 2.0**-10) + length * ROUNDING).all()
