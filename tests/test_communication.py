"""The communication table of compiled programs, against their plan and against numbers counted by hand."""

import dataclasses
import functools
import io
import json
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from rich.console import Console

import taco_jax
from experiments.communication import (
    Collective,
    CommunicationMismatch,
    check,
    communication_json,
    communication_rows,
    communication_table,
    communication_text,
    planned_collectives,
    read_collectives,
)

MESH = {"dp": 2, "pp": 2, "tp": 2}


def mesh():
    return jax.make_mesh((2, 2, 2), ("dp", "pp", "tp"), axis_types=(AxisType.Auto,) * 3)


def both(function, *arguments, sizes=MESH):
    """Return (compiled, planned) collectives of a function."""
    traced = jax.jit(function).trace(*arguments)
    return read_collectives(traced.lower().compile().as_text(), sizes), planned_collectives(traced.jaxpr, sizes)


def sums(collectives):
    """Return {(op, axis, site, direction, dtype): (count, bytes per step)}, counts and bytes as plain numbers."""
    out = {}
    for c in collectives:
        key = (c.op, c.axis, c.site, c.direction, c.dtype)
        count, size = out.get(key, (0, 0))
        out[key] = (count + float(c.count), size + float(c.bytes_per_step))
    return out


def compressed_sum(x, op, site, direction, *, scale_bytes=0, chunks=1):
    """An all-reduce over tp = 2 in two uint8 hops; `scale_bytes` of metadata per part that is sent."""

    def encode(part):
        codes = lax.bitcast_convert_type(part.astype(jnp.float8_e4m3fn), jnp.uint8)
        return jnp.pad(codes, [(0, 0)] * (part.ndim - 1) + [(0, scale_bytes)])

    def decode(message):
        codes = message[..., : message.shape[-1] - scale_bytes]
        return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)

    with jax.named_scope(f"taco.{op}.{site}.{direction}"):
        summed = []
        for piece in jnp.split(x.reshape(2, -1), chunks, axis=1):
            received = lax.all_to_all(encode(piece), "tp", 0, 0, tiled=True)
            part = decode(received).sum(0)
            summed.append(decode(lax.all_gather(encode(part), "tp", to="invarying")))
        return jnp.concatenate(summed, axis=1).reshape(x.shape)


@jax.custom_vjp
def leave(x):
    return compressed_sum(x, "psum", "mlp", "forward")


leave.defvjp(lambda x: (leave(x), None), lambda _, ct: (lax.pcast(ct, "tp", to="varying"),))


@jax.custom_vjp
def enter(x):
    return lax.pcast(x, "tp", to="varying")


enter.defvjp(lambda x: (enter(x), None), lambda _, ct: (compressed_sum(ct, "pvary", "mlp", "backward"),))


def pipeline_step(weights, inputs):
    """Two stages of two layers on 3 microbatches in 4 ticks, bubbles skipped, layers rematerialised."""

    def layer(h, w):
        return h + jnp.sin(leave(jnp.tanh(enter(h) @ w) @ w.T)), None

    def loss(weights, inputs):
        stage = lax.axis_index("pp")

        def tick(received, t):
            x = jnp.where(stage == 0, lax.dynamic_index_in_dim(inputs, jnp.clip(t, 0, 2), keepdims=False), received)
            with jax.named_scope("share.3.4"):
                y = lax.cond(
                    (t >= stage) & (t - stage < 3),
                    lambda x: lax.scan(jax.checkpoint(layer), x, weights)[0],
                    lambda x: x,
                    x,
                )
            with jax.named_scope("taco.ppermute.stage.forward"):
                return lax.ppermute(y, "pp", [(0, 1)]), jnp.sum(y**2)

        start = lax.pcast(jnp.zeros(inputs.shape[1:]), ("dp", "pp"), to="varying")
        return lax.scan(tick, start, jnp.arange(4))[1].sum()

    varied = lax.pcast(weights, "dp", to="varying"), lax.pcast(inputs, "pp", to="varying")
    value, gradient = jax.value_and_grad(loss)(*varied)
    with jax.named_scope("taco.psum.gradients.backward"):
        gradient = lax.psum(gradient, "dp")
    return lax.psum(value, ("dp", "pp")), gradient


@functools.cache
def pipeline():
    spec = P("pp", None, "tp")
    step = jax.shard_map(pipeline_step, mesh=mesh(), in_specs=(spec, P(None, "dp")), out_specs=(P(), spec))
    return both(step, jnp.ones((4, 16, 16)), jnp.ones((3, 8, 16)))


