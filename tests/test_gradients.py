"""Gradients through the collectives, in both of shard_map's typing modes, taken inside and outside of it."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from meshes import P, assert_equal_on_all_ranks, collectives, mesh, spmd

import taco_jax
from taco_jax import Codec, Compression

EXACT = Compression.named("none")
INT8 = Compression.named("int8", min_bytes=0)
BLOCK = Compression.named("taco_block", min_bytes=0)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8])
def test_c4_gradient_of_a_sum_over_ranks(tp, check_vma):
    """Loss = psum of w x, x = 0..7 over tp ranks (and dp replicas): dloss/dw = 28 on every rank."""
    dp = 2 if tp in (2, 4) else 1
    xs = np.array_split(np.arange(8, dtype=np.float32), tp)
    x = np.stack([np.pad(part, (0, 8 - part.size)) for part in xs])

    def loss(w, x):
        return taco_jax.psum(jnp.sum(w * x, keepdims=True), "tp", compression=INT8)[0, 0]

    on = mesh(dp=dp, tp=tp)
    outside = jax.jit(jax.grad(spmd(loss, on, (P(), P("tp")), P(), check_vma)))(jnp.float32(2.0), x)
    # One value per block: int8 keeps it but for the bf16 scale, which is rounded up by less than 2^-7.
    assert float(outside) == pytest.approx(28.0, rel=1e-2)

    def inside(w, x):
        gradient = jax.grad(loss)(w, x)
        if not check_vma:  # there psum transposes to psum: the gradient of the sum of all ranks' losses
            gradient = lax.psum(gradient, "tp") / tp
        return gradient

    assert float(spmd(inside, on, (P(), P("tp")), P(), check_vma)(jnp.float32(2.0), x)) == pytest.approx(28.0, rel=1e-2)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("size", [1e-6, 1e4])
def test_c6_small_and_large_cotangents_come_back(size, check_vma):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 16, 64)).astype(np.float32)
    weight = (size * rng.standard_normal((16, 64))).astype(np.float32)

    def loss(x):
        h = taco_jax.pvary(jnp.mean(x, axis=0, keepdims=True), "dp", compression=BLOCK)
        y = taco_jax.psum(h * (1.0 + lax.axis_index("dp")), "dp", compression=BLOCK)
        return jnp.sum(y * weight)

    gradient = jax.jit(jax.grad(spmd(loss, mesh(dp=4), P(), P(), check_vma)))(x)
    want = np.broadcast_to(weight * (1 + 2 + 3 + 4) / 4, x.shape)
    chex.assert_tree_all_finite(gradient)
    assert taco_jax.snr_db(jnp.asarray(want), gradient) > 25.0


def lax_version(op, x):
    """What lax does where `op` stands for ours."""
    return {
        "psum": lambda: lax.psum(x, "tp"),
        "pmean": lambda: lax.pmean(x, "tp"),
        "psum_scatter": lambda: lax.psum_scatter(x, "tp", scatter_dimension=1, tiled=True),
        "all_gather": lambda: lax.all_gather(x, "tp", axis=1, tiled=True),
        "all_gather_stacked": lambda: lax.all_gather(x, "tp", axis=1),
        "all_to_all": lambda: lax.all_to_all(x, "tp", 1, 0, tiled=True),
        "ppermute": lambda: lax.ppermute(x, "tp", [(0, 1), (1, 2), (2, 3), (3, 0)]),
    }[op]()


def our_version(op, x, compression):
    options = {"compression": compression}
    return {
        "psum": lambda: taco_jax.psum(x, "tp", **options),
        "pmean": lambda: taco_jax.pmean(x, "tp", **options),
        "psum_scatter": lambda: taco_jax.psum_scatter(x, "tp", scatter_dimension=1, tiled=True, **options),
        "all_gather": lambda: taco_jax.all_gather(x, "tp", axis=1, tiled=True, **options),
        "all_gather_stacked": lambda: taco_jax.all_gather(x, "tp", axis=1, **options),
        "all_to_all": lambda: taco_jax.all_to_all(x, "tp", split_axis=1, concat_axis=0, tiled=True, **options),
        "ppermute": lambda: taco_jax.ppermute(x, "tp", perm=[(0, 1), (1, 2), (2, 3), (3, 0)], **options),
    }[op]()


OPS = ("psum", "pmean", "psum_scatter", "all_gather", "all_gather_stacked", "all_to_all", "ppermute")


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("op", OPS)
def test_values_and_gradients_are_those_of_lax(op, check_vma):
    """Exactly with compression none, within int8's noise otherwise; the loss weighs every element differently."""
    x = np.random.default_rng(3).standard_normal((4, 5, 8, 24)).astype(np.float32)

    def value_and_gradient(version):
        def loss(x):
            y = version(x[0])
            weights = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape) * (1 + lax.axis_index("tp"))
            return jnp.sum(jnp.sin(y) * weights), y

        def step(x):
            (_, y), gradient = jax.value_and_grad(loss, has_aux=True)(x)
            return y[None] * jnp.ones((1,) * (y.ndim + 1)), gradient

        # psum's result is the same on all ranks; marking it as varying lets one out_spec serve all operations.
        def marked(x):
            y, gradient = step(x)
            return taco_jax.compat.vary(y, ("tp",)), gradient

        return spmd(marked, mesh(tp=4), P("tp"), P("tp"), check_vma)(x)

    want = value_and_gradient(lambda x: lax_version(op, x))
    exact = value_and_gradient(lambda x: our_version(op, x, EXACT))
    chex.assert_trees_all_equal(exact, want)
    coded = value_and_gradient(lambda x: our_version(op, x, INT8))
    chex.assert_trees_all_equal_shapes_and_dtypes(coded, want)
    for got, reference in zip(coded, want, strict=True):
        assert taco_jax.snr_db(reference, got) > 30.0


