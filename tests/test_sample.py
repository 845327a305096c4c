"""Samples of a fake model, whose logits depend on the whole window."""

import hashlib

import numpy as np
import pytest

from experiments.sample import sample_text
from experiments.tokenizer import ByteTokenizer


class Model:
    """Random logits of `vocab` ids; those that are no token's tower above the others."""

    def __init__(self, vocab: int, padding=()):
        self.vocab, self.padding = vocab, list(padding)

    def logits(self, state, window):
        seed = int(window[0].astype(np.int64) @ np.arange(1, window.shape[1] + 1))
        logits = 4 * np.random.default_rng(seed).standard_normal((1, window.shape[1], self.vocab), np.float32)
        logits[..., self.padding] = 1e4
        return logits


class Tokenizer(ByteTokenizer):
    """Seven letters, of which two are missing."""

    vocab_size = 7
    unused = (2, 5)

    def decode(self, ids):
        return "".join("abcdefg"[i] for i in ids)


def sample(model, **keywords) -> str:
    return sample_text(model, None, **{"prompt": b"In the", "length": 40, "context": 16, "seed": 5} | keywords)


def test_samples_of_bytes_are_those_of_earlier_versions():
    lines = "".join(f"{sample(Model(vocab))!r}\n" for vocab in (256, 300))
    assert hashlib.sha256(lines.encode()).hexdigest() == (
        "60a47ea45046fafce3d97d95903145435d747000f47ecfc0194b960fccd00064"
    )


@pytest.mark.parametrize("vocab", [256, 384])
def test_padding_is_never_sampled(vocab):
    assert sample(Model(vocab, range(256, vocab))).startswith("In the")
    text = sample(Model(vocab, [2, 5, *range(7, vocab)]), prompt=[0], length=300, tokenizer=Tokenizer())
    assert len(text) == 301 and set(text) == set("abdeg")
