import contextlib
import gzip
import json
import math
import os
import re
import signal
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import pytest
from event_files import scalars
from jax.experimental.compilation_cache import compilation_cache

from experiments import communication, step, train
from experiments.checkpoint import Checkpoints
from experiments.cli import build_config, parse_arguments
from experiments.config import CheckpointConfig
from experiments.metrics import read_metrics
from taco_jax.sharding.mesh import make_mesh, parse_mesh

FIELDS = (
    "step", "loss", "grad_norm", "lr", "step_ms", "tokens_per_s", "saturation", "snr_forward", "snr_backward"
)  # fmt: skip
TINY = ("--recipe=tiny", "--mesh=dp2,pp2,tp2", "--set=sample_length=4")


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """Let the runs of this file, also those in other processes, share what they compile."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield {name.upper(): str(value) for name, value in settings.items()}
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def uninterrupted(compiled_once, tmp_path_factory):
    """A run of six steps; its log is in the folder too."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    recording = ("--set=log.tensorboard=true", "--set=log.replica_hash_every=2", "--profile=2:4", "--peak-flops=1e10")
    with (folder / "log").open("w") as log, contextlib.redirect_stdout(log):
        assert train.main([*TINY, *recording, f"--out={folder}"]) == 0
    return folder


def state_of(folder, *argv: str):
    """Return the newest saved state of a run, on the mesh of the command."""
    config = build_config(parse_arguments([*TINY, *argv]))
    program = step.build(config, make_mesh(parse_mesh(config.mesh)))
    with Checkpoints(folder / "checkpoints", CheckpointConfig()) as checkpoints:
        return checkpoints.restore(program.abstract_state())


def numbers(folder, *names: str):
    return [[values[name] for name in names] for values in read_metrics(folder / "metrics.jsonl")]


def assert_same_run(folder, other) -> None:
    """Two runs are equal bit for bit: every loss, gradient norm and learning rate, and the whole last state."""
    assert numbers(folder, "step", "loss", "grad_norm", "lr") == numbers(other, "step", "loss", "grad_norm", "lr")
    state, position = state_of(folder)
    state_of_other, position_of_other = state_of(other)
    assert position.step == position_of_other.step
    chex.assert_trees_all_equal(state, state_of_other)


def test_pulse(uninterrupted):
    folder = uninterrupted
    out = (folder / "log").read_text()
    assert "training bytes 0..4,084,645, validation bytes 4,084,646" in out
    assert re.search(r"compiled the training step in \d", out)
    assert re.search(
        r"^step 2/6  loss 5\.\d+  grad norm \S+  lr 1.00e-03  \d+ ms  \S+ tokens/s  "
        r"\S+ [MG]FLOP/s/device  MFU \S+ %  saturation",
        out,
        re.M,
    )
    assert re.search(r"^step 1/6  loss .*  \d+ ms \(first step, with warm-up\)  saturation", out, re.M)
    assert re.search(r"SNR [23]\d\.\d/[23]\d\.\d dB  validation \d\.\d", out)
    assert "sample: " in out
    assert re.search(rf"the run is complete: validation loss \d\.\d+ nats/byte after 6 steps; {folder}", out)
    metrics = read_metrics(folder / "metrics.jsonl")
    assert [values["step"] for values in metrics] == [1, 2, 3, 4, 5, 6]
    for values in metrics:
        assert all(math.isfinite(values[name]) for name in FIELDS)
    assert [values["step"] for values in metrics if "val_loss" in values] == [3, 6]
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    table = json.loads((folder / "communication.json").read_text())
    assert {row["axis"] for row in table["collectives"] if row["compressed"]} == {"tp"}
    assert table["totals"]["compressed"]["ratio"] >= 1.99
    assert json.loads((folder / "config.json").read_text())["mesh"] == "dp2,pp2,tp2"
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["platform"] == "cpu" and environment["jax"] == jax.__version__


def test_trackers_and_traces_of_a_run(uninterrupted):
    rows = read_metrics(uninterrupted / "metrics.jsonl")
    found = scalars(uninterrupted / "tensorboard")
    assert found.keys() == {name for values in rows for name in values} - {"step"}
    for name, points in found.items():
        expected = [(values["step"], values[name]) for values in rows if name in values]
        assert points == [(number, pytest.approx(value)) for number, value in expected]
    assert all(0 < values["mfu"] == pytest.approx(values["tflops_per_device"] / 0.01) for values in rows)
    (trace,) = (uninterrupted / "profile").glob("plugins/profile/*/*.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert sorted(int(e["args"]["step_num"]) for e in events if e.get("name") == "train") == [2, 3]


def test_the_same_command_says_that_the_run_is_complete(uninterrupted, capsys, monkeypatch):
    monkeypatch.setattr(step, "build", None)  # nothing may be compiled
    assert train.main([*TINY, f"--out={uninterrupted}"]) == 0
    assert "the run is complete: validation loss" in capsys.readouterr().out
    assert train.main([*TINY, f"--out={uninterrupted}", "--mesh=tp2", "--steps=5"]) == 0
    assert len(read_metrics(uninterrupted / "metrics.jsonl")) == 6


def test_three_and_three_steps_equal_six(uninterrupted, tmp_path):  # T4, T10
    assert train.main([*TINY, f"--out={tmp_path}", "--steps=3"]) == 0
    assert train.main([*TINY, f"--out={tmp_path}"]) == 0
    assert_same_run(tmp_path, uninterrupted)


def command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "experiments.train", *argv]


