"""Compile one compressed all-reduce for eight GPUs: `python -m gpu_aot.two_hop GPU FILE [IMPLEMENTATION]`.

Writes its HLO to FILE.

In a process of its own, because a failure in LLVM or ptxas ends the process, and because XLA reads once where to dump
the PTX.
"""

import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import taco_jax
from experiments import targets

ROWS, COLUMNS, RANKS = 8192, 4096, 8


def compile_psum(gpu: str, implementation: str = "triton") -> str:
    """Return the optimised HLO of `taco_jax.psum` of bf16[8192, 4096] per shard under `check_vma=True`."""
    mesh = targets.mesh(gpu, {"tp": RANKS})
    compression = taco_jax.Compression.named("taco", implementation=implementation)

    def all_reduce(x, scales):
        return taco_jax.psum(x, "tp", compression=compression, scales=scales, name="mlp")

    mapped = jax.jit(jax.shard_map(all_reduce, mesh=mesh, in_specs=(P("tp"), P()), out_specs=P(), check_vma=True))
    x = jax.ShapeDtypeStruct((RANKS * ROWS, COLUMNS), jnp.bfloat16, sharding=NamedSharding(mesh, P("tp")))
    scales = jax.ShapeDtypeStruct((2, 2, 5), jnp.float32, sharding=NamedSharding(mesh, P()))
    return mapped.lower(x, scales).compile().as_text()


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning)
    Path(sys.argv[2]).write_text(compile_psum(sys.argv[1], *sys.argv[3:]))
