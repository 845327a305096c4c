"""What every implementation of the codec must do: the cases, and how a result is checked.

An implementation is checked on `FACTORS` in pairs, as far as it serves them: `xla` against the float64 oracle, every
other one against `xla`, whose bytes and values it must reproduce: to the bit, or as far as tensor cores can.
"""

import functools
import importlib
import itertools
import os
from dataclasses import dataclass

import jax
import jax.experimental.pallas.fuser  # noqa: F401  interpret mode imports it late, and then all of jit's caches miss
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracles

from taco_jax import codec as codecs
from taco_jax import wire
from taco_jax.config import BLOCKS, Codec

FACTORS = {
    "op": ("encode", "reduce", "decode", "decode_sum"),
    "dtype": ("bfloat16", "float16", "float32"),
    "columns": (1, 96, 127, 257, 1600, 13696, 50257, 0),
    "policy": ("adaptive", "bf16", "e8m0"),
    "format": ("e4m3", "e5m2", "int8", "int6", "int4"),
    "block": BLOCKS,
    "hadamard": (None, "block"),
    "ranks": (1, 2, 3, 5),
}
ALPHAS = jnp.asarray([2.0, 0.5], jnp.float32)
FLOAT32 = 2.0**-20
"""Float32 arithmetic relative to the length of a block, generously."""
OBSERVED_TOLERANCE = 2e-5
"""Sums of one sign in another order."""
NAN = 0x7F
INTERPRETED = ("triton_interpret", "mosaic_gpu_interpret")
OTHERS = tuple(filter(None, os.environ.get("TACO_CONTRACT_IMPLEMENTATIONS", "").split(","))) or INTERPRETED
"""What is held against `xla`: interpreted on a CPU, or those named in the environment, on this machine's device."""
TENSOR_CORES = ("mosaic_gpu", "mosaic_gpu_interpret")
"""Those that rotate by a matrix product: exact on integers, else one step off in few codes."""
STEPS_OFF = 1e-4
"""Share of the codes."""
QUICKLY = {"xla_backend_optimization_level": 0}
"""XLA's options for interpreted kernels, whose bits do not depend on it: half the time to compile them."""


@dataclass(frozen=True)
class Case:
    """One combination of `FACTORS`: an operation on values of some shape and type under one codec."""

    op: str
    dtype: str
    columns: int
    policy: str
    format: str
    block: int
    hadamard: str | None
    ranks: int

    @property
    def codec(self) -> Codec:
        scale = {"scale": "adaptive"} if self.policy == "adaptive" else {"scale_dtype": self.policy}
        return Codec(self.format, self.block, self.hadamard, **scale)

    def __str__(self) -> str:
        return "-".join(map(str, vars(self).values()))


def is_valid(chosen: dict) -> bool:
    """Whether a full or partial choice of factors has a codec: integers send bf16 scales."""
    return not (chosen.get("format", "").startswith("int") and chosen.get("policy") in ("adaptive", "e8m0"))


def pairs(chosen: dict) -> set:
    """Every two factors of a choice with their values."""
    return set(itertools.combinations(sorted(chosen.items()), 2))


def all_pairs(factors: dict) -> set:
    """The pairs that valid choices have."""
    names = itertools.combinations(factors, 2)
    choices = (dict(zip(two, both, strict=True)) for two in names for both in itertools.product(*map(factors.get, two)))
    return set().union(*(pairs(choice) for choice in choices if is_valid(choice)))


def covering(factors: dict) -> list[dict]:
    """A small list of valid choices that has all pairs: each begins with a pair not had yet and adds, factor by factor,
    the value that brings the most of the others; ties go to the value used least."""
    missing, chosen, used = all_pairs(factors), [], {}
    while missing:
        choice = dict(min(missing, key=str))
        for name in sorted(factors, key=lambda name: -len(factors[name])):
            if name in choice:
                continue
            options = [{**choice, name: value} for value in factors[name]]
            options = [option for option in options if is_valid(option)]
            choice = max(options, key=lambda o: (len(pairs(o) & missing), -used.get((name, o[name]), 0)))
        missing -= pairs(choice)
        chosen.append(choice)
        for item in choice.items():
            used[item] = used.get(item, 0) + 1
    return chosen


