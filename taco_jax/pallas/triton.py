"""The codec as three fused Pallas kernels (Triton) for NVIDIA GPUs: floats from sm_89 on, integers from sm_80 on.

Plain jnp writes the rotated f32 values to memory and reads them again; here each hop is one pass: encode reads the
values and writes one byte each, reduce reads n bytes and writes one, decode reads one byte and writes a value (with
packed integers 0.5 or 0.75 bytes). A message's scales stand in the same array, so no copy joins them. The observation
leaves encode and reduce as one row of partial sums per program.

Same contract, rounding points and additions as `taco_jax.pallas.xla`, hence the same bytes (sums of the observation
differ in order). The rotation is the butterfly of `taco_jax.hadamard` in the operations Triton has.

JAX 0.11 deprecated the backend (a DeprecationWarning when a program is lowered) and still compiles it. The kernels run
under `check_vma=True`. XLA cannot partition them: under a `shard_map` that leaves axes automatic, use `xla`. What GPUs
before sm_89 run instead is `triton_sm80`.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike

from taco_jax import compat, wire
from taco_jax.config import INTEGERS, Codec
from taco_jax.pallas.triton_kernels import SLOTS, WARPS, Tiling, decode_kernel, encode_kernel, reduce_kernel

_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
_MIN_CAPABILITY, _CAST_CAPABILITY = 8.0, 8.9
_MAX_SIZE = 2**31


def unsupported_reason(codec: Codec, dtype: DTypeLike) -> str | None:
    """Return why these kernels cannot serve the codec, or None."""
    if codec.scale == "paper":
        return 'it serves scale="adaptive" and "block", not "paper", which is for reproduction only'
    if codec.scale == "none":
        return "bf16 is rounded by plain jnp, there is nothing to fuse"
    if codec.format == "e3m4":
        return "NVIDIA GPUs have no cast to e3m4"
    if codec.rounding != "nearest" or codec.signs is not None:
        return "it rounds to nearest and rotates without signs"
    if jnp.dtype(dtype) not in _DTYPES:
        return f"it serves bf16, f16 and f32, not {jnp.dtype(dtype).name}"
    if axes := compat.automatic_axes():
        return f"XLA would gather the mesh axes that it partitions itself, {axes}, around every kernel"
    return None


def device_unsupported_reason(codec: Codec, compute_capability: str, *, integer_casts: bool = False) -> str | None:
    """Return why a GPU cannot run these kernels, or None; `compute_capability` as JAX spells it, e.g. "9.0"."""
    try:
        capability = float(compute_capability)
    except ValueError:
        return f"it is for NVIDIA GPUs, not {compute_capability or 'this device'}"
    if capability < _MIN_CAPABILITY:
        return f"it needs compute capability {_MIN_CAPABILITY}, the device has {compute_capability}"
    if capability < _CAST_CAPABILITY and codec.format not in INTEGERS and not integer_casts:
        return (
            f"its casts to {codec.format} need compute capability {_CAST_CAPABILITY}, the device has "
            f"{compute_capability}, which 'triton_sm80' is for"
        )
    return None


def encode(x: jax.Array, codec: Codec, alpha: jax.Array, *, observe: bool, channels: int = 1, **how: bool):
    """Rotate, scale, clamp and cast: reads x once and writes one byte a value.

    Args and Returns as for `xla.encode`, and:
        how: `interpret` runs the kernel's operations one by one on any device; `integer_casts` casts as
            `taco_jax.pallas.integer_casts` does, with the same bytes, on GPUs without instructions for it.
    """
    shape = (*x.shape[:-1], wire.message_size(x.shape[-1], codec))
    how |= {"observe": observe}
    return _call(encode_kernel, "encode", codec, [x], alpha, shape, jnp.uint8, channels=channels, **how)


def decode(
    message: jax.Array,
    codec: Codec,
    alpha: jax.Array,
    dtype: DTypeLike,
    *,
    channels: int = 1,
    residual: jax.Array | None = None,
    **how: bool,
):
    """Un-rotate, unscale, add the residual and cast: reads one byte a value, writes the value once. As `xla.decode`."""
    operands = [message[None]] if residual is None else [message[None], residual]
    return _decode(operands, codec, alpha, dtype, summed=False, channels=channels, **how)


def decode_sum(messages: jax.Array, codec: Codec, alpha: jax.Array, dtype, *, channels: int = 1, **how: bool):
    """Decode u8[n, ..., M] and add the n values in rank order in f32. As `xla.decode_sum`."""
    return _decode([messages], codec, alpha, dtype, summed=True, channels=channels, **how)


def reduce(messages: jax.Array, codec: Codec, alphas: jax.Array, *, observe: bool, **how: bool):
    """Add n messages in the rotated domain and encode the sum: reads n bytes and writes one. As `xla.reduce`."""
    how |= {"observe": observe}
    return _call(reduce_kernel, "reduce", codec, [messages], alphas, messages.shape[1:], jnp.uint8, **how)


def _decode(
    operands: list[jax.Array], codec: Codec, alpha: jax.Array, dtype, *, summed: bool, channels: int, **how: bool
):
    kernel = functools.partial(decode_kernel, summed=summed)
    message = operands[0].shape
    shape = (*message[1:-1], wire.message_columns(message[-1], codec))
    return _call(kernel, "decode", codec, operands, alpha, shape, dtype, channels=channels, **how)[0]


def _call(
    kernel,
    name: str,
    codec: Codec,
    operands: list[jax.Array],
    alphas: jax.Array,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    *,
    channels: int = 1,
    observe: bool = False,
    interpret: bool = False,
    integer_casts: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Run a kernel on tiles of whole blocks of flat arrays; returns its result and the observation."""
    operand, *residual = operands
    columns = operand.shape[-1] if name == "encode" else wire.message_columns(operand.shape[-1], codec)
    rows = math.prod(shape[:-1])
    blocks, per_row = rows * columns // codec.block, columns // codec.block
    tiling = Tiling(codec, blocks, per_row, channels, integer_casts)
    flat = operand.reshape(-1) if name == "encode" else operand.reshape(operand.shape[0], -1)
    flat, alphas, *residual = compat.vary_alike(flat, jnp.ravel(alphas), *(r.reshape(-1) for r in residual))
    if flat.size >= _MAX_SIZE:
        raise NotImplementedError(f"{flat.size} values or bytes at once: kernels count to 2^31; use more chunks")
    out_specs, out_shape = [pl.BlockSpec()], [compat.shape_like((math.prod(shape),), dtype, flat)]
    if observe:
        out_specs.append(pl.BlockSpec((None, SLOTS), lambda i: (i, 0)))
        out_shape.append(compat.shape_like((tiling.programs, SLOTS), jnp.float32, flat))
    if not tiling.blocks:
        result, *seen = (compat.vary(jnp.zeros(o.shape, o.dtype), compat.varying_axes(flat)) for o in out_shape)
    else:
        result, *seen = pl.pallas_call(
            functools.partial(kernel, tiling=tiling),
            name=f"taco_{name}",
            grid=(tiling.programs,),
            in_specs=[pl.BlockSpec()] * (2 + len(residual)),
            out_specs=out_specs,
            out_shape=out_shape,
            compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
            interpret=interpret,
        )(flat, alphas, *residual)
    return result.reshape(shape), jnp.sum(seen[0], axis=0) if observe else None
