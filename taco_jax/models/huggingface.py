"""Checkpoints of Hugging Face: where each of their tensors stands in our tree of parameters.

One table per kind of model serves both directions, whole trees and single blocks of a tensor. Their config.json is read
and written by `huggingface_config`. Letters: L layers, H hidden, N heads, K heads of keys and values, D head,
F intermediate, V vocabulary, P positions.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import traverse_util

from taco_jax.models.config import ModelConfig
from taco_jax.models.huggingface_config import model_type_of

_PREFIXES = {"gpt2": "transformer.", "qwen2": "model.", "qwen3": "model.", "qwen": "transformer."}
_HEAD = "lm_head.weight"
_TABLES = {"gpt2": "wte.weight", "qwen2": "embed_tokens.weight", "qwen3": "embed_tokens.weight", "qwen": "wte.weight"}
# Causal masks, and the angles of the positions: constants that older files carry.
_CONSTANTS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)|.*\brotary_emb\.inv_freq")
_LISTED = 3


@dataclass(frozen=True)
class Naming:
    """How the files of a checkpoint call their tensors.

    Attributes:
        model_type: "gpt2", "qwen2", "qwen3" or "qwen", the first Qwen.
        prefix: what every name but the head's begins with; empty where the model was saved without its head.
        repeats_table: a tied token table is there a second time, as the head.
    """

    model_type: str
    prefix: str
    repeats_table: bool = False


@dataclass(frozen=True)
class Piece:
    """Some rows of a tensor, and the part of a leaf of our tree that holds them.

    leaf[region] = tensor[rows].reshape(shape).transpose(axes), with axes of length 1 where `region` has more.

    Attributes:
        tensor: its name in the files.
        first_row: where its rows begin.
        shape: the rows, split into `num_row_axes` axes, and what one row is split into (nothing for a vector).
        num_row_axes: how many axes of `shape` are rows.
        axes: order in which the leaf has the axes of `shape`.
        path: names that lead to the leaf, joined by "/".
        region: one slice per axis of the leaf.
        row_axis: which axis of the leaf is the first of `shape`.
        is_copy: the leaf gets its values from another tensor, which must be equal to this one.
    """

    tensor: str
    first_row: int
    shape: tuple[int, ...]
    num_row_axes: int
    axes: tuple[int, ...]
    path: str
    region: tuple[slice, ...]
    row_axis: int
    is_copy: bool = False

    @property
    def rows(self) -> slice:
        """Which rows of the tensor."""
        return slice(self.first_row, self.first_row + math.prod(self.shape[: self.num_row_axes]))

    @property
    def region_shape(self) -> tuple[int, ...]:
        """Lengths of `region`."""
        return tuple(s.stop - s.start for s in self.region)

    def to_leaf(self, rows: np.ndarray) -> np.ndarray:
        """Return `rows` of the tensor as a view with the shape of `region`."""
        return rows.reshape(self.shape).transpose(self.axes).reshape(self.region_shape)

    def to_rows(self, part: np.ndarray) -> np.ndarray:
        """Return what `region` of the leaf holds as rows of the tensor, [rows, columns] or, of a vector, [rows]."""
        part = part.reshape([self.shape[axis] for axis in self.axes]).transpose(np.argsort(self.axes))
        columns = self.shape[self.num_row_axes :]
        return part.reshape([-1, math.prod(columns)] if columns else [-1])

    def split(self, max_size: int) -> Iterator["Piece"]:
        """Cut into pieces of `max_size` elements or less (but one index of the first axis at least)."""
        count = self.split_count(max_size)
        row = math.prod(self.shape[1 : self.num_row_axes])
        at = self.row_axis
        for start in range(0, self.shape[0], count):
            stop = min(start + count, self.shape[0])
            yield dataclasses.replace(
                self,
                first_row=self.first_row + start * row,
                shape=(stop - start, *self.shape[1:]),
                region=(*self.region[:at], slice(start, stop), *self.region[at + 1 :]),
            )

    def split_count(self, max_size: int) -> int:
        """Return how many indices of the first axis `split` leaves together."""
        return min(self.shape[0], max(1, max_size // math.prod(self.shape[1:])))


def default_naming(config: ModelConfig) -> Naming:
    """Return what Hugging Face's own writer calls the tensors of a model.

    Raises:
        ValueError: for a model that none of theirs is.
    """
    model_type = model_type_of(config)
    return Naming(model_type, _PREFIXES[model_type])


def leaf_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the logical shape of every leaf under its path, in the table's order."""
    return {row.path: row.leaf_shape(config.num_layers) for row in _table(config, default_naming(config))}


