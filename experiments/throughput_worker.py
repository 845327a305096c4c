"""One process of `experiments.throughput`: it compiles the steps of all compressions and runs those it is told to.

Its commands and answers, as `experiments.link_workers` carries them:

    {"run": "taco", "steps": 2}  ->  {"seconds": [...], "sent": bytes, "payload": bytes}
    {"codec": "taco"}            ->  {"seconds": of the codec's work of one step}

`alone` is the step of one device's share of the model without the others, no message sent: what a step takes when
communication costs nothing. All processes run it at the same time, as they run the others.
"""

import dataclasses
import sys
import time
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from experiments import communication, step
from experiments.config import DataConfig, ParallelConfig, TrainConfig
from experiments.link_workers import answer, bytes_over_links, commands, counted, joined_mesh, together
from experiments.throughput_report import ALONE, num_microbatches
from experiments.traffic import Collective
from experiments.train import place
from taco_jax import codec as codecs
from taco_jax import wire
from taco_jax.config import Codec
from taco_jax.models.config import ModelConfig
from taco_jax.sharding.mesh import AXES, parse_mesh

MODEL = ModelConfig(num_layers=2, hidden_size=128, num_heads=8, intermediate_size=512, vocab_size=256)
TOKENS = DataConfig(sequence_length=128, batch_size=16)


def configuration(mesh: str, compression: str) -> TrainConfig:
    """Return the run that is timed; the same model and tokens whatever the mesh and the compression."""
    return TrainConfig(
        mesh=mesh,
        compression=compression,
        dtype="float32",
        model=MODEL,
        data=TOKENS,
        parallel=ParallelConfig(num_microbatches=num_microbatches(mesh)),
    )


def share_of_one(config: TrainConfig, local: int) -> TrainConfig:
    """Return the run of `local` devices that each do the share of one device of the mesh: its heads, ids, layers."""
    sizes = parse_mesh(config.mesh)
    tp, model = sizes["tp"], step.model_config(config)
    shard = dataclasses.replace(
        model,
        num_layers=model.num_layers // sizes["pp"],
        num_heads=model.num_heads // tp,
        num_kv_heads=model.num_kv_heads // tp,
        intermediate_size=model.intermediate_size // tp,
        vocab_size=model.vocab_size // tp,
    )
    data = dataclasses.replace(config.data, batch_size=config.data.batch_size // sizes["dp"] * local)
    return dataclasses.replace(config, mesh=f"dp{local}", compression="none", model=shard, data=data)


class Step:
    """A compiled training step with its state; every call trains on."""

    def __init__(self, config: TrainConfig, mesh: Mesh):
        self.program = step.build(config, mesh)
        rng = np.random.default_rng(config.seed)
        shape = (config.data.batch_size, config.data.sequence_length)
        tokens = rng.integers(0, config.model.vocab_size, (2, *shape), dtype=np.int32)
        rows = {"tokens": tokens[0], "targets": tokens[1], "mask": np.ones(shape, np.float32)}
        self._batch = place(rows, self.program.batch_sharding)
        self._state = self.program.calibrate(self.program.init(config.seed), self._batch)
        self._done = 0

    def __call__(self) -> float:
        """Run one step to its end; return the seconds."""
        started = time.perf_counter()
        self._state, metrics = self.program.train_step(self._state, self._done, self._batch)
        jax.block_until_ready((self._state, metrics))
        self._done += 1
        return time.perf_counter() - started


def codec_seconds(plan: Iterable[Collective], codec: Codec | None) -> float:
    """Return the seconds that encoding, adding and decoding the all-reduces of a step take one device.

    One of each per message; that a backward pass decodes what it kept once more is left out.
    """
    if codec is None:
        return 0.0
    messages: dict[tuple[int, int], Fraction] = {}
    for c in plan:
        if c.op == "all-to-all" and c.axis == "tp":
            shape = c.group_size, wire.message_columns(c.payload_bytes // c.group_size, codec)
            messages[shape] = messages.get(shape, Fraction(0)) + c.count
    return sum(float(count) * _seconds_of_message(codec, *shape) for shape, count in messages.items())


def _seconds_of_message(codec: Codec, ranks: int, columns: int) -> float:
    observe = codec.scale != "none"

    @jax.jit
    def work(x: jax.Array) -> Any:
        # Barriers where a step has collectives: nothing may be computed twice to be fused.
        message, seen = codecs.encode(x, codec, jnp.float32(1), observe=observe)
        received = jax.lax.optimization_barrier(message)
        message, seen_sum = codecs.reduce(received, codec, jnp.ones(2), x.dtype, observe=observe)
        gathered = jax.lax.optimization_barrier(jnp.broadcast_to(message, (ranks, *message.shape)))
        return codecs.decode(gathered, codec, jnp.float32(1), x.dtype), seen, seen_sum

    x = jax.random.normal(jax.random.key(0), (ranks, columns))
    jax.block_until_ready(work(x))
    times = []
    for _ in range(5):
        started = time.perf_counter()
        jax.block_until_ready(work(x))
        times.append(time.perf_counter() - started)
    return float(np.median(times))


def main() -> int:
    """Serve the commands that come in; the arguments are the mesh and the compressions."""
    mesh_text, *compressions = sys.argv[1:]
    mesh = joined_mesh(mesh_text)
    sizes = dict(mesh.shape)
    steps, planned, plans = {}, {}, {}
    for name in compressions:
        answer({"compiling": name})
        steps[name] = Step(configuration(mesh_text, name), mesh)
        program = steps[name].program
        text = program.compiled.as_text()
        assert text is not None
        collectives = communication.read_collectives(text, sizes)
        plans[name] = communication.planned_collectives(program.jaxpr, sizes)
        communication.check(collectives, plans[name], program.compressed_directions, program.compression.min_bytes)
        planned[name] = bytes_over_links(collectives, mesh)[jax.process_index()]
    local = jax.local_devices()
    own = Mesh(np.array(local).reshape(len(local), 1, 1), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    steps[ALONE] = Step(share_of_one(configuration(mesh_text, "none"), len(local)), own)
    answer({"ready": planned})
    for command in commands():
        if "codec" in command:
            name = command["codec"]
            codec = steps[name].program.compression.forward
            together()
            answer({"seconds": codec_seconds(plans[name], codec)})
            continue
        run = steps[command["run"]]
        with counted() as sent:
            seconds = [run() for _ in range(command["steps"])]
        answer({"seconds": seconds, **sent})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
