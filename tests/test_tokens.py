"""Blocks along the tokens (`layout="tokens"`) and the residual added while decoding."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracles
import pytest
from collective_cases import EXACT, call_lax, call_taco, cases, compression, is_invariant
from meshes import P, assert_equal_on_all_ranks, mesh, spmd

import taco_jax
from experiments.hlo import read_collectives
from taco_jax import Codec, Compression, wire_bytes
from taco_jax import codec as codecs

NAMES = tuple(cases(1))
CODECS = {
    "taco": Codec("e4m3", 128, "block", "adaptive", layout="tokens"),
    "e8m0": Codec("e5m2", 32, None, scale_dtype="e8m0", layout="tokens"),
    "int8": Codec("int8", 64, "block", layout="tokens"),
}
ALPHA = jnp.float32(2.0)
LAYOUT = ("channels", "implementation")
run = {
    "encode": jax.jit(codecs.encode, static_argnums=1, static_argnames=(*LAYOUT, "observe")),
    "decode": jax.jit(codecs.decode, static_argnums=(1, 3), static_argnames=LAYOUT),
    "decode_sum": jax.jit(codecs.decode_sum, static_argnums=(1, 3), static_argnames=LAYOUT),
}


def turned(x: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Transpose each [rows, columns] tile of the flat last axis."""
    return np.swapaxes(x.reshape(*x.shape[:-1], -1, rows, columns), -1, -2).reshape(x.shape)


@pytest.mark.parametrize("implementation", ["xla", "triton_interpret"])
@pytest.mark.parametrize(("codec", "channels"), [("taco", 3), ("int8", 96), ("e8m0", 3)])
def test_the_bytes_are_those_of_the_transposed_values(codec, channels, implementation):
    """Blocks come one after another in the message, whose bytes are those of `layout="hidden"`."""
    random, codec = np.random.default_rng(channels), CODECS[codec]
    x = random.standard_normal((2, 2 * codec.block * channels)).astype(ml_dtypes.bfloat16)
    hidden, options = dataclasses.replace(codec, layout="hidden"), {"implementation": implementation}
    expected, seen = run["encode"](turned(x, codec.block, channels), hidden, ALPHA, observe=True)
    message, also = run["encode"](x, codec, ALPHA, observe=True, channels=channels, **options)
    np.testing.assert_array_equal(message, expected)
    np.testing.assert_allclose(also, seen, rtol=2e-5)
    y = run["decode"](message, codec, ALPHA, jnp.bfloat16, channels=channels, **options)
    plain = run["decode"](message, hidden, ALPHA, jnp.bfloat16)
    np.testing.assert_array_equal(turned(np.asarray(y), codec.block, channels), plain)
    both = jnp.stack([message, message[::-1]])
    total = run["decode_sum"](both, codec, ALPHA, jnp.bfloat16, channels=channels, **options)
    plain = run["decode_sum"](both, hidden, ALPHA, jnp.bfloat16)
    np.testing.assert_array_equal(turned(np.asarray(total), codec.block, channels), plain)


HIDDEN = Codec("e4m3", 128, "block", "adaptive")
mosaic = pytest.param(
    HIDDEN, 1, "mosaic_gpu_interpret",
    marks=pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="Mosaic GPU's kernels need JAX 0.12"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("codec", "channels", "implementation"),
    [
        (CODECS["taco"], 3, "xla"), (CODECS["taco"], 3, "triton_interpret"), mosaic,
        (Codec("int8", 64, "block"), 1, "triton_interpret"),
    ],
)  # fmt: skip
def test_a_residual_is_added_before_the_rounding(codec, channels, implementation):
    random = np.random.default_rng(0)
    x = random.standard_normal((2, 2 * codec.block * channels)).astype(ml_dtypes.bfloat16)
    residual = (16 * random.standard_normal(x.shape)).astype(ml_dtypes.bfloat16)
    residual[0, 5], residual[1, 7] = np.nan, -np.inf
    message, _ = run["encode"](x, codec, ALPHA, channels=channels)
    options = {"channels": channels, "implementation": implementation}
    y = run["decode"](message, codec, ALPHA, jnp.bfloat16, residual=residual, **options)
    # Sums of so few bits are exact in f32, in whichever order an implementation adds.
    exact = np.asarray(run["decode"](message, codec, ALPHA, jnp.float32, channels=channels))
    exact = exact + residual.astype(np.float32)
    np.testing.assert_array_equal(np.asarray(y, np.float32), exact.astype(ml_dtypes.bfloat16).astype(np.float32))
    rounded = np.asarray(run["decode"](message, codec, ALPHA, jnp.bfloat16, **options), np.float32)
    twice = (rounded + residual.astype(np.float32)).astype(ml_dtypes.bfloat16).astype(np.float32)
    assert (twice != exact.astype(ml_dtypes.bfloat16).astype(np.float32))[np.isfinite(exact)].any()


