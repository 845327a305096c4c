"""What is sent: the number format of a message (`Codec`) and of a site (`Compression`)."""

from dataclasses import dataclass
from typing import Literal

Format = Literal["e4m3", "e5m2", "e3m4", "int8", "int6", "int4", "bf16"]

QMAX: dict[str, float] = {
    "e4m3": 448.0,
    "e5m2": 57344.0,
    "e3m4": 15.5,
    "int8": 127.0,
    "int6": 31.0,
    "int4": 7.0,
    "bf16": (2.0 - 2.0**-7) * 2.0**127,
}
"""Largest finite magnitude of each format."""
INTEGERS = ("int8", "int6", "int4")
_BITS = {"int6": 6, "int4": 4, "bf16": 16}

BLOCKS = (32, 64, 128, 256, 512)


def _one_of(name: str, value: object, allowed: tuple) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


@dataclass(frozen=True)
class Codec:
    """One number format on the wire: values of a block share a scale; a value takes 4, 6, 8 or (bf16) 16 bits.

    decode(encode(x)) = R^T (s q), q = cast(clamp(R x / s)), R = Hadamard D / sqrt(block) or the identity, D = diagonal
    of `signs` or the identity.

    Attributes:
        format: element type, `e4m3` (float8_e4m3fn), `e5m2` (float8_e5m2), `e3m4` (float8_e3m4), `int8`, or `int6` and
            `int4`, packed without gaps; integers are symmetric, -qmax to qmax. `bf16` rounds and no more: what
            compression is measured against, on the same way.
        block: number of neighbouring values that share a scale and a transform, a power of two from 32 to 512.
        hadamard: `"block"` rotates each block by the orthonormal Hadamard matrix; None leaves it.
        scale: `"block"` computes one scale per block and sends it; `"adaptive"` multiplies by a power of two per
            site, direction and hop that follows earlier messages (`taco_jax.scales`) and sends no metadata; `"paper"`
            computes and sends two f32 factors per block as published (arXiv 2604.24088), e4m3 with Hadamard only;
            `"none"` is for bf16.
        scale_dtype: type of a scale of `scale="block"` on the wire, `"bf16"` (rounded up) or `"e8m0"` (float formats
            only).
        layout: `"hidden"`: blocks run along the last axis, over the values of a token. `"tokens"`: a block holds the
            values that as many consecutive tokens have in one channel (the last axis is the channel, all others number
            the tokens), for tensors whose channels differ more than their tokens. Tokens are padded to whole blocks
            for each rank.
        rounding: `"nearest"`, ties to even; `"stochastic"`: up with the probability of the remainder, so that the
            decoded value is x on average; calls then take a `key` of `jax.random`, and equal keys give equal bytes.
        signs: seed of random signs that the values of each block are multiplied by before the transform (and after
            its inverse): no regular input, such as a constant, then meets a row of the matrix. None leaves them out.

    Raises:
        ValueError: for a combination that has no meaning, naming the values that do.
    """

    format: Format = "e4m3"
    block: int = 128
    hadamard: Literal["block"] | None = None
    scale: Literal["block", "adaptive", "paper", "none"] = "block"
    scale_dtype: Literal["bf16", "e8m0"] = "bf16"
    layout: Literal["hidden", "tokens"] = "hidden"
    rounding: Literal["nearest", "stochastic"] = "nearest"
    signs: int | None = None

    def __post_init__(self) -> None:
        _one_of("format", self.format, tuple(QMAX))
        _one_of("block", self.block, BLOCKS)
        _one_of("hadamard", self.hadamard, (None, "block"))
        _one_of("scale", self.scale, ("block", "adaptive", "paper", "none"))
        _one_of("scale_dtype", self.scale_dtype, ("bf16", "e8m0"))
        _one_of("layout", self.layout, ("hidden", "tokens"))
        if (self.format == "bf16") != (self.scale == "none") or (self.scale == "none" and self.hadamard):
            raise ValueError(
                'format="bf16" and scale="none" belong together, without Hadamard: use the preset "bf16"; got '
                f"{self.format!r}, scale={self.scale!r}, hadamard={self.hadamard!r}"
            )
        if self.format in INTEGERS and self.scale == "adaptive":
            loss = "leaves 17 to 35 dB" if self.format == "int8" else "loses most of the values"
            raise ValueError(
                f'{self.format} needs scale="block": one scale per tensor {loss}; use the preset "{self.format}"'
            )
        if self.format == "e3m4" and self.scale == "adaptive":
            raise ValueError('e3m4 needs scale="block": its range of ten octaves has no room for a scale that follows')
        if self.format in INTEGERS and self.scale_dtype == "e8m0":
            raise ValueError(
                f'{self.format} needs scale_dtype="bf16": a power-of-two scale wastes up to one of its few bits'
            )
        if self.layout == "tokens" and self.scale == "paper":
            raise ValueError('layout="tokens" needs scale="adaptive" or "block"; "paper" is as published')
        if self.scale == "paper" and (self.format, self.hadamard, self.scale_dtype) != ("e4m3", "block", "bf16"):
            raise ValueError(
                'scale="paper" is the published codec, format="e4m3", hadamard="block", its factors in f32 (leave '
                f"scale_dtype out); got {self.format!r}, {self.hadamard!r}, scale_dtype={self.scale_dtype!r}"
            )
        _one_of("rounding", self.rounding, ("nearest", "stochastic"))
        if self.rounding == "stochastic" and self.scale in ("paper", "none"):
            raise ValueError(f'rounding="stochastic" needs scale="adaptive" or "block", got {self.scale!r}')
        if self.signs is not None and (not self.hadamard or self.scale == "paper" or self.signs < 0):
            raise ValueError(
                f'signs={self.signs!r} is a seed of 0 or more for hadamard="block" with scale="adaptive" or "block"; '
                "without a transform signs change nothing"
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
        return {"adaptive": 0, "paper": 8, "none": 0}[self.scale]

    @property
    def value_bits(self) -> int:
        """Bits that a value takes in the payload."""
        return _BITS.get(self.format, 8)


_TACO = Codec("e4m3", hadamard="block", scale="adaptive")
_PRESETS: dict[str, Codec | None] = {
    "taco": _TACO,
    "taco_block": Codec("e4m3", hadamard="block", scale="block"),
    "paper": Codec("e4m3", 256, "block", "paper"),
    "fp8": Codec("e4m3"),
    "int8": Codec("int8", hadamard="block"),
    "int6": Codec("int6", hadamard="block"),
    "int4": Codec("int4", hadamard="block"),
    "bf16": Codec("bf16", scale="none"),
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
    def compressed_directions(self) -> tuple[str, ...]:
        """Directions whose messages take fewer than the two bytes of bf16 per value."""
        codecs = {"forward": self.forward, "backward": self.backward}
        return tuple(way for way, codec in codecs.items() if codec is not None and codec.value_bits < 16)

    @property
    def is_scaled(self) -> bool:
        """Whether a direction has a codec with scales, whose messages are worth an observation."""
        return any(c is not None and c.scale != "none" for c in (self.forward, self.backward))

    @property
    def is_stochastic(self) -> bool:
        """Whether a direction rounds stochastically and calls need a key."""
        return any(c is not None and c.rounding == "stochastic" for c in (self.forward, self.backward))

    @property
    def is_adaptive(self) -> bool:
        """Whether a direction needs the state of `taco_jax.scales`."""
        return any(c is not None and c.scale == "adaptive" for c in (self.forward, self.backward))


def as_compression(value: "str | Compression | None") -> Compression:
    """Return the `Compression` that a preset name, a `Compression` or None (exact) stands for."""
    if isinstance(value, Compression):
        return value
    return Compression.named("none" if value is None else value)
