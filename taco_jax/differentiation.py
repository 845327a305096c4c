"""How a compressed collective is differentiated, one call at a time.

The payload is computed on `stop_gradient(x)` and named, so that `jax.checkpoint` with
`save_payloads()` keeps the uint8 message instead of the result and repeats no collective; `_attach` then ties the
decoded result to x with a rule of its own, so no cotangent ever passes through an 8-bit array. The observation of the
message leaves as the cotangent of the scales' probe.

Under `check_vma=True` the result of `psum` is invariant and its transpose is a cast, as for `lax.psum`; the backward
all-reduce then stands in `pvary`. Under `check_vma=False` JAX's convention is that psum transposes to psum: so does
ours, and `pvary` is the identity both ways there, like `lax.pvary`.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from taco_jax import compat
from taco_jax.operations import Operation, Payload
from taco_jax.scales import BACKWARD, DIRECTIONS, FORWARD, HOPS, SLOTS, SitePair, init_scales

PAYLOAD_NAME, STATS_NAME = "taco_payload", "taco_stats"
Scales = jax.Array | SitePair | None


@dataclass(frozen=True)
class Call:
    """The static part of one call: the operation of each direction and what labels it."""

    forward: Operation
    backward: Operation | None
    op: str
    site: str
    observe: bool

    def scope(self, direction: str):
        """Return the scope that profiles and HLO metadata show."""
        return jax.named_scope(f"taco.{self.op}.{self.site}.{direction}")


def pair(call: Call, x: jax.Array, scales: Scales) -> tuple[jax.Array, jax.Array | None]:
    """Return (state, probe); without scales alpha is 1 and there is no probe."""
    if scales is None:
        return init_scales({"": "taco"})[""], None
    if isinstance(scales, SitePair):
        state, probe = scales
    else:
        state = lax.stop_gradient(scales)
        probe = compat.vary(scales, compat.varying_axes(x) | set(call.forward.axes))
    if state.shape != (DIRECTIONS, HOPS, SLOTS):
        wanted = f"scales of one call have shape {(DIRECTIONS, HOPS, SLOTS)}, got {state.shape}"
        raise ValueError(f"{call.op} {call.site!r}: {wanted}; index the axes of `stack` (or scan over them) first")
    shared = sorted(compat.varying_axes(state) & set(call.forward.axes))
    if shared:
        raise ValueError(
            f"{call.op} {call.site!r}: scales vary over {shared}; all ranks of the group must hold the same"
        )
    return state, probe


def differentiable(
    call: Call, x: jax.Array, scales: Scales, key: jax.Array | None = None, residual: jax.Array | None = None
) -> jax.Array:
    """Return the collective of `x`, plus the residual; the rules of this module differentiate it."""
    state, probe = pair(call, x, scales)
    with call.scope("forward"):
        payload, seen = call.forward.send(
            lax.stop_gradient(x), state[FORWARD], call.observe, _of_direction(key, FORWARD)
        )
        payload = jax.tree.map(lambda p: checkpoint_name(lax.stop_gradient(p), PAYLOAD_NAME), payload)
        seen = checkpoint_name(lax.stop_gradient(seen), STATS_NAME)
    return _attach(call, x, probe, state, payload, seen, residual, key)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attach(call: Call, x, probe, state, payload: Payload, seen, residual, key):
    """Return the decoded payload plus the residual; the cotangent goes to `x`, the observation to `probe`."""
    with call.scope("forward"):
        return call.forward.receive(payload, state[FORWARD], residual)


def _attach_forward(call, x, probe, state, payload, seen, residual, key):
    # An empty tuple, unlike a bool, stays known while tracing.
    kept = probe, state, seen, None if residual is None else (), key
    return _attach(call, x, probe, state, payload, seen, residual, key), kept


def _attach_backward(call, kept, ct):
    probe, state, seen, residual, key = kept
    axes, ct_residual = call.forward.axes, None if residual is None else ct
    with call.scope("backward"):
        if call.backward is not None:
            ct, seen_back = call.backward.run(
                compat.vary(ct, axes), state[BACKWARD], call.observe, _of_direction(key, BACKWARD)
            )
        else:
            ct = compat.vary(call.forward.own_part(ct), axes)
            seen_back = jnp.zeros_like(seen)
    return ct, _probe_cotangent(probe, seen, seen_back), None, None, None, ct_residual, None


_attach.defvjp(_attach_forward, _attach_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def enter(call: Call, x, state, probe, key):
    """Return `x` as varying; its cotangent is reduced, and the observation goes to `probe`."""
    return compat.vary(x, call.forward.axes)


def _enter_forward(call, x, state, probe, key):
    return enter(call, x, state, probe, key), (state, probe, key)


def _enter_backward(call, residuals, ct):
    state, probe, key = residuals
    with call.scope("backward"):
        ct, seen = call.backward.run(ct, state[BACKWARD], call.observe, _of_direction(key, BACKWARD))
    return ct, None, _probe_cotangent(probe, jnp.zeros_like(seen), seen), None


enter.defvjp(_enter_forward, _enter_backward)


def _probe_cotangent(probe, seen: jax.Array, seen_back: jax.Array):
    if probe is None:
        return None
    seen = jnp.stack([seen, seen_back])
    assert seen.shape == probe.shape and seen.shape[-1] == SLOTS, (seen.shape, probe.shape)
    return compat.vary(seen, compat.varying_axes(probe))


def _of_direction(key: jax.Array | None, direction: int) -> jax.Array | None:
    """Return the key of stochastic rounding in one direction."""
    return None if key is None else jax.random.fold_in(key, direction)