def test_pipelined_training_step_counts_loops_bubbles_and_recomputation():
    compiled, planned = pipeline()
    # A stage sees f32[4, 16] of a microbatch: 64 codes, of which each hop sends 32 to the other device. 3 of the 4
    # ticks are valid, times 2 layers: 6 sums forward and 6 backward; sin(.) makes remat repeat the forward ones.
    expected = {
        ("all-to-all", "tp", "mlp", "forward", "u8"): (12, 12 * 32),
        ("all-gather", "tp", "mlp", "forward", "u8"): (12, 12 * 32),
        ("all-to-all", "tp", "mlp", "backward", "u8"): (6, 6 * 32),
        ("all-gather", "tp", "mlp", "backward", "u8"): (6, 6 * 32),
        ("collective-permute", "pp", "stage", "forward", "f32"): (4, 4 * 256),
        ("collective-permute", "pp", "stage", "backward", "f32"): (4, 4 * 256),
        # f32[2, 16, 8] of gradients over 2 devices, a scalar over 4.
        ("all-reduce", "dp", "gradients", "backward", "f32"): (1, 1024),
        ("all-reduce", "dp,pp", "other", "update", "f32"): (1, 6),
    }
    assert sums(planned) == expected
    assert sums(compiled) == expected
    check(compiled, planned, {"mlp": ("forward", "backward")})


def test_nested_scans_multiply_and_a_loop_of_unknown_length_is_refused():
    def nested(x):
        def inner(c, _):
            return lax.psum(jnp.sin(c), "tp") / 2, None

        return lax.scan(lambda c, _: (lax.scan(inner, c, length=3)[0], None), x, length=5)[0]

    def unknown(x):
        return lax.while_loop(lambda c: c.sum() < 100, lambda c: lax.psum(jnp.sin(c), "tp"), x)

    wrapped = functools.partial(jax.shard_map, mesh=mesh(), in_specs=P(), out_specs=P(), check_vma=False)
    compiled, planned = both(wrapped(nested), jnp.ones((7, 5)))
    # 140 bytes, 15 times, 2 * (2 - 1) / 2 of them on the wire.
    expected = {("all-reduce", "tp", "other", "update", "f32"): (15, 15 * 140)}
    assert sums(compiled) == sums(planned) == expected

    traced = jax.jit(wrapped(unknown)).trace(jnp.ones(4))
    with pytest.raises(ValueError, match="contains a collective"):
        planned_collectives(traced.jaxpr, MESH)
    with pytest.raises(ValueError, match=r"%while[.\d]* .* trip count"):
        read_collectives(traced.lower().compile().as_text(), MESH)


@functools.cache
def with_scale_bytes():
    def step(x):
        y = compressed_sum(x, "psum", "mlp", "forward", scale_bytes=4, chunks=3)
        with jax.named_scope("taco.all_gather.kept.forward"):
            bits = lax.bitcast_convert_type(y.astype(jnp.bfloat16), jnp.uint16)
            kept = lax.all_gather(lax.pcast(bits, "pp", to="varying"), "pp", to="invarying")
        with jax.named_scope("taco.psum.narrow.forward"):
            narrow = lax.psum(lax.pcast(y, "dp", to="varying").astype(jnp.bfloat16), "dp")
        return kept, narrow

    step = jax.shard_map(step, mesh=mesh(), in_specs=P(None, "tp"), out_specs=(P(), P()))
    return both(step, jnp.ones((32, 12)))


def test_bf16_equivalent_is_that_of_the_tensor_without_scale_bytes():
    compiled, planned = with_scale_bytes()
    rows = {(r.op, r.site): r for r in communication_rows(compiled, planned)}
    # f32[32, 6]: 192 values, in 3 chunks of 2 x 32 codes + 4 bytes. Half of each message leaves; bf16 would send 192.
    hop = rows["all-to-all", "mlp"]
    assert (hop.count, hop.bytes_per_step, hop.bf16_bytes_per_step) == (3, 3 * 36, 192)
    hop = rows["all-gather", "mlp"]
    assert (hop.count, hop.bytes_per_step, hop.bf16_bytes_per_step) == (3, 3 * 36, 192)
    # 16-bit values moved as uint16 are what bf16 would be; XLA:CPU widens a bf16 sum to f32, a GPU does not.
    kept, narrow = rows["all-gather", "kept"], rows["all-reduce", "narrow"]
    assert (kept.dtype, kept.compressed, kept.bytes_per_step, kept.bf16_bytes_per_step) == ("u16", False, 384, 384)
    assert (narrow.dtype, narrow.bytes_per_step, narrow.bf16_bytes_per_step) == ("f32", 768, 384)
    # Without a plan, each byte of a message stands for two.
    assert {r.op: r.bf16_bytes_per_step for r in communication_rows(compiled) if r.compressed} == {
        "all-to-all": 216,
        "all-gather": 216,
    }


