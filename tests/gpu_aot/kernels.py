"""Compile every kernel of some codecs for one GPU: `python -m gpu_aot.kernels GPU CODEC...`, names of `CODECS`.

Each kernel is a program of its own called `CODEC__OPERATION`, which is how the PTX that XLA dumps is told apart. In a
process of its own, because a failure in LLVM or ptxas ends the process.
"""

import functools
import sys
import warnings

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from experiments import targets
from taco_jax import wire
from taco_jax.config import Codec
from taco_jax.pallas import triton, triton_sm80

ROWS, COLUMNS, RANKS = 8, 1 << 20, 8
"""A message as the all-reduce sends it: a row for each rank, and scales that leave the next row aligned."""

CODECS = {
    "taco": Codec("e4m3", 128, "block", "adaptive"),
    "taco_block": Codec("e4m3", 128, "block"),
    "fp8": Codec("e4m3", 128),
    "int8": Codec("int8", 128, "block"),
    "e4m3_adaptive": Codec("e4m3", 128, None, "adaptive"),
    "e4m3_e8m0": Codec("e4m3", 128, "block", scale_dtype="e8m0"),
    "e4m3_32": Codec("e4m3", 32, "block"),
    "e4m3_512": Codec("e4m3", 512, "block"),
    "taco_512": Codec("e4m3", 512, "block", "adaptive"),
    "e5m2_adaptive": Codec("e5m2", 128, "block", "adaptive"),
    "e5m2_block": Codec("e5m2", 128, "block"),
    "e5m2_e8m0": Codec("e5m2", 128, "block", scale_dtype="e8m0"),
    "int8_plain": Codec("int8", 128),
    "int8_32": Codec("int8", 32, "block"),
    "int8_512": Codec("int8", 512, "block"),
    "taco_tokens": Codec("e4m3", 128, "block", "adaptive", layout="tokens"),
    "int8_tokens": Codec("int8", 128, "block", layout="tokens"),
    "int6": Codec("int6", 128, "block"),
    "int6_512": Codec("int6", 512, "block"),
    "int4": Codec("int4", 128, "block"),
    "int4_32": Codec("int4", 32, "block"),
}
CHANNELS = 4096
PRESETS = ("taco", "taco_block", "fp8", "int8", "int6", "int4")
OPERATIONS = ("encode", "reduce", "decode", "decode_residual", "decode_sum")


def casts_with_integers(codec: Codec, gpu: str) -> bool:
    """Return whether `triton` declines the codec there."""
    return triton.device_unsupported_reason(codec, targets.CAPABILITIES[gpu]) is not None


def operations(codec: Codec, gpu: str) -> dict:
    """Return {operation: (function, descriptions of its arguments)}; bf16 values, 8 ranks, with the observation."""
    implementation = triton_sm80 if casts_with_integers(codec, gpu) else triton
    message = ROWS, wire.message_size(COLUMNS, codec)
    x = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.bfloat16)
    one, all_ranks = (jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in (message, (RANKS, message[1])))
    alpha, alphas = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((), (2,)))
    channels = codec.channels((ROWS, CHANNELS))
    decode, decode_sum = (
        functools.partial(f, codec=codec, dtype=jnp.bfloat16, channels=channels)
        for f in (implementation.decode, implementation.decode_sum)
    )
    return {
        "encode": (lambda x, a: implementation.encode(x, codec, a, observe=True, channels=channels), (x, alpha)),
        "reduce": (lambda m, a: implementation.reduce(m, codec, a, observe=True), (all_ranks, alphas)),
        "decode": (lambda m, a: decode(m, alpha=a), (one, alpha)),
        "decode_residual": (lambda m, a, r: decode(m, alpha=a, residual=r), (one, alpha, x)),
        "decode_sum": (lambda m, a: decode_sum(m, alpha=a), (all_ranks, alpha)),
    }


def compile_kernel(name: str, gpu: str, function, arguments) -> None:
    """Compile one program for one GPU."""
    mesh = targets.mesh(gpu, {"one": 1})
    everywhere = NamedSharding(mesh, P())
    arguments = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=everywhere) for a in arguments]

    def program(*values):
        return function(*values)

    program.__name__ = name
    jax.jit(jax.shard_map(program, mesh=mesh, in_specs=P(), out_specs=P())).lower(*arguments).compile()


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning)
    for codec_name in sys.argv[2:]:
        for operation, (function, arguments) in operations(CODECS[codec_name], sys.argv[1]).items():
            compile_kernel(f"{codec_name}__{operation}", sys.argv[1], function, arguments)
