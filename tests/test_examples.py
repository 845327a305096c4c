"""The examples: each adopts the library by few lines, learns as before, and sends nothing but bytes over tp."""

import difflib
import importlib
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.communication import planned_collectives, read_collectives

ROOT = Path(__file__).parent.parent
NAMES = ("plain", "flax_nnx", "flax_linen", "jit_gspmd")
MESH = {"dp": 2, "tp": 4}
SITES = ("attention", "mlp")


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
def load(monkeypatch):
    """Import an example with one layer."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))

    def by_name(name):
        module = importlib.import_module(name)
        if name != "loop":
            monkeypatch.setattr(module, "LAYERS", 1)
        return module

    return by_name


@pytest.mark.parametrize("name", [name for name in NAMES if name != "plain"])
def test_each_means_to_send_bytes(name, load):
    """Before XLA: two sites, two directions, two hops, and nothing else between the tp devices."""
    step, state = load(f"{name}_taco").setup()
    messages = planned_collectives(jax.make_jaxpr(step)(state, load("loop").batch(0)), MESH)
    over_tp = [c for c in messages if "tp" in c.axis]
    assert {c.dtype for c in over_tp} == {"u8"}
    assert {(c.site, c.direction) for c in over_tp} == {(s, d) for s in SITES for d in ("forward", "backward")}
    layers = 2 if name == "jit_gspmd" else 1
    assert sum(c.count for c in over_tp) == 8 * layers


@pytest.mark.parametrize(
    ("name", "difference"),
    # The adaptive scales of `plain` start at 1: the first cotangents round to zero.
    [("plain", 0.1), *(pytest.param(name, 0.01, marks=pytest.mark.slow) for name in NAMES if name != "plain")],
)
def test_it_learns_as_before_and_sends_bytes(name, difference, load, capsys):
    def train(name):
        losses, compiled = load("loop").train(*load(name).setup(), steps=20)
        return np.array(losses), read_collectives(compiled.as_text(), MESH), capsys.readouterr().out

    exact, before, text_before = train(name)
    compressed, after, text_after = train(f"{name}_taco")
    assert exact[-1] < exact[0] - 2.5 and compressed[-1] < compressed[0] - 2.5
    np.testing.assert_allclose(compressed, exact, atol=difference)
    assert {c.dtype for c in before if c.axis == "tp"} == {"f32"} and "u8" not in text_before
    assert {(c.op, c.dtype) for c in after if c.axis == "tp"} == {("all-to-all", "u8"), ("all-gather", "u8")}
    assert "all-gather u8" in text_after and "all-to-all u8" in text_after
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
