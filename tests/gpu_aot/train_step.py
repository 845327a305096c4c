"""Compile the training step of a small GPT for eight GPUs: `python -m gpu_aot.train_step GPU FOLDER VARIANT...`.

A variant is COMPRESSION-CHUNKS-IMPLEMENTATION-SETTINGS, settings being `trainer` or `xla`. Each leaves VARIANT.hlo and
VARIANT.json (memory and the plan's messages); `two_hop` leaves the all-reduce alone, in jnp. In a process of its own,
because a failure in LLVM or ptxas ends the process.
"""

import json
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import taco_jax
from experiments import step, targets
from experiments.compiler_options import gpu_options
from experiments.overlap import AXES, step_config
from experiments.planned import planned_collectives


def compile_step(gpu: str, variant: str, folder: Path) -> None:
    compression, chunks, implementation, settings = variant.split("-")
    mesh = targets.mesh(gpu, AXES)
    program = step.build(step_config(compression, int(chunks), implementation), mesh)
    compiled = program.compiled if settings == "trainer" else program.compile({})
    assert gpu_options(mesh.devices.flat[0].platform, "")
    plan = [(c.op, c.site, c.direction, c.payload_bytes, int(c.count)) for c in planned_collectives(program.jaxpr, AXES)
            if c.compressed]  # fmt: skip
    report = {"temporary": compiled.memory_analysis().temp_size_in_bytes, "plan": plan}
    (folder / f"{variant}.hlo").write_text(compiled.as_text())
    (folder / f"{variant}.json").write_text(json.dumps(report))


def compile_psum(gpu: str, implementation: str, folder: Path) -> None:
    mesh = targets.mesh(gpu, {"tp": 8})
    compression = taco_jax.Compression.named("taco", implementation=implementation)

    def all_reduce(x, scales):
        return taco_jax.psum(x, "tp", compression=compression, scales=scales, name="mlp")

    mapped = jax.jit(jax.shard_map(all_reduce, mesh=mesh, in_specs=(P("tp"), P()), out_specs=P(), check_vma=True))
    x = jax.ShapeDtypeStruct((8 * 8192, 4096), jnp.bfloat16, sharding=NamedSharding(mesh, P("tp")))
    scales = jax.ShapeDtypeStruct((2, 2, 5), jnp.float32, sharding=NamedSharding(mesh, P()))
    text = mapped.lower(x, scales).compile().as_text()
    (folder / f"two_hop-{implementation}.hlo").write_text(text)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning)
    for name in sys.argv[3:]:
        if name.startswith("two_hop-"):
            compile_psum(sys.argv[1], name.removeprefix("two_hop-"), Path(sys.argv[2]))
        else:
            compile_step(sys.argv[1], name, Path(sys.argv[2]))
