"""Let a trained model continue a text, token by token."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.tokenizer import ByteTokenizer, Tokenizer


def sample_text(
    program: Any,
    state: Any,
    *,
    prompt: Sequence[int],
    length: int,
    context: int,
    seed: int,
    temperature: float = 0.8,
    tokenizer: Tokenizer | None = None,
) -> str:
    """Return the text of `prompt` and of `length` ids that the model continues it with, the same for the same seed.

    p(next = v) = softmax(logits_v / temperature) over the ids that the tokenizer has a token for, given the last
    `context` ids. The model may know more ids; they are padding.

    Args:
        program: whose `logits(state, tokens[1, S])` returns f32[1, S, V], V at least the tokenizer's vocab_size.
        state: the state of the run.
        prompt: one id or more to begin with.
        length: number of ids to draw.
        context: longest window the model reads.
        seed: of the draws.
        temperature: below 1 the likely ids become likelier.
        tokenizer: of the ids; bytes by default.
    """
    tokenizer = tokenizer or ByteTokenizer()
    vocab_size, unused = tokenizer.vocab_size, list(tokenizer.unused)
    generator = np.random.default_rng(seed)
    text = list(prompt)
    # One shape, so that one program is compiled: what lies right of a position does not reach it.
    window = np.zeros((1, context), np.int32)
    for _ in range(length):
        recent = text[-context:]
        window[0, : len(recent)] = recent
        logits = np.array(program.logits(state, window))[0, len(recent) - 1, :vocab_size]
        logits[unused] = -np.inf
        weights = np.exp((logits - np.max(logits)).astype(np.float64) / temperature)
        text.append(int(generator.choice(vocab_size, p=weights / weights.sum())))
    return tokenizer.decode(text)
