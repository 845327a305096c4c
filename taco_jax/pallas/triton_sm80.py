"""The kernels of `taco_jax.pallas.triton` for GPUs before sm_89, which cannot cast to 8-bit floats: sm_80 and newer.

The casts are integer arithmetic; the bytes are the same. Newer GPUs run it too, under its name only.
"""

import functools

from taco_jax.config import Codec
from taco_jax.pallas import triton

unsupported_reason = triton.unsupported_reason
encode = functools.partial(triton.encode, integer_casts=True)
decode = functools.partial(triton.decode, integer_casts=True)
decode_sum = functools.partial(triton.decode_sum, integer_casts=True)
reduce = functools.partial(triton.reduce, integer_casts=True)


def device_unsupported_reason(codec: Codec, compute_capability: str) -> str | None:
    """Return why a GPU cannot run these kernels, or None, as `triton.device_unsupported_reason`."""
    return triton.device_unsupported_reason(codec, compute_capability, integer_casts=True)
