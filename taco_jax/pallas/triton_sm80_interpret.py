"""The kernels of `taco_jax.pallas.triton_sm80` in Pallas' interpret mode, as `triton_interpret` those of `triton`."""

import functools

from taco_jax.pallas import triton_sm80

unsupported_reason = triton_sm80.unsupported_reason
encode = functools.partial(triton_sm80.encode, interpret=True)
decode = functools.partial(triton_sm80.decode, interpret=True)
decode_sum = functools.partial(triton_sm80.decode_sum, interpret=True)
reduce = functools.partial(triton_sm80.reduce, interpret=True)
