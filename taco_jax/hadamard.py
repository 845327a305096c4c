"""The one definition of the Hadamard transform: a butterfly in f32 with a fixed order of additions."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32


def rotate(x: Float32[Array, "*rows n"]) -> Float32[Array, "*rows n"]:
    """Multiply the last axis by the Sylvester Hadamard matrix, unnormalised.

    y = H x, H_1 = [1], H_2m = [[H_m, H_m], [H_m, -H_m]]; H H = n, so a second call divided by n undoes the first.
    Rounds pair neighbours at distance 1, 2, 4, ...: adding halves of the even and odd elements and concatenating sum
    and difference turns the index bits by one, and log2(n) rounds bring them back to natural order.

    Args:
        x: f32[..., n], n a power of two.

    Returns:
        f32[..., n].
    """
    size = x.shape[-1]
    rounds = size.bit_length() - 1
    # Two rounds in one pass over memory, with the same additions in the same order.
    for _ in range(rounds // 2):
        a, b, c, d = (x[..., i::4] for i in range(4))
        x = jnp.concatenate([(a + b) + (c + d), (a - b) + (c - d), (a + b) - (c + d), (a - b) - (c - d)], axis=-1)
    if rounds % 2:
        even, odd = x[..., 0::2], x[..., 1::2]
        x = jnp.concatenate([even + odd, even - odd], axis=-1)
    return x


def matrix(size: int) -> np.ndarray:
    """Return the Sylvester Hadamard matrix, float32[size, size] of +1 and -1, size a power of two."""
    h = np.ones((1, 1), np.float32)
    while h.shape[0] < size:
        h = np.block([[h, h], [h, -h]])
    return h


def signs(size: int, seed: int) -> np.ndarray:
    """Return the random signs of a seed, float32[size] of +1 and -1."""
    return np.random.default_rng(seed).choice(np.asarray([-1.0, 1.0], np.float32), size)
