"""Gradients of the collectives: against jax.lax's in both typing modes, per direction, and under scan and remat."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from codec_cases import FP8, INT8, TACO
from collective_cases import EXACT, call_lax, call_taco, cases, compression
from jax import lax
from meshes import P, assert_equal_on_all_ranks, collectives, mesh, spmd

import taco_jax
from taco_jax import Compression

NAMES = tuple(cases(1))
both_modes = pytest.mark.parametrize("check_vma", [True, False])


def gaussian(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def weights(shape):
    """Integers in [-2, 2], other ones on each rank: cotangents that e4m3 keeps and no two ranks share."""
    flat = (np.arange(np.prod(shape)) * 7) % 5 - 2
    return jnp.roll(jnp.asarray(flat.reshape(shape), jnp.float32), lax.axis_index("tp"), 0)


def reference(name, x, check_vma):
    """As by jax.lax, around two of its mistakes.

    all_to_all fails to transpose if split and concatenated axes differ and are not tiled; without check_vma JAX 0.10
    transposes an all_gather to "invarying" to a slice, as if all ranks had the same cotangent.
    """
    function, options = cases(4)[name]
    if "to" in options and not check_vma:
        return lax.all_gather(x, "tp", **{**options, "to": "varying"})
    if function == "all_to_all" and not options.get("tiled"):
        moved = lax.all_to_all(jnp.moveaxis(x, options["split_axis"], 0), "tp", 0, 0)
        return jnp.moveaxis(moved, 0, options["concat_axis"])
    return call_lax(name, x)


@both_modes
def test_gradients_equal_those_of_lax(check_vma):
    """Taken inside and outside shard_map, of every collective, exactly: the codec keeps small integers."""
    ranks = 4

    def loss(call, x, name):
        y = call(name, x)
        return jnp.sum(weights(y.shape) * y)

    def inside(call, x):
        return {name: jax.grad(lambda x, name=name: loss(call, x, name))(x[0])[None] for name in NAMES}

    def total(call, x):
        return lax.psum(sum(loss(call, x[0], name) for name in NAMES[::2]), "tp")

    def exact_call(name, x):
        return reference(name, x, check_vma)

    def gradients(x):
        results = []
        for call in (exact_call, lambda name, x: call_taco(name, x, compression=compression(EXACT))):
            on = {"mesh": mesh(tp=ranks), "in_specs": P("tp"), "check_vma": check_vma}
            local = jax.shard_map(lambda x, call=call: inside(call, x), out_specs=P("tp"), **on)
            outside = jax.grad(jax.shard_map(lambda x, call=call: total(call, x), out_specs=P(), **on))
            results.append((local(x), outside(x)))
        return tuple(results)

    x = np.random.default_rng(0).integers(-2, 3, (ranks, 2 * ranks, ranks, 3)).astype(np.float32)
    exact, compressed = jax.jit(gradients)(x)
    chex.assert_trees_all_equal(exact, compressed)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(exact))


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8])
def test_the_gradient_of_a_summed_product_is_counted_once(tp):
    """loss = psum(w x), x = 0..7 (padded to the ranks): 28 on every rank, with replicas over dp where they fit."""
    on = mesh(dp=2, tp=tp) if tp <= 4 else mesh(tp=tp)
    x = np.resize(np.r_[np.arange(8.0), np.zeros(-8 % tp)], (8 + -8 % tp,)).astype(np.float32)
    codec = compression(EXACT)

    def loss(w, x, enter):
        h = taco_jax.pvary(w, "tp", compression=codec) if enter else w
        return taco_jax.psum(jnp.sum(h * x), "tp", compression=codec)

    def by_lax(w, x):
        return lax.psum(jnp.sum(w * x), "tp")

    def gradients(w, x):
        results = {}
        for check_vma in (True, False):
            for enter in (True, False):
                options = {"mesh": on, "in_specs": (P(), P("tp")), "check_vma": check_vma}
                mapped = jax.shard_map(lambda w, x, e=enter: loss(w, x, e), out_specs=P(), **options)
                results["outside", check_vma, enter] = jax.grad(mapped)(w, x)
                of_loss = jax.grad(lambda w, x, e=enter: loss(w, x, e))
                spec = P() if check_vma else P("tp")
                shape = () if check_vma else (1,)
                inside = jax.shard_map(lambda w, x, g=of_loss, s=shape: g(w, x).reshape(s), out_specs=spec, **options)
                results["inside", check_vma, enter] = inside(w, x)
        local = jax.shard_map(
            lambda w, x: jax.grad(by_lax)(w, x)[None],
            mesh=on,
            in_specs=(P(), P("tp")),
            out_specs=P("tp"),
            check_vma=False,
        )
        return results, local(w, x)

    results, local = jax.jit(gradients)(jnp.float32(3.0), x)
    for (where, check_vma, _), gradient in results.items():
        if where == "inside" and not check_vma:
            # lax's convention there: the local part times the number of ranks.
            chex.assert_trees_all_equal(gradient, local)
        else:
            assert float(gradient) == 28.0
            assert_equal_on_all_ranks(gradient)


def test_directions_have_codecs_of_their_own():
    """Forward exact and backward int8, and the other way round; cotangents of any size come back with codec error."""
    ranks = 4
    variants = {
        "backward": Compression(None, INT8, min_bytes=0),
        "forward": Compression(INT8, None, min_bytes=0),
    }

    def layer(x, w, c):
        return taco_jax.psum(taco_jax.pvary(x, "tp", compression=c) * w, "tp", compression=c)

    def both(x, w, ct):
        results = {}
        for name, c in variants.items():
            y, pull = jax.vjp(lambda x, c=c: layer(x, w[0], c), x)
            results[name] = y, pull(ct)[0]
        y, pull = jax.vjp(lambda x: lax.psum(x * w[0], "tp"), x)
        return results, (y, pull(ct)[0])

    x, ct, w = gaussian(4096), gaussian(4096, seed=1), gaussian(ranks, 4096, seed=2)
    compiled = spmd(both, mesh(tp=ranks), (P(), P("tp"), P()), P()).lower(x, w, ct).compile()
    for size in (1.0, 1e-6, 1e4):
        results, (y, gradient) = compiled(x, w, ct * np.float32(size))
        assert_equal_on_all_ranks(results)
        chex.assert_trees_all_equal(results["backward"][0], y)
        chex.assert_trees_all_equal(results["forward"][1], gradient)
        for approximate, exact in ((results["forward"][0], y), (results["backward"][1], gradient)):
            assert abs(oracles.snr_db(exact, approximate) - 40.5) <= 0.8


@both_modes
def test_empty_arrays_have_empty_gradients(check_vma):
    def gradient(x):
        return jax.grad(lambda x: jnp.sum(taco_jax.psum(x, "tp", compression=compression(FP8)) ** 2))(x)

    y = spmd(gradient, mesh(tp=2), P(None, "tp"), P(None, "tp"), check_vma)(np.zeros((0, 16), np.float32))
    chex.assert_shape(y, (0, 16))


LAYERS, RANKS, WIDTH = 3, 2, 256


def stack(policy, x, w, scales):
    """Loss of LAYERS residual layers of sharded weights, scanned; policy None does not recompute."""
    options = {"compression": compression(TACO)}

    def layer(x, inputs):
        w, state = inputs
        h = taco_jax.pvary(x, "tp", scales=state, name="mlp", **options)
        y = taco_jax.psum(jnp.tanh(h * w), "tp", scales=state, name="mlp", **options)
        return x + jnp.tanh(y), None

    body = layer if policy is None else jax.checkpoint(layer, policy=policy)
    y, _ = lax.scan(body, x, (w, scales))
    return jnp.sum(jnp.sin(y))


def stack_arguments():
    scales = taco_jax.init_scales({"mlp": "taco"}, stack=(LAYERS,))["mlp"].at[..., 0].set(4.0)
    return gaussian(8, WIDTH), gaussian(LAYERS, RANKS, WIDTH, seed=1), scales


POLICIES = {
    "none": (None, 2),
    "save_payloads": (taco_jax.save_payloads(), 2),
    "nothing": (jax.checkpoint_policies.nothing_saveable, 3),
}


def test_remat_keeps_the_payload_and_repeats_no_collective():
    """A layer has two exchanges, psum forward and pvary backward; forgetting the payload costs a third."""
    x, w, scales = stack_arguments()
    specs = (P(), P(None, "tp"), P())
    results = {}
    for name, (policy, exchanges) in POLICIES.items():

        def gradients(x, w, scales, policy=policy):
            of = jax.grad(lambda *args: stack(policy, *args), argnums=(0, 1, 2))
            dx, dw, seen = of(x, w[:, 0], scales)
            return dx, dw[:, None], seen

        compiled = spmd(gradients, mesh(tp=RANKS), specs, specs).lower(x, w, scales).compile()
        found = collectives(compiled.as_text())
        assert found["all-to-all", "u8"] == found["all-gather", "u8"] == exchanges, name
        results[name] = dx, dw, seen = compiled(x, w, scales)
        assert_equal_on_all_ranks((dx, seen))
        # Each layer and direction counted once: hop 1 on both ranks, hop 2 on the halves.
        counts = np.broadcast_to([2.0 * 8 * WIDTH, 8 * WIDTH], (LAYERS, 2, 2))
        chex.assert_trees_all_equal(np.asarray(seen)[..., 1], counts.astype(np.float32))
    # The recomputed activations decode from the same bytes.
    chex.assert_trees_all_close(*results.values(), rtol=1e-5, atol=1e-5)

    def loss(x, w):
        for layer in w:
            x = x + jnp.tanh(jnp.tanh(x * layer).sum(0))
        return jnp.sum(jnp.sin(x))

    dx, dw, _ = results["none"]
    exact_x, exact_w = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, w[:, :, None, :])
    assert oracles.snr_db(exact_x, dx) >= 15 and oracles.snr_db(exact_w[:, :, 0], dw) >= 15


def test_the_saved_residual_is_the_message():
    """Of x, bf16, remat keeps x itself and u8: half the bytes of the result, which is not kept. Without, no x."""
    kept = {}

    def forward(x):
        scales = taco_jax.init_scales({"site": "taco"})["site"]

        def f(x):
            return jnp.sin(taco_jax.psum(x, "tp", compression=compression(TACO), scales=scales))

        for name, g in {"plain": f, "saved": jax.checkpoint(f, policy=taco_jax.save_payloads())}.items():
            _, pull = jax.vjp(g, x)
            kept[name] = [leaf for leaf in jax.tree.leaves(pull) if leaf.size >= 1024]
        return jnp.sum(x)[None]

    jax.eval_shape(
        jax.shard_map(forward, mesh=mesh(tp=4), in_specs=P("tp"), out_specs=P("tp")),
        jax.ShapeDtypeStruct((4, 1024), jnp.bfloat16),
    )
    assert sorted(str(leaf.dtype) for leaf in kept["saved"]) == ["bfloat16", "uint8"]
    assert [leaf.size for leaf in kept["saved"]] == [1024, 1024]
    # Of the result the cosine alone is kept for the backward pass.
    assert [str(leaf.dtype) for leaf in kept["plain"]] == ["bfloat16"]


@both_modes
def test_vmapped_and_tree_gradients(check_vma):
    """Leaves have messages of their own, and a batch of them does too."""

    def loss(x):
        y = taco_jax.psum(x, "tp", compression=compression(EXACT))
        z = jax.vmap(lambda row: taco_jax.psum(row, "tp", compression=compression(EXACT)))(x["a"])
        return jnp.sum(y["a"] * 2) + jnp.sum(y["b"]) + jnp.sum(z)

    def gradient(x):
        return jax.tree.map(lambda leaf: leaf[None], jax.grad(loss)(jax.tree.map(lambda leaf: leaf[0], x)))

    x = {"a": np.ones((2, 3, 32), np.float32), "b": np.ones((2, 5), np.float32)}
    result = spmd(gradient, mesh(tp=2), P("tp"), P("tp"), check_vma)(x)
    factor = 1 if check_vma else 2
    expected = {"a": np.full((2, 3, 32), 3.0 * factor, np.float32), "b": np.full((2, 5), 1.0 * factor, np.float32)}
    chex.assert_trees_all_equal(result, expected)
