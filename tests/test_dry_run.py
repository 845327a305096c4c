"""The plan of a run: figures against formulas written by hand, its mistakes, and that it makes and writes nothing."""

import dataclasses
import json
import os
import resource
import subprocess
import sys

import jax
import pytest
from gpu_aot import process

from experiments import memory, step, train
from experiments.config import ParallelConfig
from experiments.recipes import tiny
from taco_jax.models.presets import qwen2_5_72b
from taco_jax.sharding.mesh import make_mesh, parse_mesh

MESH = "dp2,pp2,tp2"
ARGV = ("--recipe=tiny", f"--mesh={MESH}", "--dry-run")


def program_of(mesh: str = MESH, **changes) -> step.Program:
    config = dataclasses.replace(tiny(), mesh=mesh, **changes)
    if not config.model.vocab_size:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=256))
    return step.build(config, make_mesh(parse_mesh(mesh)))


def gpt_bytes(layers: int, hidden: int, intermediate: int, vocab: int, positions: int, pp: int, tp: int) -> int:
    """Float32 parameters of a GPT on one device: tables and matrices, then what tp does not split."""
    split = (
        layers // pp * (4 * hidden * hidden + 3 * hidden + 2 * hidden * intermediate + intermediate) + vocab * hidden
    )
    whole = layers // pp * 6 * hidden + (2 + positions) * hidden
    return 4 * (split // tp + whole)


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan") / "made"
    assert train.main([*ARGV, f"--out={folder}"]) == 0
    return folder, json.loads((folder / "dry_run.json").read_text())


def test_state_is_what_the_shapes_say():
    items = {item.name: item.bytes for item in memory.state_items(program_of())}
    parameters = gpt_bytes(layers=2, hidden=64, intermediate=256, vocab=256, positions=32, pp=2, tp=2)
    assert items["parameters"] == parameters
    # Two moments, and optax' counter of steps if it keeps one.
    assert items["optimizer state"] - 2 * parameters in (0, 4)
    # 2 directions x 2 hops x 5 numbers: attention and mlp of one layer, the embedding and the head.
    assert items["scales"] == 4 * 20 * 4
    assert items["batch"] == 8 // 2 * 32 * 12


def test_state_is_what_the_compiled_step_is_given(planned):
    _, plan = planned
    items = {item["name"]: item["bytes"] for item in plan["memory"]["items"]}
    program = program_of()
    arguments = program.compile({"xla_backend_optimization_level": 0}).memory_analysis().argument_size_in_bytes
    of_state = sum(items[name] for name in ("parameters", "optimizer state", "scales", "batch"))
    assert of_state + 4 == arguments  # the number of the step


def test_totals_and_work(planned):
    folder, plan = planned
    assert [path.name for path in folder.iterdir()] == ["dry_run.json"]
    held = plan["memory"]
    assert held["total_bytes"] == sum(item["bytes"] for item in held["items"] if item["name"] != "gradients")
    assert plan["tokens_per_step"] == 8 * 32 and plan["devices"] == 8
    assert plan["bubble_share"] == pytest.approx(1 / 3) and plan["sequences_per_microbatch"] == 2
    # 6 x (attention 4 H^2, MLP 8 H^2 in each layer, the head) + 12 L S H, per token.
    assert plan["model_flops_per_step"] == 256 * (6 * (2 * 12 * 64**2 + 64 * 256) + 12 * 2 * 32 * 64)
    assert plan["model"]["parameters"] == 2 * (12 * 64**2 + 13 * 64) + (256 + 32 + 2) * 64
    assert plan["communication"]["totals"]["compressed"]["ratio"] == pytest.approx(2)
    assert "axis dp carries 37% of what a device sends, mostly gradients" in plan["communication"]["verdict"]


def test_nothing_is_written_without_out(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    assert train.main([*ARGV, "--compression=none"]) == 0
    assert list(tmp_path.iterdir()) == []
    out = capsys.readouterr().out
    assert "--compression=taco would send half of it" in out and "computed from the shardings" in out


def test_seventy_billion_parameters_take_no_memory():
    arrays = {id(array) for array in jax.live_arrays()}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    items = memory.state_items(program_of("pp4,tp2", model=qwen2_5_72b(), parallel=ParallelConfig(num_microbatches=4)))
    assert items[0].bytes > 8 * 4 * 10**9
    assert {id(array) for array in jax.live_arrays() if array.nbytes > 2**20} <= arrays
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19  # KiB: half a GiB


def test_advice_names_what_is_largest():
    program = program_of(parallel=ParallelConfig(num_microbatches=4))
    state = memory.state_items(program)
    assert "more pp or tp" in memory.memory_verdict(program, state, [])
    items = [*state, memory.Item(memory.TEMPORARIES, 10**9, "XLA")]
    for scope, type_, remedy in (
        ("layers", "u8[5,1,8]", "more dp or pp"),  # 4 microbatches on 2 stages: 5 ticks
        ("layers", "f32[2,8]", "more parallel.num_microbatches or tp"),
        ("head", "f32[64,128]", "more tp, pp or dp"),
    ):
        assert remedy in memory.memory_verdict(program, items, [memory.LargeArray(type_, 9, scope)])
    assert "does not fit" in memory.fitting(90 * 10**9, {"A100 80GB": memory.CAPACITIES["A100 80GB"]})


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--dry-run", "--mesh=dp-1"], "needs the size of every axis"),
        (["--dry-run", "--target=h20"], "did you mean h200?"),
        (["--target=h200"], "--target needs --dry-run"),
        (["--dry-run", "--exit-after=3"], "--exit-after has no meaning with --dry-run"),
        (["--dry-run", "--print-config"], "--print-config has no meaning"),
        (["--dry-run", "--out=/proc/none"], "cannot write to --out=/proc/none"),
        (["--dry-run", "--data=no/such.bin"], "no/such.bin"),
        (["--dry-run", "--mesh=pp3"], "usable pp: 1, 2"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(argv, part, capsys, monkeypatch):
    monkeypatch.setattr(step.Program, "compile", None)  # nothing may be compiled
    assert train.main(["--recipe=tiny", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and part in captured.err


@pytest.mark.slow
@pytest.mark.parametrize(("model", "mesh"), [("qwen-7b", "dp8,pp4,tp8"), ("gpt3-6.7b", "dp4,pp4,tp8")])
def test_the_large_models_are_planned_in_minutes(model, mesh):
    sizes = ("data.sequence_length=2048", "data.batch_size=256", "parallel.num_microbatches=16")
    argv = [f"--model={model}", f"--mesh={mesh}", "--dry-run", *(f"--set={size}" for size in sizes)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    command = [sys.executable, "-m", "experiments.train", *argv]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 180
    assert "axis tp carries" in done.stdout


@pytest.mark.gpu_aot
def test_a_gpu_that_is_not_there(tmp_path):
    process.require_compiler()
    process.run("experiments.train", "--dry-run", "--target=h200", "--recipe=tiny", "--mesh=tp4", f"--out={tmp_path}")
    plan = json.loads((tmp_path / "dry_run.json").read_text())
    assert plan["implementation"] == "triton" and plan["memory"]["capacities"] == {"H200 141GB": 151_397_597_184}
    assert plan["memory"]["items"][4]["source"] == "XLA:GPU for H200"
    assert plan["memory"]["items"][0]["bytes"] == gpt_bytes(2, 64, 256, 256, 32, pp=1, tp=4)
