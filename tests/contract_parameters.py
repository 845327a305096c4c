"""Which implementation is tried on which codec and type: what it says it serves."""

import itertools

import contract
import pytest
from codec_cases import FP8, INT8, TACO, TACO_BLOCK

from taco_jax.config import Codec

PLAIN_E5M2 = Codec("e5m2", 64, scale="adaptive")
E8M0 = Codec("e5m2", 256, "block", scale_dtype="e8m0")
CODECS = {"taco": TACO, "taco_block": TACO_BLOCK, "fp8": FP8, "int8": INT8, "e8m0": E8M0, "e5m2": PLAIN_E5M2}
SLOWER = ("taco_block", "fp8", "e8m0")
ALL = ("xla", *contract.OTHERS)
"""Those that run here."""


def nothing(*values):
    """What stands for an implementation that serves none of the cases here."""
    reason = contract.declined(values[0], TACO, "bfloat16")
    return pytest.param(*values, marks=pytest.mark.skip(reason=f"{values[0]}: {reason}"))


def served(implementations, codecs=CODECS, dtypes=(None,), slower=SLOWER):
    """Parametrise over the implementations, codecs and types that are served, by default the widest type."""
    params = []
    for implementation in implementations:
        before = len(params)
        for (name, codec), dtype in itertools.product(codecs.items(), dtypes):
            kind = dtype or contract.widest(implementation, codec)
            if kind is None or contract.declined(implementation, codec, kind):
                continue
            marks = [pytest.mark.slow] if name in slower or dtype == "float16" else []
            params.append(pytest.param(implementation, codec, kind, marks=marks, id=f"{implementation}-{name}-{kind}"))
        if len(params) == before:
            params.append(nothing(implementation, None, None))
    return pytest.mark.parametrize(("implementation", "codec", "dtype"), params)


def every_case(implementations, cases=contract.cases):
    params = []
    for implementation in implementations:
        found = [pytest.param(implementation, case, id=f"{implementation}-{case}") for case in cases(implementation)]
        params += found or [nothing(implementation, None)]
    return pytest.mark.parametrize(("implementation", "case"), params)
