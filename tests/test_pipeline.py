import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from meshes import P, mesh, spmd

from taco_jax.compat import vary
from taco_jax.sharding.pipeline import on_first_stage, own_share, run_pipeline, scatter_from_last_stage

WEIGHTS = np.random.default_rng(0).normal(size=(4, 6, 6)).astype(np.float32)


def stages(weights, x):
    """Layers that do not commute, so that a missing, repeated or swapped one shows."""
    return lax.scan(lambda x, w: (jnp.tanh(x @ w) + x, None), x, weights)[0]


def pipelined_loss(on, remat=True):
    def loss(weights, x, target):
        weights, x, target = (vary(a, ("pp",)) for a in (weights, x, target))
        first = on_first_stage(lambda: x * 2, axes=("pp",))
        y = run_pipeline(lambda x: stages(weights, x), first, remat=remat)
        shared = scatter_from_last_stage(y.reshape(-1, 6))
        return jnp.sum(jnp.square(shared - own_share(target.reshape(-1, 6))))

    def local(weights, x, target):
        value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(vary(weights, ("pp",)), vary(x, ("pp",)), target)
        return lax.psum(value, "pp"), gradients[0], lax.psum(gradients[1], "pp")

    return spmd(local, on, (P("pp"), P(), P()), (P(), P("pp"), P()))


@pytest.mark.parametrize(
    ("pp", "num_microbatches", "rows"), [(1, 3, 2), (2, 1, 3), (2, 5, 2), (4, 1, 1), (4, 2, 3), (4, 4, 2)]
)
def test_loss_and_gradients_equal_one_device(pp, num_microbatches, rows):
    """M2: any number of microbatches, fewer than stages too; rows that the stages do not divide are padded."""
    rng = np.random.default_rng(pp)
    x, target = rng.normal(size=(2, num_microbatches, rows, 6)).astype(np.float32)

    def plain(weights, x):
        return jnp.sum(jnp.square(stages(weights, 2 * x) - target))

    want_value, want = jax.jit(jax.value_and_grad(plain, argnums=(0, 1)))(WEIGHTS, x)
    value, *gradients = pipelined_loss(mesh(pp=pp))(WEIGHTS, x, target)
    # Padding rows of the last share compare zeros with zeros.
    chex.assert_trees_all_close(value, want_value, rtol=1e-5)
    chex.assert_trees_all_close(tuple(gradients), want, rtol=1e-4, atol=1e-4)


def test_remat_changes_nothing():
    x, target = np.random.default_rng(1).normal(size=(2, 3, 2, 6)).astype(np.float32)
    on = mesh(pp=2)
    chex.assert_trees_all_close(
        pipelined_loss(on, remat=True)(WEIGHTS, x, target),
        pipelined_loss(on, remat=False)(WEIGHTS, x, target),
        rtol=1e-6,
    )


def test_bubbles_skip_the_stage():
    """A stage that counts its calls, forward and backward: as many as microbatches, on every stage."""

    @jax.custom_vjp
    def counted(x, probe):
        return x

    counted.defvjp(lambda x, probe: (x, None), lambda _, ct: (ct, vary(jnp.ones(()), ("pp",))))

    def local(x):
        def loss(probe):
            return jnp.sum(run_pipeline(lambda x: counted(x, probe), vary(x, ("pp",))))

        return jax.grad(loss)(vary(jnp.zeros(()), ("pp",)))[None]

    counts = spmd(local, mesh(pp=4), P(), P("pp"))(jnp.ones((3, 2)))
    chex.assert_trees_all_equal(counts, jnp.full((4,), 3.0))


def test_conditionals_say_how_often_they_hold():
    x, target = np.zeros((2, 3, 2, 6), np.float32)
    text = pipelined_loss(mesh(pp=4)).lower(WEIGHTS, x, target).as_text(debug_info=True)
    assert "share.3.6" in text
    assert "share.1.1" in text


def test_scattered_rows_meet_their_own():
    x = np.arange(10, dtype=np.float32)[:, None]

    def local(x):
        last = jnp.where(lax.axis_index("pp") == 3, vary(x, ("pp",)), -1.0)
        return jnp.stack([scatter_from_last_stage(last), own_share(vary(x, ("pp",)))])

    scattered, own = spmd(local, mesh(pp=4), P(), P(None, "pp"))(x)
    want = np.concatenate([x, np.zeros((2, 1), np.float32)])
    chex.assert_trees_all_equal(scattered, want)
    chex.assert_trees_all_equal(own, want)
