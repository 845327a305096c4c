"""Hugging Face folders, runs and the command that converts them, in the current folder."""

import dataclasses
import filecmp
import json
import os
import shutil
from pathlib import Path

import jax
import numpy as np

from experiments import convert
from experiments.checkpoint import Checkpoints, Position
from experiments.cli import config_json
from experiments.config import CheckpointConfig, DataConfig, TrainConfig
from taco_jax.models.config import ModelConfig
from taco_jax.models.families import abstract_parameters

GOLDEN = Path(__file__).parent / "golden"
CARRIED = ("tokenizer.json", "merges.txt", "generation_config.json")


def copied(name: str, to: str) -> Path:
    """Copy a golden folder without its expected results, tokenizer files beside it."""
    shutil.copytree(GOLDEN / name, to, ignore=shutil.ignore_patterns("expected*"))
    for file in CARRIED[:2]:
        Path(to, file).write_text(f"{file} of {name}")
    return Path(to)


def rewrite(path: Path, **changes) -> dict:
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps(content, indent=2) + "\n")
    return content


def assert_same_folder(found: str, want: str) -> None:
    names = sorted(os.listdir(want))
    assert sorted(os.listdir(found)) == names
    assert filecmp.cmpfiles(found, want, names, shallow=False) == (names, [], [])


def assert_same_tensors(found: dict, want: dict) -> None:
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert found[name].tobytes() == tensor.tobytes(), name


def run(*argv: str) -> None:
    assert convert.main(list(argv)) == 0


def refusal(capsys, *argv: str) -> str:
    """Return the one line with which a command is refused; nothing is left behind."""
    before = sorted(os.listdir())
    assert convert.main(list(argv)) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert sorted(os.listdir()) == before
    return captured.err.removeprefix("python -m experiments.convert: error: ").strip()


def saved_run(folder: str, model: ModelConfig, shards: int, steps=(3,), **changes) -> dict:
    """Write what a run leaves, its parameters padded for `shards` devices per layer; return them unpadded."""
    config = TrainConfig(model=model, **{"data": DataConfig(sequence_length=24), **changes})
    resolved = dataclasses.replace(model, max_positions=model.max_positions or 24).resolved()
    Path(folder).mkdir()
    Path(folder, "config.json").write_text(config_json(config))
    stored, unpadded = (abstract_parameters(resolved, shards=n) for n in (shards, 0))
    with Checkpoints(Path(folder, "checkpoints"), CheckpointConfig()) as checkpoints:
        for step in steps:
            rng = np.random.default_rng(step)
            logical = jax.tree.map(lambda x, r=rng: r.normal(size=x.shape).astype(np.float32), unpadded)
            full = jax.tree.map(
                lambda x, s: jax.numpy.pad(x, [(0, n - m) for m, n in zip(x.shape, s.shape, strict=True)]),
                logical,
                stored,
            )
            state = {"params": full, "opt_state": {"mu": jax.numpy.ones(3)}}
            position = Position(step, dataclasses.asdict(config), "digest")
            checkpoints.save(position, state, {"params": unpadded, "opt_state": state["opt_state"]})
    return logical
