"""Casts in integer arithmetic: the bytes of ml_dtypes' casts, alone and in the kernels that use them."""

import contract
import jax
import ml_dtypes
import numpy as np
import oracles
import pytest

from taco_jax.pallas import integer_casts, registry

FORMATS = ("e4m3", "e5m2", "e3m4")
FLOATS = tuple(case for case in contract.CASES if case.format in FORMATS)
KERNEL_FORMATS = {case.format for case in FLOATS}
QUICK = {(case.op, case.format): case for case in sorted(FLOATS, key=lambda case: -case.columns) if case.columns}
every_format = pytest.mark.parametrize("format", FORMATS)


def cast(x: np.ndarray, format: str) -> np.ndarray:
    """Return what ml_dtypes gives for values clamped to the format's range; a NaN as 0x7F."""
    largest = float(ml_dtypes.finfo(oracles.FLOAT8[format]).max)
    with np.errstate(invalid="ignore"):
        codes = x.clip(-largest, largest).astype(oracles.FLOAT8[format]).view(np.uint8)
    return np.where(np.isnan(x), 0x7F, codes)


def encode(x: np.ndarray, format: str) -> np.ndarray:
    return np.asarray(jax.jit(integer_casts.encode, static_argnums=1)(x, format))


@every_format
def test_every_bf16(format):
    """Infinities, NaN of both signs and subnormal values among them."""
    x = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(encode(x, format), cast(x, format))


@every_format
def test_f32_around_every_tie(format):
    """256 neighbours on both sides of each value half way between two codes, and of each code."""
    codes = np.arange({"e4m3": 0x7F, "e5m2": 0x7C, "e3m4": 0x70}[format], dtype=np.uint8)
    values = codes.view(oracles.FLOAT8[format]).astype(np.float64)
    places = np.concatenate([values, (values[1:] + values[:-1]) / 2]).astype(np.float32)
    near = places.view(np.int32)[:, None] + np.arange(-256, 257, dtype=np.int32)
    x = np.abs(near).astype(np.int32).view(np.float32)
    x = np.stack([x, -x])
    np.testing.assert_array_equal(encode(x, format), cast(x, format))


@every_format
def test_f32_of_every_exponent(format):
    """A prime stride through all bits of f32: 2^20 values."""
    x = (np.arange(1 << 20, dtype=np.uint64) * 4099 % (1 << 32)).astype(np.uint32).view(np.float32)
    np.testing.assert_array_equal(encode(x, format), cast(x, format))


@every_format
def test_every_code(format):
    """Equal bits; the sign of a zero too, that of a NaN excepted."""
    codes = np.arange(256, dtype=np.uint8)
    expected = codes.view(oracles.FLOAT8[format]).astype(np.float32)
    got = np.asarray(jax.jit(integer_casts.decode, static_argnums=1)(codes, format))
    nan = np.isnan(expected)
    assert nan.sum() == {"e4m3": 2, "e5m2": 6, "e3m4": 30}[format]
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got[~nan].view(np.uint32), expected[~nan].view(np.uint32))


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=str(case), marks=() if case in QUICK.values() else pytest.mark.slow) for case in FLOATS],
)
def test_kernels_give_the_same_bytes(case):
    contract.assert_reproduces(case, case.op, contract.values(case, hostile=True), "triton_sm80_interpret")


def test_the_kernels_do_not_cast():
    """No conversion to or from an 8-bit float, which does not compile for sm_80, in any of them."""
    assert len(QUICK) == len(contract.FACTORS["op"]) * len(KERNEL_FORMATS)
    for case in QUICK.values():
        x = contract.operand(case, contract.values(case, hostile=False), case.op)
        traces = {}
        for name in ("triton_interpret", "triton_sm80_interpret"):
            run = getattr(registry.resolve(name, case.codec, case.dtype), case.op)
            traces[name] = trace(run, case, x)
        assert "f8_e" in traces["triton_interpret"] and "f8_e" not in traces["triton_sm80_interpret"], case


def trace(run, case: contract.Case, x: np.ndarray) -> str:
    """Return the jaxpr of an operation."""
    more = {"observe": True} if case.op in ("encode", "reduce") else {"dtype": contract.given_dtype(case)}
    alpha = contract.ALPHAS if case.op == "reduce" else contract.ALPHAS[0]
    return str(jax.make_jaxpr(lambda x: run(x, case.codec, alpha, **more))(x))