CASES = [Case(**choice) for choice in covering(FACTORS)]


def declined(implementation: str, codec: Codec, dtype: str) -> str | None:
    """Why an implementation does not serve a codec, in its own words."""
    return importlib.import_module(f"taco_jax.pallas.{implementation}").unsupported_reason(codec, jnp.dtype(dtype))


def widest(implementation: str, codec: Codec) -> str | None:
    """The type to try a codec on: float32, else what the implementation serves, None if nothing."""
    return next((d for d in ("float32", "bfloat16") if declined(implementation, codec, d) is None), None)


@functools.cache
def cases(implementation: str) -> list[Case]:
    """`CASES`, or where some of them are declined, cases that have every pair of what is served.

    Columns that all blocks served pad alike come with the same ranks then, because they are one program.
    """
    if all(declined(implementation, case.codec, case.dtype) is None for case in CASES):
        return CASES
    factors = served_factors(implementation)
    smallest = min(factors["block"], default=1)
    alike = {}
    for columns in factors["columns"]:
        alike.setdefault(-(-columns // smallest), []).append(columns)
    chosen = covering({**factors, "columns": tuple(some[0] for some in alike.values())})
    return [Case(**{**choice, "columns": c}) for choice in chosen for c in alike[-(-choice["columns"] // smallest)]]


def served_factors(implementation: str) -> dict:
    """The values of `FACTORS` that the codecs and types which an implementation serves are made of."""
    served = [case for case in product() if declined(implementation, case.codec, case.dtype) is None]
    if not served:
        return dict.fromkeys(FACTORS, ())
    free = ("op", "columns", "ranks")
    return {
        name: tuple(v for v in values if any(getattr(case, name) == v for case in served))
        if name not in free
        else values
        for name, values in FACTORS.items()
    }


def product() -> list[Case]:
    """Every codec with every type; shapes and ranks take turns."""
    names = ("policy", "format", "block", "hadamard", "dtype")
    choices = [dict(zip(names, c, strict=True)) for c in itertools.product(*map(FACTORS.get, names))]
    turns = itertools.cycle(itertools.product(FACTORS["columns"], FACTORS["ranks"]))
    return [
        Case("all", columns=columns, ranks=ranks, **choice)
        for choice, (columns, ranks) in zip(filter(is_valid, choices), turns, strict=False)
    ]


def call(op: str, codec: Codec, dtype: str, implementation: str, operand):
    """Run one operation; returns (result, observation or None)."""
    return (_call_interpreted if implementation in INTERPRETED else _call)(op, codec, dtype, implementation, operand)


def compiled(function, implementation: str, **options):
    """Jit a function of one implementation's kernels."""
    return jax.jit(function, compiler_options=QUICKLY if implementation in INTERPRETED else None, **options)


def _run(op: str, codec: Codec, dtype: str, implementation: str, operand):
    options = {"implementation": implementation}
    if op == "encode":
        return codecs.encode(operand, codec, ALPHAS[0], observe=True, **options)
    if op == "reduce":
        return codecs.reduce(operand, codec, ALPHAS, dtype, observe=True, **options)
    function = codecs.decode if op == "decode" else codecs.decode_sum
    return function(operand, codec, ALPHAS[0], dtype, **options), None


_call = jax.jit(_run, static_argnums=(0, 1, 2, 3))
_call_interpreted = jax.jit(_run, static_argnums=(0, 1, 2, 3), compiler_options=QUICKLY)


def values(case: Case, hostile: bool) -> np.ndarray:
    """x[ranks, rows, padded columns]; hostile ones hold what breaks codecs, but no padding."""
    random = np.random.default_rng(case.columns * 8 + case.ranks)
    columns = wire.padded_columns(case.columns, 1, case.codec)
    rows = 1 if case.columns > 2000 else 2
    x = random.standard_normal((case.ranks, rows, columns)).astype(np.float32)
    octaves = random.integers(-1, 2, (case.ranks, rows, columns // case.block, 1))
    blocks = oracles.blocks(x, case.codec) * np.exp2(octaves)
    if hostile and columns:
        kinds = [np.nan, np.inf, 0.0, 1e-38, 3e38, 1e-45, 448.0, 464.0, -np.inf]
        flat = blocks.reshape(-1, case.block)
        for kind, row in zip(kinds, random.permutation(len(flat))[: len(flat) // 2], strict=False):
            flat[row] = np.sign(flat[row]) * kind if np.isfinite(kind) and kind else flat[row]
            flat[row, random.integers(case.block)] = kind
            if kind == 0:
                flat[row] = 0
    else:
        blocks.reshape(case.ranks, rows, columns)[..., case.columns :] = 0
    with np.errstate(over="ignore"):
        return (
            blocks.astype(np.float32).reshape(x.shape).astype(ml_dtypes.bfloat16 if "b" in case.dtype else case.dtype)
        )


def operand(case: Case, x: np.ndarray, op: str):
    """What the operation works on: values, or the messages that the oracle makes of them."""
    if op == "encode":
        return x
    with np.errstate(invalid="ignore"):
        return oracles.message(x, case.codec, float(ALPHAS[0]))


def parse(message, codec: Codec) -> tuple[np.ndarray, np.ndarray]:
    """(q, s) in float64 of a message's bytes."""
    payload, scales = (None if a is None else np.ascontiguousarray(a) for a in wire.unpack(np.asarray(message), codec))
    q = oracles.blocks(oracles.payload_codes(payload, codec.format, codec.block), codec)
    if scales is None:
        return q, np.full((*q.shape[:-1], 1), 1.0 / float(ALPHAS[0]))
    if codec.scale_dtype == "e8m0":
        s = np.where(scales == 255, np.nan, np.exp2(scales.astype(np.float64) - 127))
    else:
        s = scales.view(ml_dtypes.bfloat16).astype(np.float64)
    return q, s[..., None]


def assert_oracle(case: Case, x: np.ndarray, implementation: str) -> None:
    """The result is within half a step of the format, or a rounding of the type, of the float64 oracle's."""
    codec = case.codec
    given = operand(case, x, case.op)
    result = np.asarray(call(case.op, codec, case.dtype, implementation, given)[0])
    if case.op in ("decode", "decode_sum"):
        q, s = parse(given, codec)
        exact = oracles.decode(q, s, codec)
        exact = exact.sum(0) if case.op == "decode_sum" else exact
        assert result.dtype == given_dtype(case) and result.shape == exact.shape
        error = np.abs(oracles.blocks(result.astype(np.float64) - exact, codec))
        assert (error <= decoding_tolerance(case, case.op, given, exact)).all()
        return
    if case.op == "encode":
        rotated, alpha = oracles.rotate(oracles.blocks(x, codec), codec), float(ALPHAS[0])
    else:
        q, s = parse(given, codec)
        rotated, alpha = (q * s).sum(0), float(ALPHAS[1])
    assert result.dtype == np.uint8 and result.shape == (*x.shape[case.op == "reduce" : -1], message_bytes(case, x))
    q, s = parse(result, codec)
    if codec.scale == "adaptive":
        s = np.full_like(s, 1.0 / alpha)
    exact_q, exact_s = oracles.code(rotated, codec, alpha)
    # A scale within 2^-20 of the next, and a value within float32's rounding of a tie, may fall on the other side.
    moved = (s != exact_s)[..., 0]
    assert moved.sum() <= 1 + moved.size // 500
    assert np.sum((q != exact_q)[~moved]) <= 1 + q.size // 1000
    budget = 0.51 * oracles.step(np.clip(rotated / s, -codec.qmax, codec.qmax), codec.format) * s
    clipped = np.abs(rotated) > codec.qmax * s
    assert (np.abs(q * s - rotated) <= budget)[~clipped].all()


def given_dtype(case: Case) -> np.dtype:
    return np.dtype(jnp.dtype(case.dtype))


def message_bytes(case: Case, x: np.ndarray) -> int:
    return wire.message_size(x.shape[-1], case.codec)


def decoding_tolerance(case: Case, op: str, messages, exact: np.ndarray) -> np.ndarray:
    """What float32 loses of the blocks' length, and the rounding of the type."""
    parts = np.abs(oracles.decode(*parse(messages, case.codec), case.codec))
    size = oracles.blocks(parts.sum(0) if op == "decode_sum" else parts, case.codec)
    length = np.sqrt(np.square(size).sum(-1, keepdims=True))
    information = ml_dtypes.finfo(given_dtype(case))
    rounding = np.abs(oracles.blocks(exact, case.codec)) * float(information.eps)
    return length * FLOAT32 + rounding + float(information.smallest_subnormal)


def assert_reproduces(case: Case, op: str, x: np.ndarray, implementation: str, messages=None) -> None:
    """The implementation's result on messages, by default the oracle's, is that of `xla`, and so are the sums of its
    observation."""
    given = operand(case, x, op) if messages is None else messages
    run = functools.partial(call, op, case.codec, case.dtype)
    (expected, seen), (got, also) = run("xla", given), run(implementation, given)
    if implementation not in TENSOR_CORES or op == "reduce":
        assert_same(got, expected, case.codec)
    elif op == "encode":
        assert_within_a_step(got, expected, case.codec)
    else:
        got, expected = (np.asarray(a).astype(np.float64) for a in (got, expected))
        known = ~np.isnan(expected)
        np.testing.assert_array_equal(~np.isnan(got), known)
        error = oracles.blocks(np.abs(got - expected), case.codec)
        near = error <= decoding_tolerance(case, op, given, expected)
        assert (near.reshape(known.shape) | ~known).all()
    if seen is not None:
        np.testing.assert_allclose(also, seen, rtol=OBSERVED_TOLERANCE, atol=1e-30)


def assert_encoded(got, expected, codec: Codec, implementation: str) -> None:
    """The message is that of `xla`, up to what tensor cores may differ in."""
    (assert_within_a_step if implementation in TENSOR_CORES else assert_same)(got, expected, codec)


def assert_within_a_step(got, expected, codec: Codec) -> None:
    """Few codes differ, and by one step; NaN stays NaN. Of an adaptive codec in floating point."""
    assert got.dtype == expected.dtype == np.uint8 and got.shape == expected.shape and not codec.scale_bytes
    got, expected = (_unsigned_nan(np.asarray(message), codec) for message in (got, expected))
    unknown = expected == NAN
    np.testing.assert_array_equal(got == NAN, unknown)
    place = [np.where(codes & 0x80, -1, 1) * (codes & 0x7F).astype(int) for codes in (got, expected)]
    steps = np.where(unknown, 0, np.abs(place[0] - place[1]))
    assert steps.max(initial=0) <= 1
    assert np.sum(steps) <= STEPS_OFF * steps.size


def assert_same(got, expected, codec: Codec) -> None:
    """Equal bytes of messages, where a NaN may have either sign; equal bits of values, NaN equals NaN."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    got, expected = np.asarray(got), np.asarray(expected)
    if got.dtype != np.uint8:
        np.testing.assert_array_equal(got.astype(np.float32), expected.astype(np.float32))
        return
    (got, *scales), (expected, *more) = (wire.unpack(m, codec) for m in (got, expected))
    got, expected = (_unsigned_nan(payload, codec) for payload in (got, expected))
    np.testing.assert_array_equal(got, expected)
    for a, b in zip(scales, more, strict=True):
        assert a is b is None or np.array_equal(a, b)


def _unsigned_nan(payload: np.ndarray, codec: Codec) -> np.ndarray:
    if codec.format not in oracles.FLOAT8:
        return payload
    codes = np.ascontiguousarray(payload).view(oracles.FLOAT8[codec.format])
    return np.where(np.isnan(codes.astype(np.float32)), NAN, payload)
