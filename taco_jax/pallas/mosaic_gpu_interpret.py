"""The kernels of `taco_jax.pallas.mosaic_gpu` in Pallas' GPU interpret mode, with its race detector, on a CPU.

For tests; served under its own name only. The interpreter runs TMA copies, barriers and shared memory one by one and
reports accesses that nothing orders. It has wgmma finish at once, so that a wait that is missing there is not seen, and
it takes one device at a time: at the end of a kernel it refuses barriers that any device still holds.
"""

import functools

from taco_jax.pallas import mosaic_gpu

_Params = getattr(mosaic_gpu.plgpu, "InterpretGPUParams", None)  # older JAX has none
_params = _Params(detect_races=True) if _Params else None

unsupported_reason = mosaic_gpu.unsupported_reason
encode = functools.partial(mosaic_gpu.encode, interpret=_params)
decode = functools.partial(mosaic_gpu.decode, interpret=_params)
decode_sum = functools.partial(mosaic_gpu.decode_sum, interpret=_params)
reduce = functools.partial(mosaic_gpu.reduce, interpret=_params)
