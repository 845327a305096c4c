"""The transform against Sylvester's matrix in float64."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from taco_jax.hadamard import matrix, rotate

SIZES = (1, 2, 32, 64, 128, 256, 512)


@pytest.mark.parametrize("size", SIZES)
def test_rotation_is_exact_on_integers(size):
    x = np.random.default_rng(size).integers(-64, 65, (3, 2, size)).astype(np.float32)
    y = rotate(jnp.asarray(x))
    chex.assert_trees_all_equal(np.asarray(y), (x @ oracles.hadamard(size)).astype(np.float32))


def test_rotation_error_is_rounding_only():
    """log2(n) additions, each within half an ulp of at most sqrt(n) times the input's length."""
    x = np.random.default_rng(0).standard_normal((16, 128)).astype(np.float32)
    error = np.abs(np.asarray(rotate(jnp.asarray(x)), np.float64) - x.astype(np.float64) @ oracles.hadamard(128))
    assert error.max() <= 7 * 2.0**-24 * np.linalg.norm(x, axis=-1).max() * 128**0.5


@pytest.mark.parametrize("size", SIZES)
def test_rotating_twice_is_the_size_times_the_identity(size):
    x = np.random.default_rng(size).standard_normal((4, size)).astype(np.float32)
    twice = np.asarray(rotate(rotate(jnp.asarray(x)))) / size
    assert np.abs(twice - x).max() <= 2 * max(np.log2(size), 1) * 2.0**-24 * np.linalg.norm(x, axis=-1).max()


@pytest.mark.parametrize("size", SIZES)
def test_matrix_is_sylvesters(size):
    chex.assert_trees_all_equal(matrix(size), oracles.hadamard(size).astype(np.float32))


def test_rotation_is_its_own_transpose():
    x, w = np.random.default_rng(1).integers(-8, 9, (2, 128)).astype(np.float32)
    gradient = jax.grad(lambda x: jnp.vdot(rotate(x), w))(jnp.asarray(x))
    chex.assert_trees_all_equal(np.asarray(gradient), np.asarray(rotate(jnp.asarray(w))))
