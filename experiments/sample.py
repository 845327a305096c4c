"""Let a trained model continue a text, byte by byte."""

from typing import Any

import numpy as np


def sample_text(
    program: Any, state: Any, *, prompt: bytes, length: int, context: int, seed: int, temperature: float = 0.8
) -> str:
    """Return `prompt` and `length` bytes that the model continues it with, the same for the same seed.

    p(next = v) = softmax(logits_v / temperature) over the 256 bytes, given the last `context` bytes.

    Args:
        program: whose `logits(state, tokens[1, S])` returns f32[1, S, V], V at least 256.
        state: the state of the run.
        prompt: a text of one byte or more to begin with.
        length: number of bytes to draw.
        context: longest window the model reads.
        seed: of the draws.
        temperature: below 1 the likely bytes become likelier.
    """
    generator = np.random.default_rng(seed)
    text = list(prompt)
    # One shape, so that one program is compiled: what lies right of a position does not reach it.
    window = np.zeros((1, context), np.int32)
    for _ in range(length):
        recent = text[-context:]
        window[0, : len(recent)] = recent
        logits = np.asarray(program.logits(state, window))[0, len(recent) - 1, :256]
        weights = np.exp((logits - np.max(logits)).astype(np.float64) / temperature)
        text.append(int(generator.choice(256, p=weights / weights.sum())))
    return bytes(text).decode("utf-8", errors="replace")