@pytest.mark.parametrize("chunks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_results_are_laid_out_as_by_lax(chunks):
    """Every collective, on integers that the codec keeps; 96 and 288 tokens of 5 channels."""
    ranks, codec = 3, dataclasses.replace(EXACT, layout="tokens")
    x = np.random.default_rng(0).integers(-2, 3, (ranks, 32 * ranks, ranks, 5)).astype(np.float32)

    def both(x):
        exact = {name: call_lax(name, x[0]) for name in NAMES}
        compressed = {name: call_taco(name, x[0], compression=compression(codec, chunks=chunks)) for name in NAMES}
        lead = {name: (lambda y: y) if is_invariant(name) else (lambda y: y[None]) for name in NAMES}
        return tuple({name: lead[name](y) for name, y in results.items()} for results in (exact, compressed))

    specs = {name: P() if is_invariant(name) else P("tp") for name in NAMES}
    exact, compressed = spmd(both, mesh(tp=ranks), P("tp"), (specs, specs))(x)
    chex.assert_trees_all_equal(exact, compressed)
    assert_equal_on_all_ranks({name: y for name, y in compressed.items() if is_invariant(name)})


def test_the_wire_carries_whole_blocks_of_tokens():
    ranks, codec = 4, CODECS["int8"]
    x = jnp.ones((ranks * 300, 7), jnp.bfloat16)

    def all_reduce(x):
        return taco_jax.psum(x, "tp", compression=compression(codec))

    text = spmd(all_reduce, mesh(tp=ranks), P("tp"), P()).lower(x).compile().as_text()
    found = read_collectives(text, {"tp": ranks})
    assert {c.dtype for c in found} == {"u8"}
    # 300 tokens are 512 on 4 ranks of two blocks of 64; a block sends two bytes more.
    expected = 2 * (ranks - 1) * (128 * 7 + 2 * 7 * 2)
    assert sum(c.bytes_per_step for c in found) == expected == wire_bytes((300, 7), codec, ranks)


@pytest.mark.parametrize("split_dim", [0, -1])
def test_split_dim_is_refused(split_dim):
    """Its rows end with the channels alone, which whole blocks of tokens would pad by the block."""
    options = {"compression": compression(CODECS["int8"]), "split_dim": split_dim}
    reduced = spmd(lambda x: taco_jax.psum(x, "tp", **options), mesh(tp=4), P("tp"), P())
    with pytest.raises(ValueError, match=f"leave split_dim={split_dim} out"):
        jax.eval_shape(reduced, jnp.ones((4 * 512, 8)))


def test_what_tokens_are_for():
    """Eight channels 100 times as large: along the hidden axis they share their scale with the others."""
    random = np.random.default_rng(0)
    x = random.standard_normal((512, 256)).astype(np.float32)
    large = random.choice(256, 8, replace=False)
    x[:, large] *= 100
    ordinary = np.setdiff1d(np.arange(256), large)
    snr = {}
    for layout in ("hidden", "tokens"):
        y = codecs.round_trip(jnp.asarray(x), Codec("int8", 128, layout=layout))
        snr[layout] = oracles.snr_db(x[:, ordinary], np.asarray(y)[:, ordinary])
    # A uniform step of amax / 127 has noise of step^2 / 12: 100 times the amax costs 40 dB.
    assert snr["tokens"] > 40 and snr["hidden"] < 12


def test_too_few_tokens_are_refused():
    x = jnp.ones((4, 8, 96))
    with pytest.raises(
        ValueError, match='8 tokens for 4 ranks are padded to 512, .*use a smaller block or layout="hid'
    ):
        jax.eval_shape(
            spmd(lambda x: taco_jax.psum(x[0], "tp", compression=compression(Codec(layout="tokens"))), mesh(tp=4),
                 P("tp"), P()), x)  # fmt: skip
    with pytest.raises(ValueError, match='layout="tokens" needs scale'):
        Codec("e4m3", 256, "block", "paper", layout="tokens")


@pytest.mark.parametrize("preset", ["none", "taco_block"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_psum_adds_a_residual_and_gives_it_its_cotangent(preset, check_vma):
    on, random = mesh(tp=4), np.random.default_rng(1)
    x, residual = (jnp.asarray(random.standard_normal(s), jnp.bfloat16) for s in ((4, 16, 96), (16, 96)))
    weights = jnp.asarray(random.standard_normal((16, 96)), jnp.float32)

    def loss(x, residual, fused):
        options = {"compression": Compression.named(preset, min_bytes=0), "name": "mlp"}
        total = taco_jax.psum(x[0], "tp", **options, **({"residual": residual} if fused else {}))
        y = total if fused else total + residual
        return jnp.vdot(y.astype(jnp.float32), weights), y

    def both(x, residual):
        return [jax.value_and_grad(functools.partial(loss, fused=f), (0, 1), has_aux=True)(x, residual) for f in (1, 0)]

    results = spmd(both, on, (P("tp"), P()), [((P(), P()), (P("tp"), P()))] * 2, check_vma=check_vma)(x, residual)
    ((_, fused), grads), ((_, apart), expected) = results
    chex.assert_trees_all_equal(grads, expected)
    assert float(jnp.abs(grads[1].astype(jnp.float32)).sum()) > 0
    # One rounding to bf16 where there were two.
    np.testing.assert_allclose(np.float32(fused), np.float32(apart), rtol=2.0**-7, atol=2.0**-7)
    assert np.array_equal(fused, apart) == (preset == "none")


def test_a_residual_that_does_not_fit_is_refused():
    on, x = mesh(tp=4), jnp.ones((4, 8))

    def reduced(x, residual):
        return taco_jax.psum(x, "tp", residual=residual)

    with pytest.raises(ValueError, match=r"the residual is float32\[8\], the array float32\[1, 8\]"):
        jax.eval_shape(spmd(reduced, on, (P("tp"), P()), P()), x, jnp.ones(8))
    with pytest.raises(ValueError, match="the residual varies over .*tp.*; it must be equal on all ranks"):
        jax.eval_shape(spmd(reduced, on, (P("tp"), P("tp")), P()), x, x)
