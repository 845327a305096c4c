"""The table of implementations, devices and presets, against what is known of the devices."""

import json

import jax
import pytest
from gpu_aot import kernels, resources

from experiments import backends, targets
from taco_jax import PRESETS
from taco_jax.config import INTEGERS
from taco_jax.pallas import registry

WITHOUT_E4M3, OTHER_MAKERS = ("A100",), ("AMD MI300", "TPU", "CPU")
COMPRESSED = [preset for preset in PRESETS if preset != "none"]
FAST = [preset for preset in COMPRESSED if preset not in ("paper", "bf16")]


@pytest.fixture(scope="module")
def answers():
    found = backends.answers("bfloat16")
    return {(a.implementation, a.device, a.preset): a for a in found}


def devices_of(answers, implementation: str, preset: str) -> set[str]:
    return {d for (i, d, p), a in answers.items() if (i, p) == (implementation, preset) and a.reason is None}


def test_every_combination_has_an_answer_with_a_reason_or_a_proof(answers):
    assert len(answers) == len(registry.IMPLEMENTATIONS) * len(backends.DEVICES) * len(COMPRESSED)
    for answer in answers.values():
        assert bool(answer.reason) != bool(answer.proven)


def test_who_serves_what(answers):
    every = {device.name for device in backends.DEVICES}
    nvidia = every - set(OTHER_MAKERS)
    for preset in COMPRESSED:
        assert devices_of(answers, "xla", preset) == every
        expected = nvidia if preset in INTEGERS else nvidia - set(WITHOUT_E4M3) if preset in FAST else set()
        assert devices_of(answers, "triton", preset) == expected
        assert devices_of(answers, "triton_sm80", preset) == (nvidia if preset in FAST else set())
        wgmma = {"H100, H200"} if preset == "taco" and jax.__version_info__ >= (0, 12) else set()
        assert devices_of(answers, "mosaic_gpu", preset) == wgmma


def test_one_is_chosen_and_triton_comes_first(answers):
    for device in backends.DEVICES:
        for preset in COMPRESSED:
            chosen = [i for (i, d, p), a in answers.items() if (d, p) == (device.name, preset) and a.is_default]
            triton = "triton_sm80" if device.name in WITHOUT_E4M3 and preset not in INTEGERS else "triton"
            assert chosen == [triton if device.name in devices_of(answers, triton, preset) else "xla"]


def test_what_is_said_to_be_compiled_is_what_the_tests_compile():
    held = resources.read_table()
    for (implementation, capability), presets in backends.COMPILED_FOR.items():
        for gpu, of_gpu in targets.CAPABILITIES.items():
            if of_gpu != capability or implementation == "mosaic_gpu":
                continue
            integers = {p for p in presets if kernels.casts_with_integers(kernels.CODECS[p], gpu)}
            assert integers == (set(presets) if implementation == "triton_sm80" else set())
            assert set(presets) <= {codec for codec, _ in held[gpu]}


def test_it_prints_and_writes_the_same(capsys, tmp_path):
    file = tmp_path / "backends.json"
    assert backends.main(["--dtype=float32", f"--json={file}"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"JAX {jax.__version__}, float32" in printed and "chosen when no implementation is named" in printed
    assert all(meaning in printed for meaning in backends.MEANING.values())
    written = json.loads(file.read_text())
    assert len(written) == len(registry.IMPLEMENTATIONS) * len(backends.DEVICES) * len(COMPRESSED)
    mosaic = [
        a for a in written if (a["implementation"], a["device"], a["preset"]) == ("mosaic_gpu", "H100, H200", "taco")
    ]
    assert "bf16 only" in mosaic[0]["reason"] or jax.__version_info__ < (0, 12)


def test_a_file_that_cannot_be_written_is_one_line(capsys, tmp_path):
    assert backends.main([f"--json={tmp_path / 'no' / 'file'}"]) == 2
    assert "cannot write" in capsys.readouterr().err.strip()
