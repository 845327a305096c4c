"""One suite for every implementation of the codec: `xla` against the oracle, the others against `xla`, in pairs.

An implementation is tried on what it says it serves; `test_what_is_declined` counts the rest and reads the reasons.
`test_contract_values.py` has the values that users reported and the collectives.
"""

import re

import contract
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from contract_parameters import ALL, PLAIN_E5M2, every_case, served

from taco_jax.pallas import mosaic_gpu, registry


def whole_product(implementation: str) -> list[contract.Case]:
    return [c for c in contract.product() if contract.declined(implementation, c.codec, c.dtype) is None]


@pytest.fixture(autouse=True)
def two_programs(monkeypatch):
    """So that small arrays take several steps of the pipeline."""
    monkeypatch.setattr(mosaic_gpu, "_PROGRAMS", 2)


@pytest.mark.parametrize("implementation", ALL)
def test_the_cases_have_every_pair(implementation):
    cases = contract.cases(implementation)
    had = set().union(*(contract.pairs(vars(case)) for case in cases))
    assert had == contract.all_pairs(contract.served_factors(implementation))
    assert len(cases) <= 200
    assert all(contract.declined(implementation, case.codec, case.dtype) is None for case in cases)


SERVED = {"xla": 270, "triton": 270, "triton_sm80": 270, "mosaic_gpu": int(jax.__version_info__ >= (0, 12))}
"""Of the 270 valid combinations of policy, format, block, transform and type."""


@pytest.mark.parametrize("implementation", ALL)
def test_what_is_declined(implementation):
    """Each with the reason that the implementation gives, and no more than is known."""
    choices = contract.product()
    reasons = [contract.declined(implementation, case.codec, case.dtype) for case in choices]
    assert (len(choices), reasons.count(None)) == (270, SERVED[implementation.removesuffix("_interpret")])
    for case, reason in zip(choices, reasons, strict=True):
        if reason:
            with pytest.raises(NotImplementedError, match=re.escape(f"{implementation!r}: {reason}")):
                registry.resolve(implementation, case.codec, case.dtype)


@every_case(i for i in ALL if i == "xla" or i in contract.TENSOR_CORES)
def test_equals_the_oracle(implementation, case):
    contract.assert_oracle(case, contract.values(case, hostile=False), implementation)


@every_case(contract.OTHERS)
def test_same_bits(implementation, case):
    contract.assert_reproduces(case, case.op, contract.values(case, hostile=True), implementation)


@pytest.fixture
def forgotten():
    """Free what a test compiled: each of some 1,800 programs maps memory, and a process has 65,530 maps at most."""
    yield
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.usefixtures("forgotten")
@every_case(contract.OTHERS, whole_product)
def test_same_bits_of_every_codec(implementation, case):
    for op in contract.FACTORS["op"]:
        contract.assert_reproduces(case, op, contract.values(case, hostile=True), implementation)


@served(contract.OTHERS, dtypes=("bfloat16", "float16"))
def test_every_16_bit_pattern(implementation, codec, dtype):
    """In order, so that a block has one exponent, and shuffled, so that most blocks hold a NaN."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    both = np.stack([patterns, np.random.default_rng(0).permutation(patterns)]).view(jnp.dtype(dtype))
    expected, got = (contract.call("encode", codec, dtype, i, both)[0] for i in ("xla", implementation))
    contract.assert_encoded(got, expected, codec, implementation)
    if codec == PLAIN_E5M2:
        finite = np.isfinite(both.astype(np.float32))
        exact = both[finite].astype(np.float64) * float(contract.ALPHAS[0])
        exact = exact.clip(-codec.qmax, codec.qmax).astype(np.float32)
        np.testing.assert_array_equal(np.asarray(got)[finite], oracles.payload_bytes(exact, codec.format))


BETWEEN = contract.Case("", "bfloat16", 1600, "adaptive", "e4m3", 128, "block", 3)
"""A codec that every implementation serves, and a shape to compile once."""
HAVING = [i for i in ALL if contract.declined(i, BETWEEN.codec, BETWEEN.dtype) is None]


@pytest.mark.parametrize("writer", HAVING)
def test_messages_of_one_implementation_decode_under_another(writer):
    assert len(HAVING) == sum(SERVED[i.removesuffix("_interpret")] > 0 for i in ALL)
    x = contract.values(BETWEEN, hostile=True)
    messages = contract.call("encode", BETWEEN.codec, BETWEEN.dtype, writer, x)[0]
    for reader in HAVING:
        for op in ("reduce", "decode"):
            contract.assert_reproduces(BETWEEN, op, x, reader, messages)


@pytest.mark.parametrize("implementation", HAVING[1:])
def test_integers_give_the_same_bits(implementation):
    """However they are added: encode, and decode a message of integers."""
    codec = BETWEEN.codec
    x = np.random.default_rng(0).integers(-8, 9, contract.values(BETWEEN, hostile=False).shape)
    codes = jnp.asarray(x, jnp.float8_e4m3fn).view(jnp.uint8)
    for op, given in (("encode", jnp.asarray(x, BETWEEN.dtype)), ("decode", codes)):
        expected, got = (contract.call(op, codec, BETWEEN.dtype, i, given)[0] for i in ("xla", implementation))
        contract.assert_same(got, expected, codec)
