"""Collectives read from the text of compiled programs: every form and spelling that XLA prints for CPU and GPU."""

from fractions import Fraction

import pytest

from experiments.hlo import read_collectives

MESH = {"dp": 2, "pp": 2, "tp": 2}


def module(*lines, computations=""):
    """Return the text of a module with f32[60] %x, u8[60] %q in front of the given entry instructions."""
    return "\n".join(
        ["HloModule m, is_scheduled=true", computations, "ENTRY %main (p: f32[60], q: u8[60]) -> f32[] {",
         "  %x = f32[60]{0} parameter(0)", "  %q = u8[60]{0} parameter(1)", *lines, "}"]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("line", "expected"),
    # A group of 4 devices, 240 bytes of f32 handed in: ring algorithms send 3, 2 * 3/4, 3/4, 3/4 and 1 times that.
    [
        ("%y = f32[240]{0} all-gather(%x), replica_groups={{0,1,2,3}}, dimensions={0}", 720),
        ("%y = f32[60]{0} all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add", 360),
        ("%y = f32[15]{0} reduce-scatter(%x), replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%add", 180),
        ("%y = f32[60]{0} all-to-all(%x), replica_groups={{0,1,2,3}}, dimensions={0}", 180),
        ("%y = f32[60]{0} collective-permute(%x), source_target_pairs={{0,1},{1,2},{2,3}}", 240),
    ],
)
def test_wire_bytes_of_each_collective(line, expected):
    (found,) = read_collectives(module(line), {"tp": 4})
    assert found.bytes_per_step == expected
    assert found.bf16_bytes_per_step == expected / 2
    assert (found.axis, found.group_size, found.count, found.dtype) == ("tp", 4, 1, "f32")


@pytest.mark.parametrize(
    ("groups", "axis", "first"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", "tp", (0, 1)),
        ("{{0,2},{1,3},{4,6},{5,7}}", "pp", (0, 2)),
        ("{{0,2,4,6},{1,3,5,7}}", "dp,pp", (0, 2, 4, 6)),
        ("{}", "dp,pp,tp", (0, 1, 2, 3, 4, 5, 6, 7)),
        ("[4,2]<=[8]", "tp", (0, 1)),
        ("[4,2]<=[2,4]T(1,0)", "dp", (0, 4)),
        ("[4,2]<=[2,2,2]T(0,2,1)", "pp", (0, 2)),
        ("[2,4]<=[4,2]T(1,0)", "dp,pp", (0, 2, 4, 6)),
        ("mesh['dp'=2,'pp'=2,'tp'=2] {'tp'}", "tp", (0, 1)),
        ("mesh['dp'=2,'pp'=2,'tp'=2] {'dp','pp'}", "dp,pp", (0, 2, 4, 6)),
        ("mesh[a=8] {a:(1)2}", "dp", (0, 4)),
        ("mesh['a'=8] {'a':(2)2}", "pp", (0, 2)),
        ("mesh['a'=8] {'a':(2)4}", "pp,tp", (0, 1, 2, 3)),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", "dp", (0, 4)),
        ("mesh['a'=2,'b'=4], device_ids=(7,6,5,4,3,2,1,0) {'b'}", "pp,tp", (7, 6, 5, 4)),
    ],
)
def test_replica_groups_in_every_spelling(groups, axis, first):
    text = module(f"%y = f32[60]{{0}} all-reduce(%x), replica_groups={groups}, to_apply=%add")
    (found,) = read_collectives(text, MESH)
    assert (found.axis, found.groups[0]) == (axis, first)
    assert sorted(device for group in found.groups for device in group) == list(range(8))


def test_groups_of_one_device_send_nothing_and_unknown_devices_are_refused():
    line = "%y = f32[60]{0} all-reduce(%x), replica_groups={{0},{1}}, to_apply=%add"
    assert read_collectives(module(line), {"tp": 2}) == []
    stays = "%y = f32[60]{0} collective-permute(%x), source_target_pairs={{0,0},{1,1}}"
    assert read_collectives(module(stays), {"tp": 2}) == []
    with pytest.raises(ValueError, match="outside the mesh of 2 devices"):
        read_collectives(module(line.replace("{1}", "{2}")), {"tp": 2})
    with pytest.raises(ValueError, match="ragged-all-to-all"):
        read_collectives(module("%y = f32[60]{0} ragged-all-to-all(%x), replica_groups={}"), MESH)


