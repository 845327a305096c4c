"""Compile one compressed reduce-scatter for eight GPUs: `python -m gpu_aot.scatter GPU FILE IMPLEMENTATION`.

Writes its HLO to FILE.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import taco_jax
from experiments import targets
from gpu_aot.two_hop import COLUMNS, RANKS, ROWS


def compile_psum_scatter(gpu: str, implementation: str) -> str:
    """Return the optimised HLO of `taco_jax.psum_scatter` of bf16[8192, 4096] per shard under `check_vma=True`."""
    mesh = targets.mesh(gpu, {"tp": RANKS})
    compression = taco_jax.Compression.named("taco", implementation=implementation)

    def scatter(x, scales):
        return taco_jax.psum_scatter(x, "tp", tiled=True, compression=compression, scales=scales, name="mlp")

    mapped = jax.jit(jax.shard_map(scatter, mesh=mesh, in_specs=(P("tp"), P()), out_specs=P("tp"), check_vma=True))
    x = jax.ShapeDtypeStruct((RANKS * ROWS, COLUMNS), jnp.bfloat16, sharding=NamedSharding(mesh, P("tp")))
    scales = jax.ShapeDtypeStruct((2, 2, 5), jnp.float32, sharding=NamedSharding(mesh, P()))
    return mapped.lower(x, scales).compile().as_text()


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(compile_psum_scatter(*sys.argv[1::2]))
