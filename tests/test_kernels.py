"""The bytes of device memory that a compiled program moves, on programs small enough to count by hand."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_aot import process
from jax import lax

from experiments import gpu_check, kernels
from experiments.kernel_programs import OPERATIONS, Target
from experiments.kernel_traffic import Traffic, read_traffic

ROOT = Path(__file__).parent.parent

X = jnp.zeros((1000,), jnp.float32)


def traffic(function, *arguments) -> Traffic:
    return read_traffic(jax.jit(function).lower(*arguments).compile().as_text())


def module(*lines, computations=""):
    return "\n".join(["HloModule m", computations, "ENTRY %main (p: f32[1000]) -> f32[] {", *lines, "}"])


def test_an_add_moves_12_bytes_per_element():
    assert traffic(lambda x, y: x + y, X, X) == Traffic(8000, 4000, 1)


def test_a_transpose_moves_8_bytes_per_element():
    assert traffic(lambda x: x.T, jnp.zeros((16, 64), jnp.float32)) == Traffic(4096, 4096, 1)


def test_a_fused_slice_counts_the_slice():
    assert traffic(lambda x: x[100:200] * 2 + 1, X) == Traffic(400, 400, 1)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["  ROOT %y = f32[100]{0} slice(%p), slice={[100:200]}"], Traffic(400, 400, 1)),
        (["  %b = f32[10,100]{1,0} bitcast(%p)", "  ROOT %y = f32[10,100]{1,0} copy(%b)"], Traffic(4000, 4000, 1)),
        (["  ROOT %y = f32[1000]{0} add(%p, %p)"], Traffic(4000, 4000, 1)),
        (
            [
                "  %y = (f32[1000]{0}, f32[1000]{0}, u32[]) copy-start(%p)",
                "  ROOT %z = f32[1000]{0} copy-done(%y)",
            ],
            Traffic(4000, 4000, 1),
        ),
        (['  ROOT %y = (u8[1000]{0}, f32[5]{0}) custom-call(%p), custom_call_target="t"'], Traffic(4000, 1020, 1)),
    ],
)
def test_what_is_no_fusion(lines, expected):
    assert read_traffic(module("  %p = f32[1000]{0} parameter(0)", *lines)) == expected


def test_slices_of_one_operand_are_no_more_than_the_operand():
    halves = traffic(lambda x: x[:500] + x[500:], X)
    assert halves == Traffic(4000, 2000, 1)
    assert traffic(lambda x: x[:800] * x[200:] * x[100:900], X) == Traffic(4000, 3200, 1)


def test_an_update_in_place_counts_the_update():
    body = "%f (a: f32[1000], u: f32[10], i: s32[]) -> f32[1000] {\n" + "\n".join([
        "  %a = f32[1000]{0} parameter(0)", "  %u = f32[10]{0} parameter(1)", "  %i = s32[] parameter(2)",
        "  ROOT %d = f32[1000]{0} dynamic-update-slice(%a, %u, %i)", "}",
    ])  # fmt: skip
    text = module(
        "  %p = f32[1000]{0} parameter(0)", "  %u = f32[10]{0} parameter(1)", "  %i = s32[] parameter(2)",
        "  ROOT %y = f32[1000]{0} fusion(%p, %u, %i), kind=kLoop, calls=%f", computations=body,
    )  # fmt: skip
    assert read_traffic(text) == Traffic(44, 40, 1)


def loop(trips: str) -> str:
    state = "(s32[], f32[1000])"
    body = f"%b (t: {state}) -> {state} {{\n" + "\n".join([
        f"  %t = {state} parameter(0)", "  %x = f32[1000]{0} get-tuple-element(%t), index=1",
        "  %i = s32[] get-tuple-element(%t), index=0", "  %n = f32[1000]{0} negate(%x)",
        f"  ROOT %r = {state} tuple(%i, %n)", "}", f"%c (t: {state}) -> pred[] {{",
        f"  %t = {state} parameter(0)", "  %i = s32[] get-tuple-element(%t), index=0",
        "  ROOT %l = pred[] compare(%i, %i), direction=LT", "}",
    ])  # fmt: skip
    line = f"  ROOT %w = {state} while(%p), condition=%c, body=%b{trips}"
    return module(f"  %p = {state} parameter(0)", line, computations=body)


def test_a_loop_counts_its_trips():
    counted = loop(', backend_config={"known_trip_count":{"n":"5"}}')
    assert read_traffic(counted) == Traffic(5 * 4000 + 6 * 4, 5 * 4000 + 6, 5 + 6)
    with pytest.raises(ValueError, match="trip count"):
        read_traffic(loop(""))


def test_a_conditional_is_refused():
    text = jax.jit(lambda p, x: lax.cond(p, jnp.sin, jnp.cos, x)).lower(True, X).compile().as_text()
    with pytest.raises(ValueError, match="conditional"):
        read_traffic(text)


def test_command_counts_and_times_on_a_cpu(tmp_path, capsys):
    """Plain jnp is above the floor everywhere, since XLA:CPU writes the rotated values; nothing is missing."""
    command = ["--device=cpu", "--presets", "taco", "--ranks=4", "--mib=1", "--time", f"--json={tmp_path / 'k.json'}"]
    assert kernels.main(command) == 0
    printed = capsys.readouterr().out
    assert "this machine's CPU" in printed and "triton does not serve taco: it is for NVIDIA GPUs" in printed
    report = json.loads((tmp_path / "k.json").read_text())
    rows, times = report["traffic"], report["times"]
    assert [row["operation"] for row in rows] == [t["operation"] for t in times] == list(OPERATIONS)
    assert [row["floor"] for row in rows] == [3, 1.25, 3, 1.5]
    assert all(row["total"] == row["read"] + row["written"] >= row["floor"] for row in rows)
    for t, row in zip(times, rows, strict=True):
        assert (t["mib"], t["implementation"], t["over_xla"]) == (1, "xla", 1)
        np.testing.assert_allclose(t["gb_per_s"] * t["seconds"] * 1e9, row["floor"] * 2**19)
        copied = 4 * 2**19 / t["copy_seconds"]
        np.testing.assert_allclose(t["share_of_copy"], t["gb_per_s"] * 1e9 / copied)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device=v100"], "auto, cpu or one of a100, h100, h200, b200, got 'v100'"),
        (["--presets", "paper"], "taco, taco_block, fp8, int8, int6, int4, got paper"),
        (["--implementations", "cuda"], "triton, triton_sm80, mosaic_gpu, xla, got cuda"),
        (["--ranks=3"], "a power of two up to 64, got 3"),
        (["--mib=0"], "1 MiB or more, got 0"),
        (["--count-only", "--sizes-mib", "4"], "asks for times"),
        (["--json=/nowhere/k.json"], "there is no folder /nowhere"),
    ],
)
def test_a_mistake_is_one_line(arguments, said, capsys):
    assert kernels.main(arguments) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_no_gpu_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu_check, "real_gpu", lambda: None)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "")
    assert gpu_check.main([f"--json={tmp_path / 'g.json'}"]) == 2
    error = capsys.readouterr().err
    assert "this machine has no GPU that JAX can use" in error and error.count("\n") == 1
    assert not (tmp_path / "g.json").exists()


def test_gpu_check_leaves_out_the_kernels_for_older_gpus():
    at = {"mesh": None, "platform": "gpu", "label": "", "real": True}
    newer, older = (gpu_check.implementations(Target(capability=c, **at)) for c in ("8.9", "8.0"))
    assert (newer, older) == (["triton"], ["triton_sm80"])


def test_outcomes_count_for_each_implementation():
    counts, failures = gpu_check.outcomes(
        [
            "[gw0] [ 10%] PASSED tests/test_contract.py::test_same_bits[triton-encode-bfloat16-96] ",
            "[gw1] [ 20%] FAILED tests/test_contract.py::test_same_bits[triton-reduce-bfloat16-1] ",
            "tests/test_contract.py::test_equals_the_oracle[xla-decode-float32-1] PASSED [ 30%]",
            "tests/test_contract.py::test_whole SKIPPED (no) [100%]",
            "FAILED tests/test_contract.py::test_same_bits[triton-reduce-bfloat16-1] - AssertionError",
        ]
    )
    assert counts == {"triton": {"PASSED": 1, "FAILED": 1}, "xla": {"PASSED": 1}, "": {"SKIPPED": 1}}
    assert failures == ["tests/test_contract.py::test_same_bits[triton-reduce-bfloat16-1]"]


@pytest.fixture(scope="module")
def h200(tmp_path_factory) -> dict:
    """Rows of `taco` compiled for an H200, in a process of its own, since LLVM and ptxas may end it."""
    process.require_compiler()
    file = tmp_path_factory.mktemp("h200") / "kernels.json"
    process.run("experiments.kernels", "--device=h200", "--presets", "taco", f"--json={file}")
    rows = json.loads(file.read_text())["traffic"]
    return {(row["implementation"], row["operation"]): row for row in rows}


@pytest.mark.gpu_aot
@pytest.mark.parametrize("operation", OPERATIONS)
def test_kernels_move_each_byte_once(h200, operation):
    """Plain jnp does not: what the kernels are for."""
    assert 1 <= h200["triton", operation]["ratio"] <= 1.02
    assert h200["xla", operation]["ratio"] > 1.02