# Forms that XLA prints for H200, shortened.
GPU_COMPUTATIONS = """
%fused (p0: f32[60]) -> f32[60] {
  %p0 = f32[60]{0} parameter(0)
  ROOT %r = f32[60]{0} all-reduce(%p0), replica_groups=[4,2]<=[8], to_apply=%add, metadata={op_name="jit(f)/psum"}
}

%wrapped (p1: f32[60]) -> f32[30] {
  %p1 = f32[60]{0} parameter(0)
  ROOT %s = f32[30]{0} reduce-scatter(%p1), replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}, to_apply=%add
}

%body (t: (s32[], u8[60])) -> (s32[], u8[60]) {
  %t = (s32[], u8[60]{0}) parameter(0)
  %g = u8[60]{0} get-tuple-element(%t), index=1
  %b = u8[2,30]{1,0} bitcast(%g)
  %a-start = ((u8[2,30]{1,0}), u8[2,30]{1,0}) all-to-all-start(%b), replica_groups={{0,1},{2,3},{4,5},{6,7}}, \
dimensions={0}, metadata={op_name="jit(f)/jvp()/while/body/taco.psum.mlp.forward/all_to_all"}, backend_config={"x":1}
  %a-done = u8[2,30]{1,0} all-to-all-done(%a-start), metadata={op_name="jit(f)/taco.psum.mlp.forward/all_to_all"}
}
"""
GPU_LINES = (
    "%w = (s32[], /*index=1*/u8[60]{0}) while(%t), condition=%cond, body=%body, "
    'backend_config={"known_trip_count":{"n":"5"},"dynamic_variables":[]}',
    "%f-start = ((f32[60]{0}), f32[60]{0}) fusion-start(%x), kind=kCustom, calls=%fused",
    "%f-done = f32[60]{0} fusion-done(%f-start), calls=%fused",
    "%s-start = ((f32[60]{0}), f32[30]{0}, s32[]) async-start(%x), calls=%wrapped",
    "%s-done = f32[30]{0} async-done(%s-start), calls=%wrapped",
    "%c-start = ((f32[60]{0}), f32[60]{0}) collective-permute-start(%x), source_target_pairs={{0,2},{2,0}}",
    "%c-done = f32[60]{0} collective-permute-done(%c-start)",
    "%k = f32[60]{0} call(%x), to_apply=%fused",
    "%g-start = ((u8[60]{0}, u8[60]{0}, f32[60]{0}), (u8[120]{0}, u8[120]{0}, f32[120]{0})) "
    "all-gather-start(%q, %q, %x), replica_groups=mesh['dp'=2,'pp'=2,'tp'=2] {'tp'}, dimensions={0}, "
    'metadata={op_name="jit(f)/(jvp(taco.psum.a.forward)/all_gather:transpose(jvp())/taco.pvary.b.backward/all_gather'
    ':jvp()/all_gather)"}',
    "%g-done = (u8[120]{0}, u8[120]{0}, f32[120]{0}) all-gather-done(%g-start)",
)


def test_asynchronous_wrapped_and_combined_forms_count_once():
    found = read_collectives(module(*GPU_LINES, computations=GPU_COMPUTATIONS), MESH)
    sent = {}
    for c in found:
        key = (c.op, c.axis, c.site, c.direction, c.dtype)
        count, size = sent.get(key, (0, 0))
        sent[key] = (count + c.count, size + c.bytes_per_step)
    assert sent == {
        # 60 of 60 bytes in a loop of 5: half of them leave.
        ("all-to-all", "tp", "mlp", "forward", "u8"): (5, 150),
        ("all-reduce", "tp", "other", "update", "f32"): (2, 480),
        ("reduce-scatter", "dp", "other", "update", "f32"): (1, 120),
        ("collective-permute", "pp", "other", "update", "f32"): (1, 240),
        ("all-gather", "tp", "a", "forward", "u8"): (1, 60),
        ("all-gather", "tp", "b", "backward", "u8"): (1, 60),
        ("all-gather", "tp", "other", "forward", "f32"): (1, 240),
    }


def test_combination_that_cannot_be_taken_apart_names_all_its_sites():
    line = "%y = f32[60]{0} all-reduce(%x), replica_groups=[4,2]<=[8], to_apply=%add, metadata="
    name = '{op_name="jit(f)/(taco.psum.g1.backward/psum:taco.psum.g2.backward/psum:taco.psum.g1.backward/psum)"}'
    (found,) = read_collectives(module(line + name), MESH)
    assert (found.site, found.direction) == ("g1+g2", "backward")


def conditional(op_name, collective_name):
    metadata = f', metadata={{op_name="{op_name}"}}' if op_name else ""
    computations = f"""
%inner_yes (a: f32[60]) -> f32[60] {{
  %a = f32[60]{{0}} parameter(0)
  ROOT %r = f32[60]{{0}} all-reduce(%a), replica_groups={{}}, to_apply=%add, metadata={{op_name="{collective_name}"}}
}}

%yes (b: f32[60]) -> f32[60] {{
  %b = f32[60]{{0}} parameter(0)
  ROOT %c = f32[60]{{0}} conditional(%i, %b, %b), branch_computations={{%no, %inner_yes}}{metadata}
}}

%no (d: f32[60]) -> f32[60] {{
  ROOT %d = f32[60]{{0}} parameter(0)
}}
"""
    outer = metadata.replace("/cond/branch_1_fun/cond", "/cond").replace("/cond/branch_1_fun/share.1.2/cond", "/cond")
    line = f"%z = f32[60]{{0}} conditional(%i, %x, %x), true_computation=%yes, false_computation=%no{outer}"
    (found,) = read_collectives(module(line, computations=computations), MESH)
    return found.count


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("jit(f)/cond/branch_1_fun/cond", Fraction(1)),
        # A plain conditional inside a shared branch runs as often as that branch.
        ("jit(f)/share.3.4/cond/branch_1_fun/cond", Fraction(3, 4)),
        ("jit(f)/transpose(jvp(share.3.4))/cond/branch_1_fun/cond", Fraction(3, 4)),
        ("jit(f)/share.3.4/cond/branch_1_fun/share.1.2/cond", Fraction(3, 8)),
        # Of two scopes around one conditional the inner one is its own.
        ("jit(f)/share.1.9/share.3.4/cond/branch_1_fun/cond", Fraction(3, 4)),
    ],
)
def test_share_of_a_branch_with_and_without_the_metadata_of_the_conditional(path, expected, kept):
    assert conditional(path if kept else "", f"{path}/branch_1_fun/psum") == expected


def test_share_without_a_conditional_left_does_not_count():
    name = 'metadata={op_name="jit(f)/share.3.4/cond/branch_1_fun/psum"}'
    (found,) = read_collectives(module(f"%y = f32[60]{{0}} all-reduce(%x), replica_groups={{}}, {name}"), MESH)
    assert found.count == 1
