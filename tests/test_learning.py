"""A trained model reads its context: a model of byte pairs alone would not notice when the rest is shuffled."""

import jax
import numpy as np
import pytest

from experiments import step, train
from experiments.checkpoint import Checkpoints
from experiments.cli import apply_settings
from experiments.config import CheckpointConfig
from experiments.data import load_corpus
from experiments.recipes import RECIPES
from taco_jax.sharding.mesh import make_mesh, parse_mesh

STEPS = 250


@pytest.mark.slow
def test_shuffling_all_but_the_last_byte_of_the_context_costs_a_tenth_of_a_nat(tmp_path):
    arguments = ["--mesh=dp1,pp1,tp2", "--recipe=small", f"--steps={STEPS}", f"--out={tmp_path}"]
    settings = [f"--set=optimizer.decay_steps={STEPS}", "--set=sample_length=0"]
    assert train.main([*arguments, *settings]) == 0

    config = apply_settings(RECIPES["small"](), ["model.vocab_size=256"])
    program = step.build(config, make_mesh(parse_mesh("dp1,pp1,tp2")))
    with Checkpoints(tmp_path / "checkpoints", CheckpointConfig()) as checkpoints:
        state, position = checkpoints.restore(program.abstract_state(), unpadded=program.unpadded_state)
    assert position.step == STEPS

    length = config.data.sequence_length
    text = load_corpus(config.data).validation.astype(np.int32)
    starts = np.random.default_rng(0).integers(0, text.size - length - 1, 256)
    windows = np.stack([text[s : s + length + 1] for s in starts])
    shuffled = np.random.default_rng(1).permuted(windows[:, : length - 1], axis=1)
    shuffled = np.concatenate([shuffled, windows[:, length - 1 :]], axis=1)

    in_order, out_of_order = (_last_byte_loss(program, state, w) for w in (windows, shuffled))
    assert in_order < 2.3
    assert out_of_order >= in_order + 0.1, (in_order, out_of_order)


def _last_byte_loss(program: step.Program, state: dict, windows: np.ndarray) -> float:
    """Return the mean of -log p(last byte | all before it) in nats, by NumPy from the model's logits."""
    logits = np.asarray(jax.device_get(program.logits(state, windows[:, :-1]))[:, -1], np.float64)
    largest = logits.max(axis=-1, keepdims=True)
    log_p = logits - largest - np.log(np.exp(logits - largest).sum(axis=-1, keepdims=True))
    return float(-log_p[np.arange(len(windows)), windows[:, -1]].mean())
