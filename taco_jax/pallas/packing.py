"""How integers of fewer than eight bits lie in bytes; every function is plain jnp that kernels can trace too.

A block of B codes is cut into four quarters q0 .. q3 of B / 4 neighbours, which are combined byte by byte, so that no
value moves to another place within its quarter (shifts and ors of whole vectors, no shuffles):

int4, B / 2 bytes:   q0 | q2 << 4,  q1 | q3 << 4
int6, 3 B / 4 bytes: q0 | (q3 & 3) << 6,  q1 | (q3 >> 2 & 3) << 6,  q2 | (q3 >> 4) << 6
"""

from collections.abc import Sequence

import jax

QUARTERS = 4
PIECES = {4: 2, 6: 3}
"""Bits of a code -> pieces of B / 4 bytes that a block's payload consists of."""


def pack(quarters: Sequence[jax.Array], bits: int) -> list[jax.Array]:
    """Return the pieces of bytes of four quarters.

    Args:
        quarters: integers [..., B / 4] of at least eight bits, codes in two's complement.
        bits: 4 or 6, of which the lowest are kept.
    """
    q0, q1, q2, q3 = (q & (2**bits - 1) for q in quarters)
    if bits == 4:
        return [q0 | (q2 << 4), q1 | (q3 << 4)]
    return [q0 | ((q3 & 3) << 6), q1 | (((q3 >> 2) & 3) << 6), q2 | ((q3 >> 4) << 6)]


def unpack(pieces: Sequence[jax.Array], bits: int) -> list[jax.Array]:
    """Return the four quarters of pieces of bytes, codes in two's complement; inverse of `pack`.

    Args:
        pieces: integers [..., B / 4] with values of 0 to 255.
        bits: 4 or 6.
    """
    if bits == 4:
        low, high = pieces
        quarters = [low & 15, high & 15, low >> 4, high >> 4]
    else:
        rest = (pieces[0] >> 6) | ((pieces[1] >> 6) << 2) | ((pieces[2] >> 6) << 4)
        quarters = [*(p & 63 for p in pieces), rest]
    sign = 1 << (bits - 1)
    return [(q ^ sign) - sign for q in quarters]