def pieces(config: ModelConfig, naming: Naming) -> list[Piece]:
    """Return what stands where, whole tensors as far as one leaf holds them; leaf by leaf, in the leaves' order."""
    found = [piece for row in _table(config, naming) for piece in row.pieces(config.num_layers)]
    if naming.repeats_table:
        copies = [dataclasses.replace(p, tensor=_HEAD, is_copy=True) for p in found if p.path == "embedding/embedding"]
        found[1:1] = copies
    return found


def tensor_shapes(config: ModelConfig, naming: Naming) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor under its name."""
    rows: dict[str, int] = {}
    columns: dict[str, tuple[int, ...]] = {}
    for piece in pieces(config, naming):
        rows[piece.tensor] = max(rows.get(piece.tensor, 0), piece.rows.stop)
        split = piece.shape[piece.num_row_axes :]
        columns[piece.tensor] = (math.prod(split),) if split else ()
    return {name: (rows[name], *columns[name]) for name in rows}


def match_names(
    model_type: str, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Naming, tuple[str, ...]]:
    """Compare the tensors of a checkpoint with those that its model has.

    Args:
        model_type: the one of its config.json.
        config: the model.
        shapes: shape of every tensor under its name.

    Returns:
        How they are called, and the names of constants among them that are no parameters.

    Raises:
        ValueError: for tensors that are missing, unexpected or of another shape, with the first few names.
    """
    prefix = _PREFIXES[model_type]
    if not any(name.startswith(prefix) for name in shapes):
        prefix = ""
    constants = tuple(name for name in shapes if _CONSTANTS.fullmatch(name.removeprefix(prefix)))
    naming = Naming(model_type, prefix, repeats_table=config.tie_embeddings and _HEAD in shapes)
    wanted = tensor_shapes(config, naming)
    problems = []
    if missing := [name for name in wanted if name not in shapes]:
        problems.append(f"{len(missing)} of {len(wanted)} tensors of this {model_type} are missing: {_few(missing)}")
    if unexpected := [name for name in shapes if name not in wanted and name not in constants]:
        problems.append(f"{len(unexpected)} tensors are no part of this {model_type}: {_few(unexpected)}")
    if problems:
        raise ValueError("; ".join(problems))
    if wrong := [name for name in wanted if tuple(shapes[name]) != wanted[name]]:
        found = [f"{name} is {list(shapes[name])}, not {list(wanted[name])}" for name in wrong]
        raise ValueError(f"{len(wrong)} tensors have other shapes than config.json says: {_few(found)}")
    return naming, constants


def to_tensors(
    config: ModelConfig, tree: Mapping[str, Any], naming: Naming | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every tensor of a tree of parameters, or of anything else with their shapes such as gradients.

    Args:
        config: the model.
        tree: nested dict of arrays; padding at the end of their axes is left out.
        naming: how the tensors are called; as Hugging Face's own writer calls them by default.

    Raises:
        ValueError: for a model that none of theirs is.
    """
    leaves = traverse_util.flatten_dict(tree, sep="/")
    by_tensor: dict[str, list[Piece]] = {}
    for piece in pieces(config, naming or default_naming(config)):
        by_tensor.setdefault(piece.tensor, []).append(piece)
    for name, parts in by_tensor.items():
        rows = [part.to_rows(np.asarray(leaves[part.path][part.region])) for part in parts]
        yield name, np.concatenate(rows) if len(rows) > 1 else rows[0]


