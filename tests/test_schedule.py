"""What runs beside a message, and launches, read from the text of small programs whose schedule is known."""

from collections import Counter

import pytest

from experiments import overlap
from experiments.compiler_options import describe, gpu_options
from experiments.schedule import count_launches, read_transfers

SCOPE = 'metadata={op_name="jit(step)/taco.psum.mlp.forward/all_to_all"}'
PROGRAM = """HloModule step, is_scheduled=true

%dot_body (p: bf16[64,64]) -> bf16[64,64] {
  %p = bf16[64,64]{1,0} parameter(0)
  ROOT %d = bf16[64,64]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%add_body (q: u8[2,64]) -> u8[2,64] {
  %q = u8[2,64]{1,0} parameter(0)
  ROOT %a = u8[2,64]{1,0} add(%q, %q)
}

%body (b: (s32[], u8[2,64])) -> (s32[], u8[2,64]) {
  %b = (s32[], u8[2,64]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %x = u8[2,64]{1,0} get-tuple-element(%b), index=1
  %start = ((u8[2,64]{1,0}), u8[2,64]{1,0}) all-to-all-start(%x), replica_groups={{0,1}}, dimensions={0}, SCOPE
  BESIDE
  %done = u8[2,64]{1,0} all-to-all-done(%start)
  %add = u8[2,64]{1,0} fusion(%done), kind=kLoop, calls=%add_body
  ROOT %t = (s32[], u8[2,64]{1,0}) tuple(%i, %add)
}

%condition (c: (s32[], u8[2,64])) -> pred[] {
  %c = (s32[], u8[2,64]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%c), index=0
  ROOT %less = pred[] compare(%n, %n), direction=LT
}

ENTRY %main (m: (s32[], u8[2,64])) -> (s32[], u8[2,64]) {
  %m = (s32[], u8[2,64]{1,0}) parameter(0)
  ROOT %loop = (s32[], u8[2,64]{1,0}) while(%m), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
}
"""  # noqa: E501
GEMM = "%gemm = bf16[64,64]{1,0} fusion(%w), kind=kCustom, calls=%dot_body"
KERNEL = (
    '%k = u8[2,8]{1,0} custom-call(%w), custom_call_target="t", metadata={op_name="jit(step)/taco_encode/pallas_call"}'
)
SMALL = "%f = u8[2,8]{1,0} fusion(%i), kind=kLoop, calls=%add_body"
LARGE = "%f = u8[2,64]{1,0} fusion(%i), kind=kLoop, calls=%add_body"


def program(beside: str) -> str:
    return PROGRAM.replace("SCOPE", SCOPE).replace("BESIDE", beside)


@pytest.mark.parametrize(
    ("beside", "kinds", "hidden"),
    [
        ("", [], False),
        (GEMM, ["gemm"], True),
        (KERNEL, ["kernel"], True),
        (SMALL, ["fusion"], False),
        (LARGE, ["fusion"], True),
        ("%g = s32[] bitcast(%i)", [], False),
    ],
)
def test_what_covers_a_message(beside, kinds, hidden):
    (transfer,) = read_transfers(program(beside), {"tp": 2})
    assert [work.kind for work in transfer.beside] == kinds
    assert (transfer.asynchronous, transfer.hidden) == (True, hidden)
    assert (transfer.count, transfer.wire_bytes) == (3, 64)


def test_a_synchronous_message_hides_nowhere():
    text = program(GEMM).replace("all-to-all-start", "all-to-all").replace("all-to-all-done(%start)", "bitcast(%start)")
    (transfer,) = read_transfers(text, {"tp": 2})
    assert not transfer.asynchronous and not transfer.hidden


def test_launches_count_trips_and_no_communication():
    assert count_launches(program(GEMM)) == Counter(gemm=3, fusion=3)
    assert count_launches(program(KERNEL)) == Counter(kernel=3, fusion=3)


def test_an_unscheduled_program_is_refused():
    with pytest.raises(ValueError, match="not scheduled"):
        read_transfers(program("").replace(", is_scheduled=true", ""), {"tp": 2})


THRESHOLD = "xla_gpu_all_gather_combine_threshold_bytes"


def test_a_cpu_is_left_alone():
    assert gpu_options("cpu", "") == {} == gpu_options("tpu", "--xla_gpu_autotune_level=0")


def test_what_the_user_sets_wins(tmp_path):
    default = gpu_options("gpu", "")
    assert default[THRESHOLD] == 65536 and default == gpu_options("cuda", "--xla_gpu_autotune_level=0")
    (tmp_path / "flags").write_text(f"--{THRESHOLD}=1\n")
    for flags in (f"--xla_a=b --{THRESHOLD}=1", str(tmp_path / "flags")):
        assert gpu_options("gpu", flags) == {name: value for name, value in default.items() if name != THRESHOLD}


def test_options_are_described_as_flags():
    assert describe({"xla_a": True, "xla_b": 5}) == "--xla_a=true --xla_b=5"


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--gpu=v100"], "--gpu must be one of a100, h100, h200, b200, got 'v100'"),
        (["--chunks", "0"], "--chunks must be 1 or more, got 0"),
        (["--compression=tacoo"], "did you mean taco?"),
        (["--json=/no/such/folder/x.json"], "there is no folder /no/such/folder"),
    ],
)
def test_a_mistake_is_one_line_before_anything_compiles(argv, part, capsys):
    assert overlap.main(argv) == 2
    error = capsys.readouterr().err
    assert part in error and error.count("\n") == 1
