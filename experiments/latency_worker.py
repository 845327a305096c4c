"""One process of `experiments.latency`: it runs prefill and decoding with the compression that it is told.

The arguments are the mesh, the sizes of prompts, the limit `min_bytes` to be judged, and the compressions, of which
every message is compressed. Its commands and answers, as `experiments.link_workers` carries them:

    {"run": "taco", "size": 64, "calls": 2}  ->  {"seconds": [...], "sent": bytes, "payload": bytes}
    {"run": "taco", "size": 1, "calls": 16}  ->  the same of tokens that continue a prompt, and "tokens" of their ids
"""

import contextlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from experiments import step
from experiments.communication import CommunicationMismatch, planned_collectives, read_collectives
from experiments.config import CommunicationConfig, DataConfig, ParallelConfig, TrainConfig
from experiments.generation import SMALLEST_PREFILL, Generator, Sampling
from experiments.inference import sent_per_call
from experiments.latency_report import BASELINE, LONGEST
from experiments.link_workers import answer, bytes_over_links, commands, counted, joined_mesh
from experiments.train import place
from taco_jax import snr_db
from taco_jax.models.config import ModelConfig

MODEL = ModelConfig(num_layers=2, hidden_size=256, num_heads=8, vocab_size=256, max_positions=LONGEST)
_PROMPT = SMALLEST_PREFILL


def configuration(mesh: str, compression: str, min_bytes: int) -> TrainConfig:
    """Return the model that is timed; the same whatever the mesh and the compression."""
    return TrainConfig(
        mesh=mesh,
        compression=compression,
        dtype="float32",
        model=MODEL,
        data=DataConfig(sequence_length=_PROMPT, batch_size=1),
        parallel=ParallelConfig(num_microbatches=1),
        communication=CommunicationConfig(min_bytes=min_bytes),
    )


def new_generator(config: TrainConfig, mesh: Mesh) -> Generator:
    """Return what takes the likeliest tokens; its cache has the same size whatever the prompts."""
    allowed = np.ones(MODEL.vocab_size, bool)
    return Generator(step.build(config, mesh), allowed, length=LONGEST, sampling=Sampling(temperature=0))


@contextlib.contextmanager
def compiled_fast() -> Iterator[None]:
    """Compile what is not timed without optimisations."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


class Inference:
    """A model with one compression: its programs for all sizes, compiled, and its state."""

    def __init__(self, config: TrainConfig, mesh: Mesh, sizes: Sequence[int], parameters: Any):
        self._text = np.random.default_rng(config.seed).integers(
            0, MODEL.vocab_size, max(*sizes, _PROMPT), dtype=np.int32
        )
        self.generator = new_generator(config, mesh)
        self.program = self.generator.program
        self.state = self._new_state(parameters)
        for size in (*sizes, _PROMPT):
            self.generator.compiled(size)

    def _new_state(self, parameters: Any) -> dict:
        """Return the scales of a codec that learns them from passes over the prompt, and the parameters."""
        program, seed = self.program, self.program.config.seed
        if not program.compression.is_adaptive:
            return {"params": parameters or program.init(seed)["params"], "scales": program.init_scales()}
        tokens = self._text[None, :_PROMPT]
        batch = {"tokens": tokens, "targets": np.roll(tokens, -1), "mask": np.ones(tokens.shape, np.float32)}
        with compiled_fast():
            state = program.calibrate(program.init(seed), place(batch, program.batch_sharding))
        return {"params": parameters or state["params"], "scales": state["scales"]}

    def logits(self) -> jax.Array:
        """Return the logits of a prompt."""
        with compiled_fast():
            return self.program.logits(self.state, jnp.asarray(self._text[None, :_PROMPT]))

    def planned(self, size: int) -> float:
        """Return the bytes that this process is to send, by the compiled program."""
        mesh, compiled = self.program.mesh, self.generator.compiled(size)
        sent_per_call(self.program, self.generator.traced(size), compiled)
        collectives = read_collectives(compiled.as_text(), dict(mesh.shape))
        return bytes_over_links(collectives, mesh)[jax.process_index()]

    def prefill(self, size: int, calls: int) -> dict[str, Any]:
        """Read a prompt several times."""
        cache = self.generator.new_cache(self.state["params"])
        with counted() as sent:
            for _ in range(calls):
                _, cache = self.generator.advance(self.state, self._text[None, :size], 0, size, 0, cache)
        return {"seconds": self._seconds(calls), **sent}

    def decode(self, calls: int) -> dict[str, Any]:
        """Continue a prompt, whose own time does not count."""
        drawn = self.generator.generate(self.state, self._text[:_PROMPT].tolist())
        tokens = [next(drawn)]
        with counted() as sent:
            tokens += itertools.islice(drawn, calls)
        return {"seconds": self._seconds(calls), "tokens": tokens, **sent}

    def _seconds(self, calls: int) -> list[float]:
        return [seconds for _, seconds in self.generator.seconds[-calls:]]


def exact_by(limited: Generator, exact: Generator, compressed: Generator, size: int) -> bool:
    """Return whether a limit of bytes leaves the messages of a size as they are.

    Raises:
        CommunicationMismatch: if it leaves some and compresses others, so that neither program stands for it.
    """
    axes = dict(exact.program.mesh.shape)
    plans = [planned_collectives(g.traced(size).jaxpr, axes) for g in (limited, exact, compressed)]
    found, all_exact, all_compressed = ([(c.op, c.dtype, c.payload_bytes, c.count) for c in plan] for plan in plans)
    if found not in (all_exact, all_compressed):
        raise CommunicationMismatch(f"of {size} positions some messages are exact and some compressed")
    return found == all_exact


def main() -> int:
    """Serve the commands that come in."""
    mesh_text, numbers, limit, *compressions = sys.argv[1:]
    sizes = [int(word) for word in numbers.split(",")]
    mesh = joined_mesh(mesh_text)
    models: dict[str, Inference] = {}
    found: dict[str, Any] = {}
    for name in (BASELINE, *(name for name in compressions if name != BASELINE)):
        answer({"compiling": name})
        parameters = models[BASELINE].state["params"] if models else None
        models[name] = own = Inference(configuration(mesh_text, name, 0), mesh, sizes, parameters)
        limited = new_generator(configuration(mesh_text, name, int(limit)), mesh)
        found[name] = {
            "planned": {size: own.planned(size) for size in sizes},
            "exact": [size for size in sizes if exact_by(limited, models[BASELINE].generator, own.generator, size)],
            "snr_db": float(snr_db(models[BASELINE].logits(), own.logits())),
        }
    itemsize = jnp.dtype(models[BASELINE].program.config.dtype).itemsize
    answer({"ready": {"bytes_per_position": MODEL.hidden_size * itemsize, "models": found}})
    for command in commands():
        model, size, calls = models[command["run"]], command["size"], command["calls"]
        answer(model.decode(calls) if size == 1 else model.prefill(size, calls))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
