"""The collectives' values: any shape and group, equal bits on all ranks, exact where they say so, uint8 on the wire."""

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from meshes import P, assert_equal_on_all_ranks, collectives, copies, mesh, spmd

import taco_jax
from taco_jax import Codec, Compression

PRESETS = ("taco", "taco_block", "fp8", "int8")
# dB of a two-hop all-reduce of Gaussian values, less a margin for small samples: PAPER section 4, item 5.
BUDGET = {"taco": 27.5, "taco_block": 27.8, "fp8": 27.8, "int8": 39.0}


def compression(name: str, **changes) -> Compression:
    return Compression.named(name, **{"min_bytes": 0, **changes})


def psum_over(on, axes, name="taco_block", check_vma=True, **changes):
    """Jitted all-reduce of x[rank] over `axes`, with scales (alpha 1) where the codec wants them."""
    setting = compression(name, **changes)
    scales = taco_jax.init_scales({"s": setting})["s"] if setting.is_adaptive else None
    return spmd(
        lambda x: taco_jax.psum(x[0], axes, compression=setting, scales=scales, name="s"), on, P(axes), P(), check_vma
    )


def gaussian(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def snr_db(want, got) -> float:
    want, got = np.asarray(want, np.float64), np.asarray(got, np.float64)
    noise = np.sum((want - got) ** 2)
    return float(10 * np.log10(np.sum(want**2) / noise)) if noise else np.inf


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_c1_all_reduce_noise_does_not_grow_with_the_group_and_bits_are_equal(name, ranks):
    x = gaussian(ranks, 64, 1024)
    for check_vma in (True, False):
        y = psum_over(mesh(tp=ranks), "tp", name, check_vma)(x)
        assert snr_db(x.astype(np.float64).sum(0), y) > BUDGET[name]
        assert_equal_on_all_ranks(y)


@pytest.mark.parametrize(
    ("ranks", "shape"), [(4, (10,)), (3, (5, 100)), (6, (7, 1)), (8, (1000,)), (4, ()), (6, (896,))]
)
def test_c7_any_shape_and_group_size(ranks, shape):
    x = gaussian(ranks, *shape, seed=1)
    y = psum_over(mesh(tp=ranks), "tp", "int8")(x)
    chex.assert_shape(y, shape)
    # int8 with a scale per block: a step of amax / 127 per rounding, of the parts and of the sum, over sqrt(block) ...
    amax = np.abs(x).max() * np.sqrt(ranks) * 12
    np.testing.assert_allclose(np.asarray(y), x.astype(np.float64).sum(0), atol=amax / 127)
    assert y.dtype == jnp.float32
    if x[0].size > 100:
        assert snr_db(x.sum(0, dtype=np.float64), y) > BUDGET["int8"]


def test_n15_empty_arrays_pass_with_their_gradient():
    on = mesh(tp=4)
    x = np.zeros((4, 0, 8), np.float32)
    chex.assert_shape(psum_over(on, "tp")(x), (0, 8))
    loss = spmd(lambda x: jnp.sum(taco_jax.psum(x[0], "tp")), on, P("tp"), P())
    chex.assert_shape(jax.grad(loss)(x), (4, 0, 8))


def test_c8_a_group_of_one_passes_every_bit():
    x = gaussian(1, 33, 100, dtype=ml_dtypes.bfloat16)
    for name in PRESETS:
        assert np.asarray(psum_over(mesh(tp=1), "tp", name)(x)).tobytes() == x[0].tobytes()


@pytest.mark.parametrize("parts", [[448.0, 18.0], [200.0] * 4])
@pytest.mark.parametrize("name", ["taco_block", "fp8", "int8"])
def test_n16_sums_beyond_the_format_are_right(parts, name):
    x = np.zeros((len(parts), 256), np.float32)
    x[:, 5] = parts
    y = psum_over(mesh(tp=len(parts)), "tp", name)(x)
    assert float(y[5]) == pytest.approx(sum(parts), rel=0.09 if name == "taco_block" else 0.07)
    chex.assert_tree_all_finite(y)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("name", PRESETS)
def test_n8_a_bad_value_of_one_rank_marks_its_block_on_every_rank(name, bad):
    x = gaussian(4, 4 * 512)
    x[2, 300] = bad
    y = psum_over(mesh(tp=4), "tp", name)(x)
    assert_equal_on_all_ranks(y)
    marked = np.isnan(np.asarray(y))
    np.testing.assert_array_equal(np.flatnonzero(marked), np.arange(256, 384))
    assert snr_db(x.sum(0, dtype=np.float64)[~marked], np.asarray(y)[~marked]) > BUDGET[name] - 1


def test_c3_parts_of_different_size_keep_their_own_precision():
    """Rank r holds data * 10^r in a region of its own: each region's error is relative to its own size."""
    x = np.zeros((4, 4, 1024), np.float32)
    for rank in range(4):
        x[rank, rank] = gaussian(1024, seed=rank) * 10.0 ** (3 * rank - 4)
    y = np.asarray(psum_over(mesh(tp=4), "tp")(x))
    for rank in range(4):
        assert snr_db(x[rank, rank], y[rank]) > BUDGET["taco_block"] - 0.5


@pytest.mark.parametrize(("name", "low", "high"), [("taco_block", 10.0, 15.0), ("int8", 22.0, 27.0)])
def test_n17_partials_that_cancel_cost_what_they_must(name, low, high):
    """|sum| = 0.3 |part| over 8 ranks: about 12 dB for e4m3, 24 dB for int8 (PAPER section 4, item 5)."""
    x = gaussian(8, 64, 1024).astype(np.float64)
    x -= x.mean(0)
    total = gaussian(64, 1024, seed=9) * 0.3 * np.sqrt(np.mean(x**2))
    x = (x + total / 8).astype(np.float32)
    assert low < snr_db(x.astype(np.float64).sum(0), psum_over(mesh(tp=8), "tp", name)(x)) < high


def test_c12_exact_values_with_scales_of_one_and_two():
    """amax 448 and 896 with power-of-two scales: every value is on its rank's grid, and so is the sum."""
    setting = Compression(Codec("e4m3", 32, scale_dtype="e8m0"), None, min_bytes=0)
    x = np.zeros((2, 64), np.float32)
    x[0, :3], x[1, :3] = [448, 4, 1], [896, 16, 2]
    x[:, 32:35] = x[:, :3]
    f = spmd(lambda x: taco_jax.psum(x[0], "tp", compression=setting), mesh(tp=2), P("tp"), P())
    y = np.asarray(f(x))
    # The sum's scale is 4: 1344 = 4 * 336 rounds to 4 * 320 or 352; 20 = 4 * 5 and 3 = 4 * 0.75 are exact.
    np.testing.assert_array_equal(y[1:3], [20, 3])
    assert abs(y[0] - 1344) <= 64
    text = f.lower(x).compile().as_text()
    assert collectives(text) == {("all-to-all", "u8"): 1, ("all-gather", "u8"): 1}


@pytest.mark.parametrize("name", PRESETS)
def test_chunks_change_no_bit(name):
    x = gaussian(4, 1600)
    whole, cut = (psum_over(mesh(tp=4), "tp", name, chunks=chunks)(x) for chunks in (1, 3))
    chex.assert_trees_all_equal(whole, cut)
    assert np.asarray(cut).tobytes() == np.asarray(psum_over(mesh(tp=4), "tp", name, chunks=3)(x)).tobytes()


@pytest.mark.parametrize("shape", [(12, 100), (5, 7, 130), (4, 256)])
@pytest.mark.parametrize("split_dim", [0, 1, -1])
def test_split_dim_splits_one_axis_and_merges_none(shape, split_dim):
    x = gaussian(4, *shape, seed=2)
    setting = compression("int8")
    f = spmd(lambda x: taco_jax.psum(x[0], "tp", compression=setting, split_dim=split_dim), mesh(tp=4), P("tp"), P())
    y = f(x)
    chex.assert_shape(y, shape)
    assert snr_db(x.sum(0, dtype=np.float64), y) > BUDGET["int8"] - 1
    assert_equal_on_all_ranks(y)


def test_partial_manual_shard_map_is_right_and_sends_uint8():
    """tp manual, dp left to XLA; it gathers what dp splits around any all_to_all (lax's too), so only types count."""
    on = mesh(dp=2, tp=4)
    x = gaussian(4, 8, 4, 256)
    setting = compression("taco_block")
    f = jax.jit(
        jax.shard_map(
            lambda x: taco_jax.psum(x[0], "tp", compression=setting, split_dim=1),
            mesh=on,
            in_specs=P("tp"),
            out_specs=P(),
            axis_names={"tp"},
        )
    )
    for spec in (P("tp"), P("tp", "dp")):
        placed = jax.device_put(x, jax.sharding.NamedSharding(on, spec))
        assert snr_db(x.sum(0, dtype=np.float64), f(placed)) > BUDGET["taco_block"]
        travelling = collectives(f.lower(placed).compile().as_text())
        assert {dtype for _, dtype in travelling} == {"u8"}
        if spec == P("tp"):
            assert travelling == {("all-to-all", "u8"): 1, ("all-gather", "u8"): 1}


def test_several_axes_form_one_group_in_row_major_order():
    x = gaussian(6, 1000)
    on = mesh(a=2, b=3)
    both, swapped = (psum_over(on, axes, "int8")(x) for axes in (("a", "b"), ("b", "a")))
    for y in (both, swapped):
        assert snr_db(x.sum(0, dtype=np.float64), y) > BUDGET["int8"]
        assert_equal_on_all_ranks(y)


def test_pytrees_integers_and_small_messages():
    on = mesh(tp=4)
    setting = compression("taco_block", min_bytes=1024)
    x = {
        "large": gaussian(4, 512),
        "small": gaussian(4, 255),
        "ids": np.arange(4 * 512, dtype=np.int32).reshape(4, 512),
    }
    f = spmd(lambda x: taco_jax.psum(jax.tree.map(lambda a: a[0], x), "tp", compression=setting), on, P("tp"), P())
    y = f(x)
    want = spmd(lambda x: lax.psum(jax.tree.map(lambda a: a[0], x), "tp"), on, P("tp"), P())(x)
    chex.assert_trees_all_equal({k: y[k] for k in ("small", "ids")}, {k: want[k] for k in ("small", "ids")})
    assert not np.array_equal(y["large"], want["large"])
    assert collectives(f.lower(x).compile().as_text())["all-to-all", "u8"] == 1


def test_c15_alternating_shapes_are_fine():
    on = mesh(tp=2)
    f = psum_over(on, "tp", "taco_block", min_bytes=4096)
    for columns in (8, 4096, 8, 2048, 4096):
        x = gaussian(2, columns, seed=columns)
        y = f(x)
        assert snr_db(x.sum(0, dtype=np.float64), y) > (27 if columns >= 1024 else 120)


def test_psum_of_a_replicated_array_adds_its_copies():
    on = mesh(a=2, b=2)
    x = gaussian(1000)
    f = spmd(lambda x: taco_jax.psum(x, ("a", "b"), compression=compression("int8")), on, P(), P())
    assert snr_db(4.0 * x, f(x)) > BUDGET["int8"]


def one_hop(op, x, setting):
    return {
        "psum_scatter": lambda: taco_jax.psum_scatter(x, "tp", scatter_dimension=1, tiled=True, compression=setting),
        "psum_scatter_drop": lambda: taco_jax.psum_scatter(x[:, :4], "tp", scatter_dimension=1, compression=setting),
        "all_gather": lambda: taco_jax.all_gather(x, "tp", axis=1, tiled=True, compression=setting),
        "all_gather_new": lambda: taco_jax.all_gather(x, "tp", axis=-1, compression=setting),
        "all_to_all": lambda: taco_jax.all_to_all(
            x, "tp", split_axis=1, concat_axis=2, tiled=True, compression=setting
        ),
        "all_to_all_swap": lambda: taco_jax.all_to_all(
            x[:, :4], "tp", split_axis=1, concat_axis=0, compression=setting
        ),
        "ppermute": lambda: taco_jax.ppermute(x, "tp", perm=[(0, 1), (1, 2)], compression=setting),
    }[op]()


def numpy_hop(op, x):
    """The same on x[rank, ...] in float64."""
    x = x.astype(np.float64)
    ranks = range(len(x))
    return {
        "psum_scatter": lambda: np.split(x.sum(0), 4, axis=1),
        "psum_scatter_drop": lambda: [x.sum(0)[:, r] for r in ranks],
        "all_gather": lambda: [np.concatenate(list(x), axis=1)] * 4,
        "all_gather_new": lambda: [np.stack(list(x), axis=-1)] * 4,
        "all_to_all": lambda: [np.concatenate([np.split(x[s], 4, axis=1)[r] for s in ranks], axis=2) for r in ranks],
        "all_to_all_swap": lambda: [np.stack([x[s][:, r] for s in ranks], axis=0) for r in ranks],
        "ppermute": lambda: [np.zeros_like(x[0]), x[0], x[1], np.zeros_like(x[0])],
    }[op]()


OPS = (
    "psum_scatter", "psum_scatter_drop", "all_gather", "all_gather_new", "all_to_all", "all_to_all_swap", "ppermute",
)  # fmt: skip


@pytest.mark.parametrize("op", OPS)
def test_one_hop_operations_against_numpy(op):
    x = gaussian(4, 3, 8, 50, seed=7)
    if op.endswith(("drop", "swap")):
        x = x[:, :, :4]
    for name, budget in (("none", 120.0), ("int8", 41.5), ("taco_block", 30.5)):
        setting = compression(name)
        f = spmd(lambda x, s=setting: one_hop(op, x[0], s)[None], mesh(tp=4), P("tp"), P("tp"))
        got, want = np.asarray(f(x)), np.stack(numpy_hop(op, x))
        chex.assert_shape(got, want.shape)
        assert snr_db(want, got) > budget, name
    assert {dtype for _, dtype in collectives(f.lower(x).compile().as_text())} == {"u8"}


def test_all_gather_to_invarying_is_equal_on_all_ranks():
    x = gaussian(4, 3, 50)
    f = spmd(lambda x: taco_jax.all_gather(x[0], "tp", to="invarying"), mesh(tp=4), P("tp"), P())
    y = f(x)
    assert_equal_on_all_ranks(y)
    assert len(copies(y)) == 4


def test_exact_movement_carries_16_bit_floats_as_they_are():
    x = gaussian(4, 8, 64, dtype=ml_dtypes.bfloat16)
    for op in ("all_gather", "ppermute"):
        f = spmd(lambda x, op=op: one_hop(op, x, compression("none")), mesh(tp=4), P("tp"), P("tp"))
        assert {dtype for _, dtype in collectives(f.lower(x).compile().as_text())} == {"u16"}


def raises(match, f, x=None, on=None, in_specs=None):
    on = on or mesh(tp=4)
    with pytest.raises(ValueError, match=match):
        spmd(f, on, P("tp") if in_specs is None else in_specs, P())(gaussian(4, 8) if x is None else x)


def test_mistakes_are_one_clear_line():
    raises("adaptive codec needs scales", lambda x: taco_jax.psum(x, "tp", compression="taco"))
    raises("no compression is called 'tacos'", lambda x: taco_jax.psum(x, "tp", compression="tacos"))
    raises("must be a multiple of 4", lambda x: taco_jax.psum_scatter(x, "tp", scatter_dimension=0, tiled=True))
    raises("out of range", lambda x: taco_jax.all_gather(x, "tp", axis=5))
    raises("'varying' or 'invarying'", lambda x: taco_jax.all_gather(x, "tp", to="elsewhere"))
    raises("holds no '.'", lambda x: taco_jax.psum(x, "tp", name="layer.1"))
    raises("varies over", lambda x: taco_jax.pvary(x, "tp"))
    both = mesh(a=2, b=2)
    raises(r"varies over \('a',\) only", lambda x: taco_jax.psum(x, ("a", "b")), on=both, in_specs=P("a"))
    scales, setting = taco_jax.init_scales({"s": "taco"})["s"], compression("taco")
    raises("shape", lambda x: taco_jax.psum(x, "tp", compression=setting, scales=scales[None]))
    varied = lambda x: taco_jax.psum(x, "tp", compression=setting, scales=scales + lax.axis_index("tp"))  # noqa: E731
    raises("scales vary", varied)


def test_float64_is_refused_unless_exact():
    with jax.enable_x64(True):
        raises("float64 is not compressed", lambda x: taco_jax.psum(x, "tp"), gaussian(4, 8, dtype=np.float64))


@pytest.mark.parametrize("columns", [1, 127, 1600, 3584, 6283, 13696])
def test_n14_awkward_widths_keep_shape_and_dtype(columns):
    x = gaussian(4, 2, columns, dtype=ml_dtypes.bfloat16)
    y = psum_over(mesh(tp=4), "tp", "taco_block")(x)
    chex.assert_shape(y, (2, columns))
    assert y.dtype == jnp.bfloat16
    if columns > 1:
        assert snr_db(x.astype(np.float64).sum(0), y) > 26.0
