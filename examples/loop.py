"""What the examples share: eight devices, batches of bytes, the training loop, and a look at what travels."""

import collections
import gzip
import re
from pathlib import Path

import jax
import numpy as np

jax.config.update("jax_num_cpu_devices", 8)  # emulated if there are no accelerators

BATCH, LENGTH = 16, 64
_TEXT = np.frombuffer(gzip.decompress((Path(__file__).parent.parent / "taco_jax/data/kjv.txt.gz").read_bytes()), "u1")
_COLLECTIVE = re.compile(
    r" = \(?(\w+)\[.* (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
)


def batch(step: int) -> np.ndarray:
    """Return int32[BATCH, LENGTH + 1] bytes of the King James Bible; the targets are the inputs shifted by one."""
    starts = np.random.default_rng(step).integers(0, len(_TEXT) - LENGTH - 1, BATCH)
    return _TEXT[starts[:, None] + np.arange(LENGTH + 1)].astype(np.int32)


def on_the_wire(compiled) -> collections.Counter:
    """Count the collectives of a compiled program, such as `all-to-all u8`; a loop's body counts once."""
    return collections.Counter(f"{op} {dtype}" for dtype, op in _COLLECTIVE.findall(compiled.as_text()))


def train(step, state, steps: int = 30):
    """Run `state, loss = step(state, tokens)`; return the losses (nats per byte) and the compiled step."""
    compiled = step.lower(state, batch(0)).compile()
    print("on the wire:", ", ".join(f"{count} {what}" for what, count in sorted(on_the_wire(compiled).items())))
    losses = []
    for i in range(steps):
        state, loss = compiled(state, batch(i))
        losses.append(float(loss))
        if i % 5 == 0 or i == steps - 1:
            print(f"step {i:2d}  loss {losses[-1]:.3f}")
    return losses, compiled
