"""How the parameters of the models lie on the mesh axes dp, pp, tp: one table from parameter path to PartitionSpec."""

import re
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

RULES: tuple[tuple[str, P], ...] = (
    (r"embedding/embedding", P("tp", None)),
    (r"head/kernel", P("tp", None)),
    (r"positions/embedding", P()),
    (r"norm/(scale|bias)", P()),
    (r"layers/\w+_norm/(scale|bias)", P("pp", None)),
    (r"layers/attention/qkv/kernel", P("pp", None, None, "tp", None)),
    (r"layers/attention/qkv/bias", P("pp", None, "tp", None)),
    (r"layers/attention/q/kernel", P("pp", None, "tp", None)),
    (r"layers/attention/q/bias", P("pp", "tp", None)),
    (r"layers/attention/kv/kernel", P("pp", None, None, "tp", None)),
    (r"layers/attention/kv/bias", P("pp", None, "tp", None)),
    (r"layers/attention/[qk]_norm/scale", P("pp", None)),
    (r"layers/attention/out/kernel", P("pp", "tp", None, None)),
    (r"layers/attention/out/bias", P("pp", None)),
    (r"layers/mlp/up/kernel", P("pp", None, "tp")),
    (r"layers/mlp/up/bias", P("pp", "tp")),
    (r"layers/mlp/gate_up/kernel", P("pp", None, None, "tp")),
    (r"layers/mlp/down/kernel", P("pp", "tp", None)),
    (r"layers/mlp/down/bias", P("pp", None)),
)
"""Layers are stacked along their first axis; head kernels are [V, H] like the token table."""

# What acts on heads, which are shared over tp; where it is replicated each device has a part of its gradient.
_PER_HEAD = r"layers/attention/(kv/(kernel|bias)|[qk]_norm/scale)"
# Fewer key heads than devices, or a number that they do not divide: every device holds all.
_REPLICATED_IF_UNEVEN = r"layers/attention/kv/(kernel|bias)"


def partition_specs(parameters: Any, tp: int = 1) -> Any:
    """Return the tree of `PartitionSpec` for a nested dict of parameters.

    Args:
        parameters: arrays or their shapes.
        tp: devices that share a layer.

    Raises:
        ValueError: if no rule, or more than one, matches a parameter's path.
    """
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _spec(_name(path), leaf, tp), parameters)


def partial_axes(specs: Any) -> Any:
    """Return for every parameter the mesh axes (a frozenset) over which devices compute parts of its gradient.

    dp and pp for all: they share the tokens. tp for what is replicated over it and acts on a device's own heads.
    """

    def axes(path: Any, spec: P) -> frozenset[str]:
        split = re.fullmatch(_PER_HEAD, _name(path)) and "tp" not in mesh_axes(spec)
        return frozenset(("dp", "pp", "tp") if split else ("dp", "pp"))

    return jax.tree_util.tree_map_with_path(axes, specs, is_leaf=lambda x: isinstance(x, P))


def mesh_axes(spec: P) -> tuple[str, ...]:
    """Return the mesh axes that a `PartitionSpec` shards over."""
    names: list[str] = []
    for entry in spec:
        names += [] if entry is None else [entry] if isinstance(entry, str) else list(entry)
    return tuple(names)


def _name(path: Any) -> str:
    return "/".join(str(entry.key) for entry in path)


def _spec(path: str, leaf: Any, tp: int) -> P:
    found = [spec for pattern, spec in RULES if re.fullmatch(pattern, path)]
    if len(found) != 1:
        raise ValueError(f"{len(found)} rules of taco_jax.sharding.rules match the parameter {path!r}, want one")
    spec = found[0]
    if re.fullmatch(_REPLICATED_IF_UNEVEN, path) and leaf.shape[list(spec).index("tp")] % tp:
        spec = P(*(None if entry == "tp" else entry for entry in spec))
    return spec