def test_forward_and_backward_codecs_are_separate():
    x = np.random.default_rng(4).standard_normal((4, 32, 64)).astype(np.float32)
    forward_only = Compression(Codec("int8", 128, "block"), None, min_bytes=0)
    backward_only = Compression(None, Codec("int8", 128, "block"), min_bytes=0)

    def results(compression):
        def loss(x):
            h = taco_jax.pvary(lax.psum(x, "tp"), "tp", compression=compression, name="enter")
            return jnp.sum(jnp.sin(taco_jax.psum(h * x, "tp", compression=compression, name="leave")))

        return spmd(jax.value_and_grad(loss), mesh(tp=4), P("tp"), (P(), P("tp")))

    (exact, gradient), (forward, _), (backward, noisy) = (results(c)(x) for c in (EXACT, forward_only, backward_only))
    assert float(backward) == float(exact) != float(forward)
    assert 30.0 < float(taco_jax.snr_db(gradient, noisy)) < 60.0
    text = results(backward_only).lower(x).compile().as_text()
    u8 = re.findall(r"u8\[[^\n]*op_name=\"([^\"]*taco[^\"]*)\"", text)
    assert u8 and all("backward" in name for name in u8)


def test_remat_keeps_the_uint8_message_and_repeats_no_collective():
    """Under `save_payloads` a scan of two layers sends forward once per layer, as without remat."""
    x = np.random.default_rng(5).standard_normal((4, 64, 128)).astype(np.float32)

    def program(remat):
        def layer(h, _):
            y = taco_jax.psum(jnp.tanh(taco_jax.pvary(h, "tp", compression=BLOCK) * x_local), "tp", compression=BLOCK)
            return h + jnp.sin(y), None

        def loss(h):
            return jnp.sum(jax.lax.scan(remat(layer), h, None, length=2)[0])

        def step(h, x):
            nonlocal x_local
            x_local = x[0]
            return jax.value_and_grad(loss)(h)

        x_local = None
        return spmd(step, mesh(tp=4), (P(), P("tp")), P()).lower(x[0], x)

    plain = program(lambda f: f)
    kept = program(lambda f: jax.checkpoint(f, policy=taco_jax.save_payloads(), prevent_cse=False))
    recomputed = program(lambda f: jax.checkpoint(f, prevent_cse=False))
    counts = [collectives(p.compile().as_text()) for p in (plain, kept, recomputed)]
    two_hops = {("all-to-all", "u8"): 1, ("all-gather", "u8"): 1}
    assert counts[0] == counts[1] == {key: 2 * n for key, n in two_hops.items()}  # one forward, one backward
    assert counts[2] == {key: 3 * n for key, n in two_hops.items()}  # full remat repeats the forward one
    # What the forward scan stacks for the backward one: the message (8,320 bytes a layer), not the f32 result.
    saved = re.findall(r"tensor<2x4x(\d+)xui8>", kept.as_text())
    assert saved and all(int(n) == 64 * 128 // 4 * (128 + 2) // 128 for n in saved)


def test_gradients_are_equal_on_all_ranks():
    x = np.random.default_rng(6).standard_normal((8, 16, 100)).astype(np.float32)

    def loss(w, x):
        h = taco_jax.pvary(w, ("a", "b"), compression=BLOCK)
        return jnp.sum(jnp.sin(taco_jax.psum(h * x[0], ("a", "b"), compression=BLOCK)))

    on = mesh(a=2, b=4)
    gradient = spmd(jax.grad(loss), on, (P(), P(("a", "b"))), P())(x[0], x)
    assert_equal_on_all_ranks(gradient)
    total = (x[0] * x).sum(0)
    assert taco_jax.snr_db(jnp.asarray(np.cos(total) * x.sum(0)), gradient) > 15.0
