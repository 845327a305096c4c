"""What is sent: the number format of a message (`Codec`) and of a site (`Compression`)."""

from dataclasses import dataclass
from typing import Literal

Format = Literal["e4m3", "e5m2", "int8"]

QMAX: dict[str, float] = {"e4m3": 448.0, "e5m2": 57344.0, "int8": 127.0}
"""Largest finite magnitude of each format."""

BLOCKS = (32, 64, 128, 256, 512)


def _one_of(name: str, value: object, allowed: tuple) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


@dataclass(frozen=True)
class Codec:
    """One number format on the wire: values of a block share a scale, one byte a value.

    decode(encode(x)) = R^T (s q), q = cast(clamp(R x / s)), R = Hadamard / sqrt(block) or the identity.

    Attributes:
        format: element type, `e4m3` (float8_e4m3fn), `e5m2` (float8_e5m2) or `int8`.
        block: number of neighbouring values that share a scale and a transform, a power of two from 32 to 512.
        hadamard: `"block"` rotates each block by the orthonormal Hadamard matrix; None leaves it.
        scale: `"block"` computes one scale per block and sends it; `"adaptive"` multiplies by a power of two per
            site, direction and hop that follows earlier messages (`taco_jax.scales`) and sends no metadata; `"paper"`
            computes and sends two f32 factors per block as published (arXiv 2604.24088), e4m3 with Hadamard only.
        scale_dtype: type of a scale of `scale="block"` on the wire, `"bf16"` (rounded up) or `"e8m0"` (float formats
            only).
        layout: `"hidden"`: blocks run along the last axis, over the values of a token. `"tokens"`: a block holds the
            values that as many consecutive tokens have in one channel (the last axis is the channel, all others number
            the tokens), for tensors whose channels differ more than their tokens. Tokens are padded to whole blocks
            for each rank.

    Raises:
        ValueError: for a combination that has no meaning, naming the values that do.
    """

    format: Format = "e4m3"
    block: int = 128
    hadamard: Literal["block"] | None = None
    scale: Literal["block", "adaptive", "paper"] = "block"
    scale_dtype: Literal["bf16", "e8m0"] = "bf16"
    layout: Literal["hidden", "tokens"] = "hidden"

    def __post_init__(self) -> None:
        _one_of("format", self.format, tuple(QMAX))
        _one_of("block", self.block, BLOCKS)
        _one_of("hadamard", self.hadamard, (None, "block"))
        _one_of("scale", self.scale, ("block", "adaptive", "paper"))
        _one_of("scale_dtype", self.scale_dtype, ("bf16", "e8m0"))
        _one_of("layout", self.layout, ("hidden", "tokens"))
        if self.format == "int8" and self.scale == "adaptive":
            raise ValueError('int8 needs scale="block": one scale per tensor leaves 17 to 35 dB; use the preset "int8"')
        if self.format == "int8" and self.scale_dtype == "e8m0":
            raise ValueError('int8 needs scale_dtype="bf16": a power-of-two scale wastes up to one of its seven bits')
        if self.layout == "tokens" and self.scale == "paper":
            raise ValueError('layout="tokens" needs scale="adaptive" or "block"; "paper" is as published')
        if self.scale == "paper" and (self.format, self.hadamard, self.scale_dtype) != ("e4m3", "block", "bf16"):
            raise ValueError(
                'scale="paper" is the published codec, format="e4m3", hadamard="block", its factors in f32 (leave '
                f"scale_dtype out); got {self.format!r}, {self.hadamard!r}, scale_dtype={self.scale_dtype!r}"
            )

    @property
    def qmax(self) -> float:
        """Largest finite magnitude of the format."""
        return QMAX[self.format]

    def channels(self, shape: tuple[int, ...]) -> int:
        """Return the distance of a block's neighbours in a flattened tensor of this shape: 1, or the channels."""
        return shape[-1] if self.layout == "tokens" and len(shape) > 1 else 1

    @property
    def scale_bytes(self) -> int:
        """Bytes of metadata a block sends."""
        if self.scale == "block":
            return 2 if self.scale_dtype == "bf16" else 1
        return {"adaptive": 0, "paper": 8}[self.scale]


_TACO = Codec("e4m3", hadamard="block", scale="adaptive")
_PRESETS: dict[str, Codec | None] = {
    "taco": _TACO,
    "taco_block": Codec("e4m3", hadamard="block", scale="block"),
    "paper": Codec("e4m3", 256, "block", "paper"),
    "fp8": Codec("e4m3"),
    "int8": Codec("int8", hadamard="block"),
    "none": None,
}
PRESETS = tuple(_PRESETS)


@dataclass(frozen=True)
class Compression:
    """How one site sends its messages: a codec for the forward pass and one for the backward pass.

    Attributes:
        forward: codec of activations; None sends them exactly.
        backward: codec of cotangents; None sends them exactly.
        min_bytes: messages of fewer bytes (uncompressed, per device) go through `jax.lax` exactly.
        chunks: pieces a message is cut into, so that one piece's transfer can hide behind another's kernel.
        implementation: kernel implementation (`taco_jax.pallas.registry`); None takes the first that fits.
    """

    forward: Codec | None
    backward: Codec | None
    min_bytes: int = 65536
    chunks: int = 1
    implementation: str | None = None

    def __post_init__(self) -> None:
        if self.min_bytes < 0:
            raise ValueError(f"min_bytes must be 0 or more, got {self.min_bytes}")
        if self.chunks < 1:
            raise ValueError(f"chunks must be 1 or more, got {self.chunks}")

    @classmethod
    def named(cls, name: str, **changes) -> "Compression":
        """Return the preset `name` (one of `PRESETS`) with fields changed by keyword.

        Raises:
            ValueError: if there is no such preset.
        """
        if name not in _PRESETS:
            raise ValueError(f"no compression is called {name!r}; there are {', '.join(PRESETS)}")
        return cls(**{"forward": _PRESETS[name], "backward": _PRESETS[name], **changes})

    @property
    def is_exact(self) -> bool:
        """Whether nothing is compressed in either direction."""
        return self.forward is None and self.backward is None

    @property
    def is_adaptive(self) -> bool:
        """Whether a direction needs the state of `taco_jax.scales`."""
        return any(c is not None and c.scale == "adaptive" for c in (self.forward, self.backward))


def as_compression(value: "str | Compression | None") -> Compression:
    """Return the `Compression` that a preset name, a `Compression` or None (exact) stands for."""
    if isinstance(value, Compression):
        return value
    return Compression.named("none" if value is None else value)
