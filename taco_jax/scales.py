"""Dual-scale quantization: the adaptive forward and backward scales of each site, observed and updated.

A site's state is f32[2, 2, 5]: direction (forward, backward), hop (the ranks' messages, their sum), slot. Stacked sites
have leading axes. It is a plain array, so it goes through Orbax, `lax.scan` and sharding like a parameter.
The gradient with respect to it is not a gradient but the observation of the step (as Flax's fp8 does it).
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from taco_jax import compat
from taco_jax.config import Compression, as_compression

FORWARD, BACKWARD = 0, 1
DIRECTIONS, HOPS, SLOTS = 2, 2, 5
ALPHA, MEAN_SQUARE, UPDATES, SKIPPED, MEAN_ERROR = range(SLOTS)
SUM_SQUARES, COUNT, SATURATED, NONFINITE, SUM_ERROR = range(SLOTS)

DualScale = jax.Array
"""State of one site, f32[..., 2, 2, 5]; slots: alpha, mean square of alpha x (EMA), updates, skipped, mean square error
(EMA). Its observation has the slots sum of squares, count, saturated, non-finite, sum of squared errors of alpha x."""

TARGET_LOG2_RMS = 1.0
"""log2 of the RMS that alpha aims at: e4m3 has 7.8 octaves above it and 10 below."""
HYSTERESIS_OCTAVES = 0.75
ALPHA_OCTAVES = (-126, 126)
"""Range of log2 alpha, so that 1 / alpha is a normal number too."""
BOTTOM_MEAN_SQUARE = 2.0**-116
"""What is observed of values too small to square (implementations count 2^-60 for them)."""
VANISHED_MEAN_SQUARE = 2.0**-16
"""An RMS of 2^-8 is two of e4m3's smallest steps: little of the message is left."""


class SitePair(NamedTuple):
    """A site's state, split for use inside `shard_map`.

    `state` is a constant, equal on all ranks; `probe` has the same values marked as varying over every mesh axis. Only
    its cotangent matters: it collects the observation.
    """

    state: jax.Array
    probe: jax.Array


def init_scales(sites: Mapping[str, Compression | str], stack: tuple[int, ...] = ()) -> dict[str, DualScale]:
    """Return the first state of each site: alpha 1, nothing observed.

    Args:
        sites: compression of each site; sites without scales on the wire (exact or bf16) get no state.
        stack: leading axes, e.g. (num_layers,) for sites inside a `lax.scan` over layers.

    Returns:
        {site: f32[*stack, 2, 2, 5]}.
    """
    first = jnp.zeros((*stack, DIRECTIONS, HOPS, SLOTS), jnp.float32).at[..., ALPHA].set(1.0)
    return {name: first for name, compression in sites.items() if as_compression(compression).is_scaled}


def split_scales(scales: Mapping[str, DualScale], axes: Iterable[str]) -> tuple[dict, dict]:
    """Return (states, probes): constants, and the arrays to differentiate with respect to, varying over `axes`."""
    states = {name: lax.stop_gradient(value) for name, value in scales.items()}
    return states, {name: compat.vary(value, axes) for name, value in states.items()}


def alpha_for(x: jax.Array) -> jax.Array:
    """Return the power of two that brings `x` to the target RMS, within f32's normal range; 1 for zeros."""
    x = x.astype(jnp.float32)
    # The squares of values beyond 1e19 or below 1e-19 are no f32.
    _, exponent = jnp.frexp(jnp.max(jnp.abs(x), initial=0.0))
    mean_square = jnp.mean(jnp.square(jnp.ldexp(x, -exponent)))
    octaves = jnp.round(TARGET_LOG2_RMS - 0.5 * jnp.log2(mean_square)) - exponent
    octaves = jnp.where(jnp.isfinite(octaves), jnp.clip(octaves, *ALPHA_OCTAVES), 0)
    return jnp.ldexp(jnp.float32(1.0), octaves.astype(jnp.int32))


def update_scales(
    scales: Mapping[str, DualScale],
    observed: Mapping[str, jax.Array],
    *,
    axis_name: str | tuple[str, ...] | None,
    decay: float = 0.9,
) -> tuple[dict[str, DualScale], dict[str, jax.Array]]:
    """Follow the observations of a step: the second half of the adaptive codec.

    ms = sum / count of z = alpha x; EMA of ms; alpha moves to the power of two that brings the RMS to 2 when the EMA is
    more than 0.75 octaves off, and at once, by ms alone, at the first observation, when values saturated, or when the
    RMS fell below 2^-8 (little is left). A
    non-finite observation changes nothing but the counter of skipped ones.

    Args:
        scales: {site: f32[..., 2, 2, 5]}, equal on all ranks of `axis_name`.
        observed: the gradient of the loss with respect to `scales` (or to the probes of `split_scales`).
        axis_name: mesh axes to add the observations over; axes that JAX has already added them over (those they do not
            vary over, with `check_vma=True`) are left out. None outside `shard_map`.
        decay: weight of the past in the moving averages.

    Returns:
        The new state, and scalars: `saturation` (share of values clamped by the format), `nonfinite` (values),
        `snr_forward`, `snr_backward` (dB, mean over sites, NaN where nothing was sent) and for each site
        `snr_<direction>/<site>`.
    """
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name or ())
    observed = _add_over(dict(observed), axes)
    new = {name: _follow(scales[name], observed[name], decay) for name in scales}
    return new, _metrics(scales, observed)


