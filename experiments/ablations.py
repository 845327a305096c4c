"""The published codec with a part left out or another format, as the paper's ablation has them: they are to fail.

The trainer, with the ablations to be had by name (their messages are laid out like those of the preset `paper`):

    python -m experiments.ablations --compression=paper --set=communication.implementation=int8_without_amax ...

alpha is tau / RMS without the published eps and limits, which leave nothing of small gradients where no amax follows:
what is to be seen is the part left out.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from experiments import train
from taco_jax import wire
from taco_jax.config import Codec
from taco_jax.hadamard import rotate
from taco_jax.pallas import registry, xla
from taco_jax.pallas.arithmetic import MIN_SCALE, norm

TAU = 448.0


@dataclass(frozen=True)
class Ablation:
    """What stands in the place of `taco_jax.pallas.xla` for `scale="paper"`; shapes as there.

    A block x of B values is sent as q = cast(z / s), z = H (alpha x) / sqrt(B), and s and alpha in f32.

    Attributes:
        cast: format of the payload, and whether the blocks are rotated.
        factors: returns s and alpha f32[..., blocks, 1] of blocks f32[..., blocks, B].
        limit: magnitude that z / s is clamped to before the cast.
    """

    cast: Codec
    factors: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
    limit: float

    def unsupported_reason(self, codec: Codec, dtype: jnp.dtype) -> str | None:
        """Return why the codec is not served, or None."""
        if codec.scale == "paper" and codec.block == self.cast.block:
            return None
        return f'it stands in the place of the preset "paper", block {self.cast.block}'

    def encode(self, x: jax.Array, codec: Codec, alpha: jax.Array, *, observe: bool, channels: int = 1):
        """Return message u8[..., M] and observation f32[5] or None."""
        return self._encode(xla._blocks(x.astype(jnp.float32), codec), alpha, observe)

    def decode(self, message: jax.Array, codec: Codec, alpha, dtype, *, channels: int = 1, residual=None) -> jax.Array:
        """Return values [..., C], a residual added in f32."""
        x = xla._rows(xla._clamped(self._decode(message, codec), dtype))
        return (x if residual is None else x + residual.astype(jnp.float32)).astype(dtype)

    def decode_sum(self, messages: jax.Array, codec: Codec, alpha, dtype, *, channels: int = 1) -> jax.Array:
        """Return the sum of n messages, [..., C]."""
        return xla._rows(xla._clamped(xla._add(self._decode(messages, codec)), dtype).astype(dtype))

    def reduce(self, messages: jax.Array, codec: Codec, alphas: jax.Array, *, observe: bool):
        """Decode n messages, add them and encode the sum, all in full."""
        return self._encode(xla._clamped(xla._add(self._decode(messages, codec))), alphas[1], observe)

    def _encode(self, v: jax.Array, alpha: jax.Array, observe: bool):
        scale, own_alpha = self.factors(v)
        z = v * own_alpha
        z = (rotate(z) * norm(self.cast) if self.cast.hadamard else z) / scale
        payload = xla._cast(jnp.clip(z, -self.limit, self.limit), self.cast)
        seen = xla._observe(v * alpha, z, payload, self.cast, scale / own_alpha * alpha, v) if observe else None
        return xla._pack_paper(payload, scale, own_alpha), seen

    def _decode(self, message: jax.Array, codec: Codec) -> jax.Array:
        return xla._decode_paper(*wire.unpack(message, codec), self.cast)


def _normalised(v: jax.Array) -> jax.Array:
    """Return alpha = tau / RMS of each block."""
    return TAU / jnp.sqrt(jnp.maximum(jnp.mean(jnp.square(v), axis=-1, keepdims=True), MIN_SCALE))


def _without_amax(v: jax.Array) -> tuple[jax.Array, jax.Array]:
    alpha = _normalised(v)
    return jnp.ones_like(alpha), alpha


def _with_amax(v: jax.Array) -> tuple[jax.Array, jax.Array]:
    alpha = _normalised(v)
    rotated = rotate(v * alpha) * v.shape[-1] ** -0.5
    return jnp.maximum(jnp.max(jnp.abs(rotated), axis=-1, keepdims=True) / TAU, MIN_SCALE), alpha


def _unscaled(v: jax.Array) -> tuple[jax.Array, jax.Array]:
    one = jnp.ones_like(v[..., :1])
    return one, one


ABLATIONS = {
    "int8_without_amax": Ablation(Codec("int8", 256, "block"), _without_amax, 127.0),
    "e5m2_to_448": Ablation(Codec("e5m2", 256, "block"), _with_amax, 448.0),
    "e4m3_unscaled": Ablation(Codec("e4m3", 256), _unscaled, 448.0),
}


def register() -> None:
    """Make the ablations implementations by name."""
    for name, ablation in ABLATIONS.items():
        registry.register(name, ablation)


if __name__ == "__main__":
    register()
    sys.exit(train.main())