@pytest.mark.parametrize(("preset", "part"), [("taco_block", 6 * (128 + 2)), ("paper", 3 * (256 + 4 + 4))])
def test_library_messages_are_payload_and_scales_and_nothing_else(preset, part):
    compression = dataclasses.replace(taco_jax.Compression.named(preset), min_bytes=0)
    psum = functools.partial(taco_jax.psum, axis_name="tp", compression=compression, name="mlp")
    step = jax.shard_map(psum, mesh=mesh(), in_specs=P(None, "tp"), out_specs=P())
    compiled, planned = both(step, jnp.ones((16, 192), jnp.bfloat16))
    # bf16[16, 96]: each of 2 parts is 768 codes and the scales of their blocks, of which one part leaves, twice.
    check(compiled, planned, {"mlp": ("forward",)})
    sent = {r.op: (r.count, r.bytes_per_step, r.bf16_bytes_per_step) for r in communication_rows(compiled, planned)}
    assert sent == {"all-to-all": (1, part, 1536), "all-gather": (1, part, 1536)}


def with_operands(collectives, site, *operands):
    return [dataclasses.replace(c, operands=operands) if c.site == site else c for c in collectives]


def test_check_names_what_disagrees():
    compiled, planned = with_scale_bytes()
    check(compiled, planned, {"mlp": ("forward",)})
    with pytest.raises(CommunicationMismatch, match=r"site 'mlp' forward on axis tp: the plan .* sends .* u8 72 bytes"):
        check(with_operands(compiled, "mlp", ("u8", 144)), planned, {"mlp": ("forward",)})
    with pytest.raises(CommunicationMismatch, match="sends all-to-all f32 144 bytes"):
        check(with_operands(compiled, "mlp", ("f32", 288)), planned, {"mlp": ("forward",)})
    with pytest.raises(CommunicationMismatch, match="compression is off, but uint8"):
        check(compiled, planned, {})
    with pytest.raises(CommunicationMismatch, match=r"site 'mlp' backward .* nothing is sent there; .*'mlp forward'"):
        check(compiled, planned, {"mlp": ("forward", "backward")})
    # 384 bytes per site are exact here: fine below min_bytes, a mismatch otherwise.
    both_sites = {"mlp": ("forward",), "narrow": ("forward",)}
    check(compiled, planned, both_sites, min_bytes=385)
    with pytest.raises(CommunicationMismatch, match="site 'narrow' forward is to be compressed, but the step sends"):
        check(compiled, planned, both_sites, min_bytes=384)
    rest = [[c for c in side if c.site == "narrow"] for side in (compiled, planned)]
    with pytest.raises(CommunicationMismatch, match="smaller than min_bytes = 1000"):
        check(*rest, {"narrow": ("forward",)}, min_bytes=1000)


def test_check_compares_the_axis_where_sites_were_combined():
    def message(name, size):
        return Collective("all-gather", "tp", 2, (("u8", size),), Fraction(1), name)

    plan = [message("taco.psum.a.forward", 30), message("taco.psum.b.forward", 30)]
    compiled = [message("jit(f)/(taco.psum.a.forward/all_gather:taco.psum.b.forward/all_gather)", 60)]
    check(compiled, plan, {"a": ("forward",), "b": ("forward",)})
    with pytest.raises(CommunicationMismatch, match="all sites on axis tp"):
        check(compiled, plan[:1], {"a": ("forward",)})


def test_json_and_tables_hold_rows_and_totals():
    compiled, planned = pipeline()
    rows = communication_rows(compiled, planned)
    report = json.loads(json.dumps(communication_json(rows)))
    assert {
        "axis": "tp", "op": "all-to-all", "site": "mlp", "direction": "forward", "compressed": True,
        "count": 12, "bytes_per_step": 384, "bf16_bytes_per_step": 768,
    } in report["collectives"]  # fmt: skip
    assert len(report["collectives"]) == 8
    # tp: 2 * (384 + 192) bytes; the others add 2 * 1024, 1024 and 6.
    assert report["totals"]["compressed"] == {"bytes_per_step": 1152, "bf16_bytes_per_step": 2304, "ratio": 2.0}
    assert report["totals"]["axes"]["tp"] == report["totals"]["compressed"]
    assert report["totals"]["all"]["bytes_per_step"] == 1152 + 2048 + 1024 + 6
    assert report["totals"]["all"]["bf16_bytes_per_step"] == 2304 + 1024 + 512 + 3

    lines = communication_text(rows).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len({len(line) for line in lines}) == 1
    row = ["tp", "all-to-all", "mlp", "forward", "u8", "yes", "12", "384 B", "768 B", "2.000"]
    assert row in cells
    assert ["compressed sites", "", "", "", "", "", "", "1.12 KiB", "2.25 KiB", "2.000"] in cells
    terminal = io.StringIO()
    Console(width=130, file=terminal).print(communication_table(rows))
    printed = [line.split() for line in terminal.getvalue().splitlines()]
    assert [*row[:7], "384", "B", "768", "B", "2.000"] in printed


def test_a_step_without_communication_has_an_empty_table():
    compiled, planned = both(lambda x: x + 1, np.ones(3, np.float32), sizes={"dp": 1, "pp": 1, "tp": 1})
    check(compiled, planned, {})
    report = communication_json(communication_rows(compiled, planned))
    assert report["collectives"] == []
    assert report["totals"]["all"] == {"bytes_per_step": 0, "bf16_bytes_per_step": 0, "ratio": None}
