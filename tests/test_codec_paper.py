"""What is particular to the published codec: the two factors of a block on the wire, and that one of them cancels."""

import chex
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracles
from codec_cases import COLUMNS, ONE, PAPER, RANKS, ROUNDING, decode, encode, gaussian

from taco_jax import Codec

SMALLEST_ALPHA, LARGEST_ALPHA = np.float32(1e-3), np.float32(1e3)


def test_every_block_sends_its_scale_and_its_alpha():
    """Payload, s of every block, alpha of every block; the limits of alpha and a block of zeros among them."""
    x = gaussian(RANKS * COLUMNS, seed=20).reshape(-1, PAPER.block)
    x *= np.array([0, 1e-30, 1e-16, 1e-3, 0.5, 1e3, 1e7, 1e37], np.float32)[:, None]
    message, _ = encode(x.reshape(RANKS, COLUMNS), PAPER, ONE)
    factors = np.ascontiguousarray(np.asarray(message)[:, COLUMNS:]).view("<f4").reshape(RANKS, 2, -1)
    s, alpha = factors[:, 0].reshape(-1, 1), factors[:, 1].reshape(-1, 1)
    # At an RMS of 0.5 the eps moves alpha by 2e-6, more than the tolerance.
    expected = oracles.paper_factors(oracles.rotate(x.astype(np.float64), PAPER), PAPER)
    chex.assert_trees_all_close((s, alpha), tuple(f.astype(np.float32) for f in expected), rtol=ROUNDING)
    assert s[0] == 0 and (alpha[:4] == LARGEST_ALPHA).all() and (alpha[6:] == SMALLEST_ALPHA).all()
    q = np.asarray(message)[:, :COLUMNS].view(ml_dtypes.float8_e4m3fn).astype(np.float64).reshape(x.shape)
    by_hand = oracles.rotate(q * s, PAPER) / alpha
    decoded = np.asarray(decode(message, PAPER, ONE, jnp.float32)).reshape(x.shape)
    for found, want, block in zip(decoded, by_hand, x, strict=True):
        chex.assert_trees_all_close(found, want.astype(np.float32), rtol=0, atol=ROUNDING * np.abs(block).max())
    assert all(abs(oracles.snr_db(*pair) - 31.7) <= 1 for pair in zip(x[1:], decoded[1:], strict=True))


def test_alpha_cancels():
    """Of the codes at least 99.99 % are the same without it, whatever the scale of a block: a block needs one scale."""
    rows = 64
    x = gaussian(rows, PAPER.block * 4, seed=21).reshape(-1, PAPER.block)
    x = (x * np.exp(5 * gaussian(len(x), 1, seed=22, dtype=np.float64))).astype(np.float32)
    message, _ = encode(x.reshape(rows, -1), PAPER, ONE)
    codes = np.asarray(message)[:, : PAPER.block * 4].reshape(x.shape)
    alpha = oracles.paper_factors(oracles.rotate(x.astype(np.float64), PAPER), PAPER)[1]
    assert np.ptp(alpha) > 500
    rotated = oracles.rotate(x.astype(np.float64), PAPER)
    without = rotated * PAPER.qmax / np.abs(rotated).max(-1, keepdims=True)
    assert np.mean(codes == oracles.payload_bytes(oracles.to_grid(without, "e4m3"), "e4m3")) >= 0.9999


def test_any_published_block_size_round_trips():
    x = gaussian(RANKS, COLUMNS, seed=23)
    for block in (32, 512):
        codec = Codec("e4m3", block, "block", "paper")
        message, _ = encode(x, codec, ONE)
        assert message.shape == (RANKS, COLUMNS + COLUMNS // block * 8)
        chex.assert_trees_all_close(
            oracles.snr_db(x, decode(message, codec, ONE, jnp.float32)),
            oracles.snr_db(x, oracles.round_trip(x, codec)),
            atol=0.02,
        )
