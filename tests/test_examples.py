"""The examples: each adopts the library by few lines, learns as before, and sends nothing but bytes over tp."""

import difflib
import importlib
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments.communication import read_collectives

ROOT = Path(__file__).parent.parent
NAMES = ("plain", "flax_nnx", "flax_linen", "jit_gspmd")
MESH = {"dp": 2, "tp": 4}
STEPS = 20


def diff(name):
    """Changed lines with one line around them, as the guide prints them."""
    files = [f"examples/{name}.py", f"examples/{name}_taco.py"]
    texts = [(ROOT / file).read_text().splitlines() for file in files]
    return list(difflib.unified_diff(*texts, *files, n=1, lineterm=""))


@pytest.mark.parametrize("name", NAMES)
def test_adoption_changes_at_most_ten_lines(name):
    changed = {sign: sum(line.startswith(sign) for line in diff(name)[2:]) for sign in "+-"}
    assert 1 <= max(changed.values()) <= 10, changed
    assert all(len((ROOT / f"examples/{name}{end}.py").read_text().splitlines()) <= 90 for end in ("", "_taco"))


def test_the_guide_prints_the_real_diffs():
    printed = re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "adopt.md").read_text(), re.DOTALL)
    assert printed == ["\n".join(diff(name)) + "\n" for name in NAMES]


def test_the_guide_quotes_real_messages():
    errors = (ROOT / "docs" / "adopt.md").read_text().split("## Errors")[1]
    quoted = re.findall(r"^\| `(.*?)` \|", errors, re.MULTILINE)
    source = "".join(file.read_text() for file in (ROOT / "taco_jax").rglob("*.py"))
    assert len(quoted) > 5
    assert [message for message in quoted if message not in source] == []


@pytest.fixture
def train(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    loop = importlib.import_module("loop")

    def run(name):
        example = importlib.import_module(name)
        monkeypatch.setattr(example, "LAYERS", 1)
        losses, compiled = loop.train(*example.setup(), steps=STEPS)
        return np.array(losses), read_collectives(compiled.as_text(), MESH)

    return run


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "flax_nnx",
        pytest.param("flax_linen", marks=pytest.mark.slow),
        pytest.param("jit_gspmd", marks=pytest.mark.slow),
    ],
)
def test_it_learns_as_before_and_sends_bytes(name, train, capsys):
    exact, before = train(name)
    assert "u8" not in capsys.readouterr().out
    compressed, after = train(f"{name}_taco")
    assert "all-gather u8" in (printed := capsys.readouterr().out) and "all-to-all u8" in printed
    assert exact[-1] < exact[0] - 2.5 and compressed[-1] < compressed[0] - 2.5
    np.testing.assert_allclose(compressed, exact, atol=0.05)
    assert {c.dtype for c in before if c.axis == "tp"} == {"f32"}
    assert {(c.op, c.dtype) for c in after if c.axis == "tp"} == {("all-to-all", "u8"), ("all-gather", "u8")}
    # The scalars of the loss and the observations of the scales; gradients of kernels travel over dp alone.
    assert sum(c.payload_bytes for c in after if c.axis == "dp,tp") < 200
    sent = [sum(c.bytes_per_step for c in messages if "tp" in c.axis) for messages in (before, after)]
    assert sent[1] < 0.26 * sent[0]


@pytest.mark.slow
def test_it_runs_by_hand():
    command = [sys.executable, "-W", "error", "examples/plain_taco.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "all-to-all u8" in done.stdout
    assert float(done.stdout.split()[-1]) < 2.6
