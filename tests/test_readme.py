"""The README's library example runs as printed, and its commands exist."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"


def test_library_example_runs_as_printed():
    example = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL).group(1)
    done = subprocess.run([sys.executable, "-W", "error", "-c", example], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert 28.0 < float(done.stdout) < 30.0


def test_named_commands_exist():
    root = README.parent
    modules = set(re.findall(r"python -m (experiments\.\w+)", README.read_text()))
    assert "experiments.train" in modules
    assert [m for m in modules if not (root / (m.replace(".", "/") + ".py")).exists()] == []


def test_codecs_prints_every_preset(capsys):
    from experiments import codecs

    assert codecs.main(["--size=32768", "--ranks=2"]) == 0
    out = capsys.readouterr().out
    for preset, sent, low, high in (
        ("taco", 1, 31, 32.5),
        ("taco_block", 1.016, 31.2, 32.5),
        ("paper", 1.031, 31.2, 32.5),
        ("fp8", 1.016, 31.2, 32.5),
        ("int8", 1.016, 43, 44.5),
        ("int6", 0.766, 31, 32),
        ("int4", 0.516, 18, 19.2),
    ):
        row = re.search(rf"^\s*{preset}((?:\s+\d+\.\d+){{5}})\s*$", out, re.MULTILINE)
        size, single, predicted, reduced, predicted_sum = map(float, row.group(1).split())
        assert size == sent and low < single < high, out
        assert (single, reduced) == pytest.approx((predicted, predicted_sum), abs=0.3)
    assert float(re.search(r"(\S+) % of 2", out).group(1)) >= 99.99


@pytest.mark.slow
def test_convert_fine_tune_generate_export_as_printed(tmp_path):
    block = re.search(r"^Convert, fine-tune.*?```\n(.*?)```", README.read_text(), re.S | re.M)[1]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "LICENSE").symlink_to(ROOT / "LICENSE")
    outputs = []
    for line in block.strip().splitlines():
        command = [sys.executable, *shlex.split(line)[1:]]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert "validation loss" in outputs[1]
    assert outputs[2].startswith("In the beginning ")
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "exported" / name).read_bytes() == (ROOT / "examples/kjv-qwen3" / name).read_bytes()
    folders = (ROOT / "examples/kjv-qwen3", tmp_path / "exported")
    before, after = (load_file(folder / "model.safetensors") for folder in folders)
    assert before.keys() == after.keys()
    assert all(before[name].dtype == after[name].dtype and (before[name] != after[name]).any() for name in before)
