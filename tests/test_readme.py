"""The README's library example runs as printed, and its commands exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


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
    ):
        row = re.search(rf"^\s*{preset}((?:\s+\d+\.\d+){{5}})\s*$", out, re.MULTILINE)
        size, single, predicted, reduced, predicted_sum = map(float, row.group(1).split())
        assert size == sent and low < single < high, out
        assert (single, reduced) == pytest.approx((predicted, predicted_sum), abs=0.3)
    assert float(re.search(r"(\S+) % of 2", out).group(1)) >= 99.99