def environment(compiled_once) -> dict[str, str]:
    return os.environ | compiled_once | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "PYTHONUNBUFFERED": "1"}


def test_a_killed_run_resumes(uninterrupted, compiled_once, tmp_path):
    argv = [*TINY, "--set=checkpoint.every=1", "--set=checkpoint.keep=2", f"--out={tmp_path}"]
    argv.append("--set=log.tensorboard=true")
    with subprocess.Popen(command(*argv), env=environment(compiled_once), stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("step 4/6"):
                process.kill()
    assert process.returncode == -signal.SIGKILL
    # What the last step wrote may be cut off.
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    assert train.main(argv) == 0
    assert_same_run(tmp_path, uninterrupted)
    # What was written in the second before the kill may be missing, but no step is there twice.
    steps = [number for number, _ in scalars(tmp_path / "tensorboard")["loss"]]
    assert steps == sorted(set(steps)) and steps[-2:] == [5, 6]


def test_a_stopped_run_saves_and_goes_on(uninterrupted, tmp_path, capsys, monkeypatch):
    advance = step.Program.train_step

    def stop_at_the_fourth(self, state, number, batch):
        if number == 3:
            signal.raise_signal(signal.SIGTERM)
        return advance(self, state, number, batch)

    argv = [*TINY, "--set=checkpoint.every=100", f"--out={tmp_path}"]
    with monkeypatch.context() as patch:
        patch.setattr(step.Program, "train_step", stop_at_the_fourth)
        assert train.main(argv) == 128 + signal.SIGTERM
    assert "stopped by signal 15" in capsys.readouterr().out
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 4
    assert train.main(argv) == 0
    assert "resumed from step 4" in capsys.readouterr().out
    assert_same_run(tmp_path, uninterrupted)


def test_another_mesh_and_more_steps_continue_the_run(uninterrupted, tmp_path, capsys):  # K1
    argv = [*TINY, f"--out={tmp_path}"]
    assert train.main([*argv, "--steps=2"]) == 0
    assert train.main([*argv, "--mesh=dp2", "--steps=4"]) == 0
    assert "resumed from step 2" in capsys.readouterr().out
    losses, expected = numbers(tmp_path, "loss"), numbers(uninterrupted, "loss")[:4]
    assert losses[:2] == expected[:2]
    chex.assert_trees_all_close(losses, expected, rtol=2e-3)


def test_another_compression_or_model_is_another_run(uninterrupted, capsys):  # K8
    argv = [*TINY, f"--out={uninterrupted}", "--steps=9"]
    assert train.main([*argv, "--compression=fp8", "--set=model.num_layers=4"]) == 2
    error = capsys.readouterr().err
    assert "compression is taco, not fp8" in error and "model.num_layers is 2, not 4" in error
    assert error.count("\n") == 1


def test_a_step_that_is_not_finite_ends_the_run(tmp_path, capsys, monkeypatch):
    advance = step.Program.train_step

    def broken_third(self, state, number, batch):
        state, metrics = advance(self, state, number, batch)
        return state, metrics | ({"loss": jnp.float32(jnp.nan)} if number == 2 else {})

    monkeypatch.setattr(step.Program, "train_step", broken_third)
    assert train.main([*TINY, f"--out={tmp_path}"]) == 3
    assert "step 3: loss nan" in capsys.readouterr().err
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and json.loads(text.splitlines()[-1])["loss"] is None
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_what_is_not_on_the_wire_ends_the_run(tmp_path, capsys, monkeypatch):  # C14
    monkeypatch.setattr(communication, "read_collectives", lambda text, sizes: [])
    assert train.main([*TINY, f"--out={tmp_path}"]) == 4
    assert capsys.readouterr().err.count("\n") == 1


def test_a_default_folder_is_the_same_for_every_mesh_and_length():
    def folder(*argv: str):
        arguments = parse_arguments(argv)
        return str(train.run_folder(arguments, build_config(arguments)))

    assert folder("--recipe=tiny") == folder("--recipe=tiny", "--mesh=dp2", "--steps=99") == "runs/tiny-taco-seed0"
    assert folder("--compression=none", "--seed=3") == "runs/main-none-seed3"


def test_print_config(capsys):
    assert train.main(["--recipe=small", "--steps=7", "--print-config"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 7


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--mesh=dp3,pp5,tp7"], "usable pp: 1, 2, 4"),
        (["--mesh=tp0"], "tp must be 1 or more"),
        (["--mesh=dp4pp4"], "cannot read 'dp4pp4'"),
        (["--set=optimizer.learningrate=1"], "did you mean optimizer.learning_rate?"),
        (["--data=no/such/file.txt"], "cannot read --data=no/such/file.txt: No such file"),
        (["--out=/proc/none"], "cannot write to --out=/proc/none"),
        (["--mesh=tp2,dp-1", "--set=data.batch_size=9"], "data.batch_size=9"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(argv, part, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(step, "build", None)  # nothing may be compiled
    assert train.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("python -m experiments.train: error: ") and captured.err.count("\n") == 1
    assert part in captured.err


def test_a_mistake_is_found_before_jax_starts(compiled_once):
    code = (
        "import sys, jax\n"
        "from experiments import train\n"
        "code = train.main(['--mesh=dp3,pp5,tp7'])\n"
        # JAX takes this setting only as long as it has not started.
        "jax.config.update('jax_num_cpu_devices', 2)\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(compiled_once), capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