def from_tensors(config: ModelConfig, get: Callable[[str], np.ndarray], naming: Naming | None = None) -> dict[str, Any]:
    """Return the tree of float32 parameters that a checkpoint's tensors make.

    Args:
        config: the model.
        get: returns the tensor of a name.
        naming: how the tensors are called; as Hugging Face's own writer calls them by default.

    Raises:
        ValueError: for a model that none of theirs is, or a repeated table that differs.
    """
    leaves = {path: np.empty(shape, np.float32) for path, shape in leaf_shapes(config).items()}
    for name, parts in itertools.groupby(pieces(config, naming or default_naming(config)), lambda p: p.tensor):
        tensor = np.asarray(get(name))
        for part in parts:
            values = part.to_leaf(tensor[part.rows].astype(np.float32))
            if part.is_copy:
                check_copy(name, leaves[part.path][part.region], values)
            else:
                leaves[part.path][part.region] = values
    return traverse_util.unflatten_dict(leaves, sep="/")


def check_copy(name: str, table: np.ndarray, copy: np.ndarray) -> None:
    """Compare the bytes of what must be equal.

    Raises:
        ValueError: if they differ.
    """
    if table.dtype != copy.dtype or table.tobytes() != copy.tobytes():
        raise ValueError(f"{name} differs from the token table, but config.json ties them (tie_word_embeddings)")


@dataclass(frozen=True)
class _Row:
    """A line of a table: the tensors that make a leaf, "{}" in their names being the layer's number.

    Attributes:
        path: of the leaf.
        tensors: names, each with the tensor's first row that counts.
        rows: the axes that each tensor's rows are split into.
        columns: the axes that each tensor's columns are split into; none for a vector.
        axes: order of rows and columns in the leaf; the tensor's own by default.
        stack: axis of one layer's leaf along which the tensors lie; None for a single tensor.
    """

    path: str
    tensors: tuple[tuple[str, int], ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...] = ()
    axes: tuple[int, ...] = ()
    stack: int | None = None

    def leaf_shape(self, num_layers: int) -> tuple[int, ...]:
        shape = self.rows + self.columns
        found = [shape[axis] for axis in self._order()]
        if self.stack is not None:
            found.insert(self.stack, len(self.tensors))
        return (num_layers, *found) if self._is_layered() else tuple(found)

    def pieces(self, num_layers: int) -> Iterator[Piece]:
        leaf = self.leaf_shape(num_layers)
        offset = int(self._is_layered())
        row_axis = self._order().index(0)
        row_axis += offset + (self.stack is not None and row_axis >= self.stack)
        for layer in range(num_layers if offset else 1):
            for index, (name, first_row) in enumerate(self.tensors):
                region = [slice(0, size) for size in leaf]
                if offset:
                    region[0] = slice(layer, layer + 1)
                if self.stack is not None:
                    region[offset + self.stack] = slice(index, index + 1)
                yield Piece(
                    tensor=name.format(layer),
                    first_row=first_row,
                    shape=self.rows + self.columns,
                    num_row_axes=len(self.rows),
                    axes=self._order(),
                    path=self.path,
                    region=tuple(region),
                    row_axis=row_axis,
                )

    def _order(self) -> tuple[int, ...]:
        return self.axes or tuple(range(len(self.rows + self.columns)))

    def _is_layered(self) -> bool:
        return self.path.startswith("layers/")


def _table(config: ModelConfig, naming: Naming) -> list[_Row]:
    def row(path: str, name: str, rows: tuple, columns: tuple = (), axes: tuple = ()) -> _Row:
        return _Row(path, ((naming.prefix + name, 0),), rows, columns, axes)

    table = (config.vocab_size,), (config.hidden_size,)
    rows = [row("embedding/embedding", _TABLES[naming.model_type], *table)]
    if not config.tie_embeddings:
        rows.append(_Row("head/kernel", ((_HEAD, 0),), *table))
    layers = _gpt_layers if config.family == "gpt" else _qwen_layers
    return rows + layers(config, naming, row)


