"""The codec's operations as programs of one device: what they work on, the least bytes they can move, and compiling.

Sizes are those of an all-reduce of one bf16 tensor on n ranks: x[n, C] is encoded to messages u8[n, M], reduce and
decode_sum add n messages, decode takes n messages. A figure per value is per value of that tensor, n C in all.
"""

import functools
import warnings
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import taco_jax
from experiments import targets
from taco_jax import codec as codecs
from taco_jax import wire
from taco_jax.config import Codec
from taco_jax.pallas import registry

OPERATIONS = ("encode", "reduce", "decode", "decode_sum")
PRESETS = ("taco", "taco_block", "fp8", "int8", "int6", "int4")


@dataclass(frozen=True)
class Target:
    """A device to compile for.

    Attributes:
        mesh: the device, alone.
        platform: "gpu" or "cpu".
        capability: compute capability of a GPU, as JAX spells it.
        label: its name, and whether it exists.
        real: whether programs can run on it.
    """

    mesh: Mesh
    platform: str
    capability: str
    label: str
    real: bool


@dataclass(frozen=True)
class Program:
    """One operation of a preset's codec in one implementation."""

    preset: str
    operation: str
    implementation: str

    @property
    def codec(self) -> Codec:
        """The codec of the preset's forward direction."""
        codec = taco_jax.Compression.named(self.preset).forward
        assert codec is not None
        return codec


def real_gpu() -> jax.Device | None:
    """Return this machine's first GPU, None without one; where no driver is, JAX is not asked to look for it."""
    if not any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")):
        return None
    device = jax.devices()[0]
    return device if device.platform == "gpu" else None


def find_target(name: str) -> Target:
    """Return the device to compile for.

    Args:
        name: "cpu", a GPU of `targets.GPUS`, which need not exist, or "auto": this machine's GPU, without one an H200
            where it can be compiled for, else the CPU.

    Raises:
        ValueError: if the name means nothing or its compiler is missing.
    """
    if name not in ("auto", "cpu", *targets.GPUS):
        raise ValueError(f"--device must be auto, cpu or one of {', '.join(targets.GPUS)}, got {name!r}")
    if name == "auto":
        if gpu := real_gpu():
            capability = str(getattr(gpu, "compute_capability", ""))
            return Target(_alone(gpu), "gpu", capability, f"{gpu.device_kind} ({capability})", True)
        name = "cpu" if targets.missing_compiler() else "h200"
    # The CUDA plugin then answers for the compiler only and looks for no driver.
    jax.config.update("jax_platforms", "cpu")
    if name == "cpu":
        return Target(_alone(jax.devices("cpu")[0]), "cpu", "", "this machine's CPU", True)
    if reason := targets.missing_compiler():
        raise ValueError(reason)
    label = f"{name.upper()} ({targets.CAPABILITIES[name]}), described: compiled for it, not run"
    return Target(targets.mesh(name, {"one": 1}), "gpu", targets.CAPABILITIES[name], label, False)


def programs(
    target: Target, presets: tuple[str, ...], implementations: tuple[str, ...] = registry.IMPLEMENTATIONS
) -> tuple[list[Program], list[str]]:
    """Return the operations that are served on a device, and a line for each reason why one is not."""
    served: list[Program] = []
    declined: dict[tuple[str, str], list[str]] = {}
    for preset in presets:
        for name in implementations:
            found = [Program(preset, operation, name) for operation in OPERATIONS]
            at = target.platform, target.capability
            if reason := registry.unsupported_reason(name, found[0].codec, jnp.bfloat16, *at):
                declined.setdefault((name, reason), []).append(preset)
            else:
                served += found
    lines = [f"{name} does not serve {', '.join(names)}: {reason}" for (name, reason), names in declined.items()]
    return sorted(served, key=lambda p: (presets.index(p.preset), OPERATIONS.index(p.operation))), lines


def floor(program: Program, ranks: int) -> float:
    """Return the least bytes per value of the tensor: 2 of bf16, those of a message, each once; scales come on top."""
    sent = program.codec.value_bits / 8
    least = {"encode": 2 + sent, "decode": sent + 2, "reduce": sent * (1 + 1 / ranks), "decode_sum": sent + 2 / ranks}
    return least[program.operation]


def operand_shape(program: Program, ranks: int, columns: int) -> jax.ShapeDtypeStruct:
    """Return what the operation works on: bf16[n, C] or messages u8[n, M]."""
    if program.operation == "encode":
        return jax.ShapeDtypeStruct((ranks, columns), jnp.bfloat16)
    return jax.ShapeDtypeStruct((ranks, wire.message_size(columns, program.codec)), jnp.uint8)


def alpha_shape(program: Program) -> tuple[int, ...]:
    """Return the shape of the alphas: one, and for reduce one for each hop."""
    return (2,) if program.operation == "reduce" else ()


@functools.cache
def compile_program(program: Program, target: Target, ranks: int, columns: int) -> jax.stages.Compiled:
    """Compile one operation; its arguments are the operand and the alpha f32[], for reduce those of both hops, f32[2].

    Adaptive codecs observe what they encode, as a training step needs it of them.
    """
    codec, options = program.codec, {"implementation": program.implementation}
    observe = codec.scale == "adaptive"

    def run(operand, alpha):
        if program.operation == "encode":
            return codecs.encode(operand, codec, alpha, observe=observe, **options)
        if program.operation == "reduce":
            return codecs.reduce(operand, codec, alpha, jnp.bfloat16, observe=observe, **options)
        decode = codecs.decode if program.operation == "decode" else codecs.decode_sum
        return decode(operand, codec, alpha, jnp.bfloat16, **options)

    shapes = operand_shape(program, ranks, columns), jax.ShapeDtypeStruct(alpha_shape(program), jnp.float32)
    here = NamedSharding(target.mesh, P())
    arguments = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=here) for s in shapes]
    mapped = jax.shard_map(run, mesh=target.mesh, in_specs=P(), out_specs=P())
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning
        )
        return jax.jit(mapped).lower(*arguments).compile()


def _alone(device: jax.Device) -> Mesh:
    return jax.make_mesh((1,), ("one",), (jax.sharding.AxisType.Auto,), devices=[device])
