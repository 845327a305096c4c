"""The kernels of `taco_jax.pallas.triton` in Pallas' interpret mode: the same bytes on any device, slowly.

For tests; served under its own name only. Pallas cannot interpret kernels inside `shard_map(check_vma=True)`.
"""

import functools

from taco_jax.pallas import triton

unsupported_reason = triton.unsupported_reason
encode = functools.partial(triton.encode, interpret=True)
decode = functools.partial(triton.decode, interpret=True)
decode_sum = functools.partial(triton.decode_sum, interpret=True)
reduce = functools.partial(triton.reduce, interpret=True)