def _gpt_layers(config: ModelConfig, naming: Naming, row: Callable[..., _Row]) -> list[_Row]:
    """Return the lines for GPT-2, whose matrices are [in, out]."""
    hidden, heads, inner = (config.hidden_size,), (config.num_heads, config.head_dim), (config.intermediate_size,)
    rows = [row("positions/embedding", "wpe.weight", (config.max_positions,), hidden)]
    for path, name in (
        ("norm", "ln_f"),
        ("layers/attention_norm", "h.{}.ln_1"),
        ("layers/mlp_norm", "h.{}.ln_2"),
    ):
        rows += [row(f"{path}/scale", f"{name}.weight", hidden), row(f"{path}/bias", f"{name}.bias", hidden)]
    for path, name, inputs, outputs in (
        ("attention/qkv", "attn.c_attn", hidden, (3, *heads)),
        ("attention/out", "attn.c_proj", heads, hidden),
        ("mlp/up", "mlp.c_fc", hidden, inner),
        ("mlp/down", "mlp.c_proj", inner, hidden),
    ):
        rows.append(row(f"layers/{path}/kernel", f"h.{{}}.{name}.weight", inputs, outputs))
        rows.append(row(f"layers/{path}/bias", f"h.{{}}.{name}.bias", outputs))
    return rows


def _qwen_layers(config: ModelConfig, naming: Naming, row: Callable[..., _Row]) -> list[_Row]:
    """Return the lines for the Qwens, whose matrices are [out, in]."""
    hidden, inner, head = (config.hidden_size,), (config.intermediate_size,), (config.head_dim,)
    query, key = (config.num_heads, *head), (config.num_kv_heads, *head)
    layer = naming.prefix + ("h.{}." if naming.model_type == "qwen" else "layers.{}.")

    def projections(kind: str) -> tuple[tuple[str, int], ...]:
        """Return the tensors of queries, keys and values; the first Qwen has one for all three."""
        if naming.model_type != "qwen":
            return tuple((f"{layer}self_attn.{p}_proj.{kind}", 0) for p in "qkv")
        starts = (0, math.prod(query), math.prod(query) + math.prod(key))
        return tuple((f"{layer}attn.c_attn.{kind}", start) for start in starts)

    if naming.model_type == "qwen":
        norms, out, down, gate_up = ("ln_f", "ln_1", "ln_2"), "attn.c_proj", "mlp.c_proj", ("mlp.w2", "mlp.w1")
    else:
        norms = ("norm", "input_layernorm", "post_attention_layernorm")
        out, down, gate_up = "self_attn.o_proj", "mlp.down_proj", ("mlp.gate_proj", "mlp.up_proj")
    weights = projections("weight")
    rows = [
        row("norm/scale", f"{norms[0]}.weight", hidden),
        _Row("layers/attention_norm/scale", ((f"{layer}{norms[1]}.weight", 0),), hidden),
        _Row("layers/mlp_norm/scale", ((f"{layer}{norms[2]}.weight", 0),), hidden),
        _Row("layers/attention/q/kernel", weights[:1], query, hidden, (2, 0, 1)),
        _Row("layers/attention/kv/kernel", weights[1:], key, hidden, (2, 0, 1), stack=1),
        _Row("layers/attention/out/kernel", ((f"{layer}{out}.weight", 0),), hidden, query, (1, 2, 0)),
        _Row("layers/mlp/gate_up/kernel", tuple((f"{layer}{n}.weight", 0) for n in gate_up), inner, hidden, (1, 0), 1),
        _Row("layers/mlp/down/kernel", ((f"{layer}{down}.weight", 0),), hidden, inner, (1, 0)),
    ]
    if config.qkv_bias:
        biases = projections("bias")
        rows.append(_Row("layers/attention/q/bias", biases[:1], query))
        rows.append(_Row("layers/attention/kv/bias", biases[1:], key, stack=0))
    if config.qk_norm:
        rows += [
            _Row(f"layers/attention/{n}/scale", ((f"{layer}self_attn.{n}.weight", 0),), head)
            for n in ("q_norm", "k_norm")
        ]
    return rows


def _few(names: list[str]) -> str:
    rest = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + rest
