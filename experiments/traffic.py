"""What one collective puts on the wire: bytes by the standard counts, and the site its named scope tells.

The compiled program (`experiments.hlo`) and the plan (`experiments.planned`) both speak in `Collective`; nothing here
comes from the library whose traffic is measured.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

# Bits of an element by its HLO name; the 8-bit floats are found by their prefix.
_BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64,
         "u64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128, "f4e2m1fn": 4}  # fmt: skip
_SCOPE = re.compile(r"taco\.(\w+)\.([^./():]+)\.(\w+)")


@dataclass(frozen=True)
class Collective:
    """One collective over one or more mesh axes, executed `count` times per training step.

    Attributes:
        op: `all-reduce`, `all-gather`, `all-to-all`, `reduce-scatter` or `collective-permute`.
        axis: mesh axes that a group spans, in mesh order and joined by commas: `tp`, `dp,pp`.
        group_size: devices of one group.
        operands: (HLO element type, bytes) of each array that one device hands in.
        count: executions per step on one device; a fraction where a branch runs for a share of the ticks.
        op_name: path of named scopes and transformations that led to it.
        groups: device positions in mesh order; (source, target) pairs for a permute; empty in a plan.
        uncompressed_bytes: bytes in bf16 of the tensor whose uint8 message this is, per execution; None if unknown.
        instruction: name in the HLO text, shared by messages that XLA combined; empty in a plan.
    """

    op: str
    axis: str
    group_size: int
    operands: tuple[tuple[str, int], ...]
    count: Fraction
    op_name: str
    groups: tuple[tuple[int, ...], ...] = ()
    uncompressed_bytes: Fraction | None = None
    instruction: str = field(default="", compare=False)

    @property
    def site(self) -> str:
        """Name of the communication site, `other` outside a `taco.<op>.<site>.<direction>` scope."""
        return site_and_direction(self.op_name)[0]

    @property
    def direction(self) -> str:
        """One of `forward`, `backward`, `update`."""
        return site_and_direction(self.op_name)[1]

    @property
    def dtype(self) -> str:
        """Element types that travel, joined by commas."""
        return ",".join(sorted({dtype for dtype, _ in self.operands}))

    @property
    def compressed(self) -> bool:
        """Whether this is a uint8 message of the library."""
        return self.dtype == "u8" and innermost_scope(self.op_name) is not None

    @property
    def payload_bytes(self) -> int:
        """Bytes that one device hands in, per execution."""
        return sum(size for _, size in self.operands)

    @property
    def bytes_per_step(self) -> Fraction:
        """Bytes that leave one device per step."""
        return self.count * wire_factor(self.op, self.group_size) * self.payload_bytes

    @property
    def bf16_bytes_per_step(self) -> Fraction:
        """Bytes that would leave one device per step if every floating-point payload were bf16."""
        if not self.compressed:
            payload = sum((_bf16_bytes(dtype, size) for dtype, size in self.operands), Fraction(0))
        elif self.uncompressed_bytes is None:
            payload = Fraction(2 * self.payload_bytes)
        else:
            payload = self.uncompressed_bytes
        return self.count * wire_factor(self.op, self.group_size) * payload


def wire_factor(op: str, group_size: int) -> Fraction:
    """Return the bytes that leave a device per byte it hands in, by the ring algorithms.

    all-gather n-1 (its output is n times the input), all-to-all and reduce-scatter (n-1)/n, all-reduce 2(n-1)/n,
    collective-permute 1.
    """
    share = Fraction(group_size - 1, group_size)
    return {
        "all-gather": Fraction(group_size - 1),
        "all-to-all": share,
        "reduce-scatter": share,
        "all-reduce": 2 * share,
        "collective-permute": Fraction(1),
    }[op]


def site_and_direction(op_name: str) -> tuple[str, str]:
    """Return (site, direction) of a path of named scopes: the innermost `taco.<op>.<site>.<direction>` decides.

    Without such a scope the site is `other`, and the direction follows from the transformations in the path:
    `update` is what stands outside the differentiated function. Where XLA combined operations of several sites, all are
    named, joined by `+`.
    """
    names = combined_names(op_name)
    if len(names) > 1:
        sites, directions = zip(*map(site_and_direction, names), strict=True)
        return "+".join(dict.fromkeys(sites)), "+".join(dict.fromkeys(directions))
    # A rematerialised forward pass lies inside the transposed program but is still a forward pass.
    transposed = "transpose(" in op_name and "rematted_computation" not in op_name
    scopes = _SCOPE.findall(op_name)
    if not scopes:
        return "other", "backward" if transposed else "forward" if "jvp(" in op_name else "update"
    _, site, direction = scopes[-1]
    # JAX's own transposition keeps the scope in which the forward collective was written.
    return site, "backward" if transposed else direction


def combined_names(op_name: str) -> list[str]:
    """Return the paths of the operations that XLA combined into one, which it names `prefix/(name:name:...)`."""
    start, parts = len(op_name), [""]
    depth = 0
    for start in range(len(op_name) - 1, -1, -1):
        character = op_name[start]
        depth += (character == ")") - (character == "(")
        if depth == 0:
            break
        if character == ":" and depth == 1:
            parts.insert(0, "")
        elif start < len(op_name) - 1:
            parts[0] = character + parts[0]
    prefix = op_name[:start]
    # `jvp(...)` wraps a name too, but follows its own name and not a slash.
    if len(parts) == 1 or (prefix and not prefix.endswith("/")):
        return [op_name]
    return [name for part in parts for name in combined_names(prefix + part)]


def innermost_scope(op_name: str) -> str | None:
    """Return the innermost library scope of a path, `taco.psum.mlp.forward`, or None."""
    scopes = [match.group() for match in _SCOPE.finditer(op_name)]
    return scopes[-1] if scopes else None


def element_bits(dtype: str) -> int | None:
    """Return the bits of an HLO element type, None if it is not an array element (a token)."""
    return 8 if dtype.startswith("f8") else _BITS.get(dtype)


def axis_label(axes: set[str], axis_sizes: Mapping[str, int]) -> str:
    """Return mesh axes in mesh order; an axis of size 1 is spanned by nothing."""
    return ",".join(name for name, size in axis_sizes.items() if name in axes and size > 1)


def _bf16_bytes(dtype: str, size: int) -> Fraction:
    is_float = dtype.startswith(("f", "bf"))
    return Fraction(size * 16, element_bits(dtype) or 16) if is_float else Fraction(size)
