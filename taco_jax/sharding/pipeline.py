"""Pipeline over the stages of one mesh axis, inside `jax.shard_map`: GPipe as one scan over ticks.

At tick t stage p works on microbatch t - p; M microbatches on P stages take T = M + P - 1 ticks. A stage without a
microbatch (a bubble) skips its work.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from taco_jax.collectives import all_to_all, ppermute, psum
from taco_jax.compat import vary, varying_axes


def share_scope(numerator: int, denominator: int):
    """Return the named scope of a conditional that is true `numerator` times in `denominator` passes.

    The table of communication weighs what is inside by it: a compiled program does not say how often a condition holds.
    """
    return jax.named_scope(f"share.{numerator}.{denominator}")


def on_first_stage(make: Callable[[], jax.Array], *, axes: tuple[str, ...], axis_name: str = "pp") -> jax.Array:
    """Return `make()` on the first stage and zeros on the others, which skip the work.

    Args:
        make: the first stage's work; it may communicate over other axes than `axis_name`.
        axes: mesh axes over which the result varies, `axis_name` among them.
        axis_name: mesh axis of the stages.
    """
    if lax.axis_size(axis_name) == 1:
        return vary(make(), axes)
    like = jax.eval_shape(make)
    with share_scope(1, 1):
        return lax.cond(
            lax.axis_index(axis_name) == 0,
            lambda: vary(make(), axes),
            lambda: vary(jnp.zeros(like.shape, like.dtype), axes),
        )


def run_pipeline(
    stage: Callable[[jax.Array], jax.Array],
    inputs: jax.Array,
    *,
    axis_name: str = "pp",
    remat: bool = True,
    remat_policy: Any = None,
) -> jax.Array:
    """Return what the last stage makes of `inputs`, after every stage has worked on every microbatch.

    Args:
        stage: this device's layers, from activations [b, ...] to activations of the same shape and dtype.
        inputs: [M, b, ...] microbatches; only the first stage's are read.
        axis_name: mesh axis of the stages; `inputs` vary over it.
        remat: whether the backward pass computes a stage again from its input.
        remat_policy: what `jax.checkpoint` keeps of a stage beside its input.

    Returns:
        [M, b, ...]; only the last stage's are meaningful, the others hold what passed through them.
    """
    num_microbatches = inputs.shape[0]
    num_stages = lax.axis_size(axis_name)
    ticks = num_microbatches + num_stages - 1
    index = lax.axis_index(axis_name)
    axes = varying_axes(inputs)

    def stage_or_bubble(valid, x):
        if num_stages == 1:
            return stage(x)
        with share_scope(num_microbatches, ticks):
            return lax.cond(valid, stage, lambda x: x, x)

    # Around the conditional, not inside: JAX 0.10 would keep a copy of the stage's weights for every tick.
    if remat:
        stage_or_bubble = jax.checkpoint(stage_or_bubble, policy=remat_policy, prevent_cse=False)

    def tick(received, t):
        microbatch = t - index
        first = lax.dynamic_index_in_dim(inputs, jnp.clip(t, 0, num_microbatches - 1), keepdims=False)
        valid = (microbatch >= 0) & (microbatch < num_microbatches)
        y = stage_or_bubble(valid, jnp.where(index == 0, first, received))
        return _to_next_stage(y, axis_name), y

    start = vary(jnp.zeros(inputs.shape[1:], inputs.dtype), axes)
    _, outputs = lax.scan(tick, start, jnp.arange(ticks))
    return outputs[num_stages - 1 :]


def pass_through_stages(
    stage: Callable[[jax.Array, Any], tuple[jax.Array, Any]], x: jax.Array, carry: Any, *, axis_name: str = "pp"
) -> tuple[jax.Array, Any]:
    """Run one microbatch through the stages, one after the other, each with a carry of its own.

    Args:
        stage: this device's layers, from activations and carry to the same shapes and dtypes.
        x: [b, ...]; only the first stage's is read. It varies over `axis_name`.
        carry: what stays on its stage, such as keys and values of earlier positions.
        axis_name: mesh axis of the stages.

    Returns:
        What the last stage makes of `x`, on the last stage only; and the carry.
    """
    num_stages, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    if num_stages == 1:
        return stage(x, carry)
    for turn in range(num_stages):
        with share_scope(1, num_stages):
            x, carry = lax.cond(index == turn, stage, lambda x, carry: (x, carry), x, carry)
        if turn < num_stages - 1:
            x = _to_next_stage(x, axis_name)
    return x, carry


def from_last_stage(x: jax.Array, *, axis_name: str = "pp") -> jax.Array:
    """Return the last stage's `x` on all stages."""
    num_stages = lax.axis_size(axis_name)
    last = lax.axis_index(axis_name) == num_stages - 1
    return psum(jnp.where(last, x, jnp.zeros_like(x)), axis_name, compression=None, name="last_stage")


def scatter_from_last_stage(x: jax.Array, *, axis_name: str = "pp") -> jax.Array:
    """Share the last stage's x[N, ...] among the stages: [ceil(N / P), ...] each, padded with zeros at the end."""
    num_stages = lax.axis_size(axis_name)
    rows = padded_share(x.shape[0], num_stages)
    padding = [(0, rows * num_stages - x.shape[0])] + [(0, 0)] * (x.ndim - 1)
    parts = jnp.pad(x, padding).reshape(num_stages, rows, *x.shape[1:])
    if num_stages == 1:
        return parts[0]
    shared = all_to_all(parts, axis_name, split_axis=0, concat_axis=0, compression=None, name="head_scatter")
    return shared[num_stages - 1]


def own_share(x: jax.Array, *, axis_name: str = "pp") -> jax.Array:
    """Return this stage's rows of x[N, ...], the ones `scatter_from_last_stage` gives it, zero-padded at the end."""
    num_stages = lax.axis_size(axis_name)
    rows = padded_share(x.shape[0], num_stages)
    padding = [(0, rows * num_stages - x.shape[0])] + [(0, 0)] * (x.ndim - 1)
    return lax.dynamic_slice_in_dim(jnp.pad(x, padding), lax.axis_index(axis_name) * rows, rows)


def padded_share(rows: int, num_stages: int) -> int:
    """Return the rows each of `num_stages` stages gets of `rows`, rounded up."""
    return math.ceil(rows / num_stages)


def _to_next_stage(x: jax.Array, axis_name: str) -> jax.Array:
    num_stages = lax.axis_size(axis_name)
    if num_stages == 1:
        return x
    forward = [(i, i + 1) for i in range(num_stages - 1)]
    return ppermute(x, axis_name, perm=forward, compression=None, name="pipeline")
