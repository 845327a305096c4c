import gzip
import json
import math
import re
import subprocess
import sys

import chex
import jax
import pytest
from event_files import scalars
from trainer import TINY, assert_same_run, environment, numbers

from experiments import communication, step, train
from experiments.cli import build_config, parse_arguments
from experiments.metrics import read_metrics

FIELDS = (
    "step", "loss", "grad_norm", "lr", "step_ms", "tokens_per_s", "saturation", "snr_forward", "snr_backward"
)  # fmt: skip
pytestmark = pytest.mark.usefixtures("compiled_once")


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
    assert environment["compiler_options"] == {}


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
