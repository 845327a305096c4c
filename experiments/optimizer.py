"""AdamW with global-norm clipping and a warmup-cosine learning rate that depends on the step number alone."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from experiments.config import OptimizerConfig, TrainConfig

DECAYED = ("kernel", "embedding")
"""Names of the parameters that weight decay pulls to zero: the matrices."""


def learning_rate(config: TrainConfig) -> optax.Schedule:
    """Return the function from step number (0 first) to learning rate.

    Linear to the peak over `warmup_steps`, the first step at peak / warmup_steps, then a cosine that reaches
    final_fraction * peak at the last step.
    """
    c = config.optimizer
    last = max((c.decay_steps or config.steps) - 1, 1)
    warmup = min(c.warmup_steps, last)
    cosine = optax.cosine_decay_schedule(c.learning_rate, max(last - warmup, 1), alpha=c.final_fraction)
    ramp = optax.linear_schedule(c.learning_rate / max(warmup, 1), c.learning_rate, max(warmup - 1, 1))
    return optax.join_schedules([ramp, cosine], [warmup])


def direction(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """Return the transformation from gradients to the direction that the learning rate multiplies.

    Clip to `clip_norm` over all parameters, Adam's moments, then weight decay on matrices. The caller applies
    parameters - learning_rate(step) * direction, so that a step's rate never depends on the optimizer's state.
    `update` takes the gradients' norm as `global_norm`: the step has it already.
    """
    return optax.chain(
        clip_by_norm(config.clip_norm),
        optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps),
        optax.add_decayed_weights(config.weight_decay, mask=_is_decayed),
    )


def clip_by_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Return g * min(1, max_norm / global_norm), as `optax.clip_by_global_norm`, with the norm given to `update`."""

    def update(gradients: Any, state: Any, params: Any = None, *, global_norm: jax.Array, **_: Any) -> tuple[Any, Any]:
        factor = jnp.minimum(1.0, max_norm / global_norm)
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), gradients), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def apply(parameters: Any, update: Any, rate: jax.Array) -> Any:
    """Return parameters - rate * update, leaf by leaf."""
    return jax.tree.map(lambda p, u: p - jnp.asarray(rate, p.dtype) * u, parameters, update)


def _is_decayed(parameters: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in DECAYED, parameters)
