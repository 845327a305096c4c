"""What a step says about each communication site: its scales, its errors, and where a number stopped being finite."""

from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp

from taco_jax.models.decoder import LAYER_SITES
from taco_jax.scales import ALPHA, COUNT, DIRECTIONS, HOPS, NONFINITE, SATURATED

MESSAGES = {
    "embedding": ("forward",),
    "attention": ("forward", "backward"),
    "mlp": ("forward", "backward"),
    "head": ("backward",),
}
"""Where a model's tensor-parallel messages are compressed, in forward order, and on which way
(taco_jax.sharding.tensor_parallel)."""

_INDEX = {"forward": 0, "backward": 1}
assert len(_INDEX) == DIRECTIONS


def site_metrics(
    scales: Mapping[str, jax.Array], observed: Mapping[str, jax.Array], seen: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """Return the scalars of every site.

    Args:
        scales: {site: f32[(L,) 2, 2, 5]} that the step's messages were sent with.
        observed: what the step observed, alike.
        seen: metrics of `taco_jax.update_scales`.

    Returns:
        For each site and direction `alpha/<site>/<direction>/<hop>` (geometric mean over layers, hop 1 or 2),
        `snr/<site>/<direction>` (dB), `saturation/<site>/<direction>` (share of the values),
        `nonfinite/<site>/<direction>` (values), and `nonfinite_message`, the number in `message_names` of the first one
        with a value that is not finite, or -1.
    """
    if not scales:
        return {}
    metrics: dict[str, jax.Array] = {}
    for site, directions in MESSAGES.items():
        for direction in directions:
            state, counts = (x[site][..., _INDEX[direction], :, :] for x in (scales, observed))
            alphas = jnp.log2(state[..., ALPHA]).reshape(-1, HOPS)
            for hop in range(HOPS):
                metrics[f"alpha/{site}/{direction}/{hop + 1}"] = jnp.exp2(jnp.mean(alphas[:, hop]))
            values = jnp.maximum(jnp.sum(counts[..., COUNT]), 1.0)
            metrics[f"snr/{site}/{direction}"] = seen[f"snr_{direction}/{site}"]
            metrics[f"saturation/{site}/{direction}"] = jnp.sum(counts[..., SATURATED]) / values
            metrics[f"nonfinite/{site}/{direction}"] = jnp.sum(counts[..., NONFINITE])

    def broken(site: str, layer: int, direction: str) -> jax.Array:
        counts = observed[site][layer] if site in LAYER_SITES else observed[site]
        return jnp.any(counts[_INDEX[direction], :, NONFINITE] > 0)

    num_layers = scales[LAYER_SITES[0]].shape[0]
    flags = jnp.stack([broken(*message) for message in _messages(num_layers)])
    return {**metrics, "nonfinite_message": first_true(flags)}


def first_true(flags: jax.Array) -> jax.Array:
    """Return the index of the first true element, or -1."""
    return jnp.where(jnp.any(flags), jnp.argmax(flags), -1)


def message_names(num_layers: int) -> list[str]:
    """Return the name of each message in the order in which a step sends them."""
    return [
        f"{direction} {site}" + (f" of layer {layer}" if site in LAYER_SITES else "")
        for site, layer, direction in _messages(num_layers)
    ]


def nonfinite_origin(values: Mapping[str, float], num_layers: int, parameters: Sequence[str]) -> str:
    """Return where a step's metrics say that a number first was not finite, as the end of a sentence.

    Args:
        values: metrics of the step.
        num_layers: layers of the model.
        parameters: names in the order that `nonfinite_gradient` counts.
    """
    text = ""
    message, gradient = (int(values.get(f"nonfinite_{kind}", -1)) for kind in ("message", "gradient"))
    if message >= 0:
        text += f", first in the {message_names(num_layers)[message]} message"
    if gradient >= 0:
        text += f", gradient of {parameters[gradient]}"
    return text


def _messages(num_layers: int) -> Iterator[tuple[str, int, str]]:
    """Yield (site, layer, direction) in the order in which a step sends them; layer 0 for a site that no layer has."""
    for direction, layers in (("forward", range(num_layers)), ("backward", reversed(range(num_layers)))):
        sites = [site for site, directions in MESSAGES.items() if direction in directions]
        sites = sites if direction == "forward" else sites[::-1]
        # The embedding comes before the layers and the head, on the way back, too.
        yield from ((site, 0, direction) for site in sites if site not in LAYER_SITES)
        yield from ((site, layer, direction) for layer in layers for site in sites if site in LAYER_SITES)