def _add_over(observed: dict[str, jax.Array], axes: tuple[str, ...]) -> dict[str, jax.Array]:
    if not axes or not observed:
        return observed
    checked = compat.is_checked(axes)
    with jax.named_scope("taco.psum.scales.backward"):
        return {
            name: lax.psum(value, missing) if (missing := _still_to_add(value, axes, checked)) else value
            for name, value in observed.items()
        }


def _still_to_add(value: jax.Array, axes: tuple[str, ...], checked: bool) -> tuple[str, ...]:
    return tuple(a for a in axes if a in compat.varying_axes(value)) if checked else axes


def _follow(state: DualScale, seen: jax.Array, decay: float) -> DualScale:
    alpha, old = state[..., ALPHA], state[..., MEAN_SQUARE]
    count = jnp.maximum(seen[..., COUNT], 1.0)
    ms, error = seen[..., SUM_SQUARES] / count, seen[..., SUM_ERROR] / count
    sound = (seen[..., NONFINITE] == 0) & jnp.isfinite(ms) & jnp.isfinite(error)
    usable = sound & (seen[..., COUNT] > 0) & (ms > 0)
    first = state[..., UPDATES] == 0
    at_once = first | (seen[..., SATURATED] > 0) | (ms < VANISHED_MEAN_SQUARE)
    average = jnp.where(at_once, ms, decay * old + (1 - decay) * ms)
    average_error = jnp.where(at_once, error, decay * state[..., MEAN_ERROR] + (1 - decay) * error)
    off = TARGET_LOG2_RMS - 0.5 * jnp.log2(jnp.where(usable, average, 1.0))
    moves = usable & (at_once | (jnp.abs(off) > HYSTERESIS_OCTAVES))
    _, exponent = jnp.frexp(alpha)
    octaves = jnp.where(moves, jnp.round(off), 0).astype(jnp.int32)
    octaves = jnp.clip(exponent - 1 + octaves, *ALPHA_OCTAVES) - (exponent - 1)
    unit = jnp.ldexp(jnp.float32(1.0), 2 * octaves)
    followed = jnp.stack(
        [
            jnp.ldexp(alpha, octaves),
            average * unit,
            # At the bottom it shows that alpha is too small, not by how much: the next one counts as the first.
            jnp.where(ms < BOTTOM_MEAN_SQUARE, 0.0, state[..., UPDATES] + 1),
            state[..., SKIPPED],
            average_error * unit,
        ],
        axis=-1,
    )
    kept = state.at[..., SKIPPED].add(jnp.where(sound, 0.0, 1.0))
    return jnp.where(usable[..., None], followed, kept)


def _metrics(scales: Mapping[str, DualScale], observed: dict[str, jax.Array]) -> dict[str, jax.Array]:
    metrics: dict[str, jax.Array] = {}
    saturated = count = nonfinite = jnp.float32(0)
    for name in scales:
        seen = observed[name]
        saturated += jnp.sum(seen[..., SATURATED])
        count += jnp.sum(seen[..., COUNT])
        nonfinite += jnp.sum(seen[..., NONFINITE])
        snr = _snr_db(scales[name][..., ALPHA], seen)
        for direction, label in ((FORWARD, "forward"), (BACKWARD, "backward")):
            metrics[f"snr_{label}/{name}"] = jnp.nanmean(snr[..., direction])
    for label in ("forward", "backward"):
        sites = [value for key, value in metrics.items() if key.startswith(f"snr_{label}/")]
        metrics[f"snr_{label}"] = jnp.nanmean(jnp.stack(sites)) if sites else jnp.float32(jnp.nan)
    return {**metrics, "saturation": saturated / jnp.maximum(count, 1.0), "nonfinite": nonfinite}


def _snr_db(alpha: jax.Array, seen: jax.Array) -> jax.Array:
    """Return dB per direction [..., 2]: the noise of both hops against the last hop's signal."""
    # Ratios of alphas, not alphas squared: 2^-252 is no f32.
    ratio = jnp.square(jnp.clip(alpha[..., 1] / alpha[..., 0], 2.0**-60, 2.0**60))
    two_hops = seen[..., 1, COUNT] > 0
    noise = jnp.where(two_hops, seen[..., 0, SUM_ERROR] * ratio + seen[..., 1, SUM_ERROR], seen[..., 0, SUM_ERROR])
    signal = jnp.where(two_hops, seen[..., 1, SUM_SQUARES], seen[..., 0, SUM_SQUARES])
    return jnp.where((noise > 0) & (signal > 0), 10.0 * jnp.log10(signal / noise), jnp.nan)
