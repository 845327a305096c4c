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
    (r"layers/attention/out/kernel", P("pp", "tp", None, None)),
    (r"layers/attention/out/bias", P("pp", None)),
    (r"layers/mlp/up/kernel", P("pp", None, "tp")),
    (r"layers/mlp/up/bias", P("pp", "tp")),
    (r"layers/mlp/down/kernel", P("pp", "tp", None)),
    (r"layers/mlp/down/bias", P("pp", None)),
)
"""Layers are stacked along their first axis; head kernels are [V, H] like the token table."""


def partition_specs(parameters: Any) -> Any:
    """Return the tree of `PartitionSpec` for a nested dict of parameters.

    Raises:
        ValueError: if no rule, or more than one, matches a parameter's path.
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: _spec("/".join(str(k.key) for k in path)), parameters)


def mesh_axes(spec: P) -> tuple[str, ...]:
    """Return the mesh axes that a `PartitionSpec` shards over."""
    names: list[str] = []
    for entry in spec:
        names += [] if entry is None else [entry] if isinstance(entry, str) else list(entry)
    return tuple(names)


def _spec(path: str) -> P:
    found = [spec for pattern, spec in RULES if re.fullmatch(pattern, path)]
    if len(found) != 1:
        raise ValueError(f"{len(found)} rules of taco_jax.sharding.rules match the parameter {path!r}, want one")
    return found[0]
