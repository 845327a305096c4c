"""Predicted signal-to-noise ratios against those of the float64 oracle on Gaussian values."""

import numpy as np
import oracles
import pytest
from codec_cases import ALL, FEW

from experiments.rounding import all_reduce_snr_db, round_trip_snr_db
from taco_jax.config import Codec

VALUES = np.random.default_rng(0).standard_normal((8, 1 << 15))
CODECS = {**ALL, "int8-32": Codec("int8", 32), "int8-512": Codec("int8", 512)}


def alpha_for(rms, codec):
    """The power of two that brings the RMS nearest to 2; 1 where the scale is the block's own."""
    return 2.0 ** np.round(1 - np.log2(rms)) if codec.scale == "adaptive" else 1.0


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_round_trip(codec):
    x = VALUES.reshape(-1)
    measured = oracles.snr_db(x, oracles.round_trip(x, codec, alpha_for(1, codec)))
    assert abs(round_trip_snr_db(codec) - measured) <= 0.1


@pytest.mark.parametrize("codec", FEW.values(), ids=FEW)
def test_all_reduce_does_not_depend_on_the_number_of_ranks(codec):
    for ranks in (2, 3, 8):
        parts = VALUES[:ranks]
        alphas = alpha_for(1, codec), alpha_for(ranks**0.5, codec)
        measured = oracles.snr_db(parts.sum(0), oracles.all_reduce(parts, codec, alphas))
        assert abs(all_reduce_snr_db(codec, ranks) - measured) <= 0.1
        # Two ranks of an adaptive codec share one grid: half of their sums lie halfway.
        shared = 0.4 if codec.scale == "adaptive" else 0.02
        assert abs(all_reduce_snr_db(codec, ranks) - (round_trip_snr_db(codec) - 10 * np.log10(2))) <= shared
