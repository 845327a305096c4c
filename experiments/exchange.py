"""From a Hugging Face folder to one with a checkpoint of ours, and back."""

import contextlib
import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.checkpoint import chosen_step
from experiments.checksum import region_checksum
from experiments.cli import config_json
from experiments.config import ConfigError, TrainConfig
from experiments.origin import Origin, complaints_about, origin_of, origin_text, written_as
from experiments.saved import (
    GENERATION_FILES,
    HUGGINGFACE,
    TOKENIZER_FILES,
    carry,
    read_config,
    read_json,
    split_checkpoint,
    tokenizer_of,
)
from experiments.sources import reading_bar
from experiments.step import model_config
from experiments.streaming import Block, Leaf, StoredParameters, plan, write_checkpoint
from experiments.tensor_files import DTYPES, INDEX, SINGLE, Layout, TensorFolder, TensorWriter
from experiments.tokenizer import BYTES, byte_tokenizer_files, tokenizer_files
from taco_jax.models import huggingface, huggingface_config


@dataclass(frozen=True)
class Summary:
    """What has been written, in a few words, and what there is to say beside."""

    description: str
    notes: tuple[str, ...] = ()


def is_huggingface(source: Path) -> bool:
    """Return whether a folder is one of Hugging Face's; else it is one of ours.

    Raises:
        ConfigError: if it is neither.
    """
    if not source.is_dir():
        raise ConfigError(f"there is no folder {source}")
    if source.parent.name == "checkpoints" or (source / "checkpoints").is_dir():
        return False
    if (source / "config.json").is_file() and "model_type" in read_json(source / "config.json"):
        return True
    raise ConfigError(
        f"{source} is neither Hugging Face's (config.json with a model_type, {SINGLE} or {INDEX}) nor a run's "
        "(config.json, checkpoints)"
    )


def import_model(source: Path, folder: Path, *, check: bool = False) -> Summary:
    """Write what --init-from reads of a Hugging Face folder.

    Args:
        source: Hugging Face folder.
        folder: to write to.
        check: compare logits.

    Raises:
        ConfigError: for a model that we do not compute, tensors that are not its, or a result that differs.
    """
    config = read_json(source / "config.json")
    with complaints_about(source):
        model = huggingface_config.read_config(config)
    _check_has_weights(source)
    tensors = TensorFolder(source)
    shapes = {name: info.shape for name, info in tensors.layout.tensors.items()}
    with complaints_about(source):
        naming, dropped = huggingface.match_names(config["model_type"], model, shapes)
    tensors.check_types(name for name in shapes if name not in dropped)
    leaves = plan(huggingface.pieces(model, naming), huggingface.leaf_shapes(model))
    size = _nbytes(leaves)
    _check_space(folder, size)
    run = TrainConfig(model=model)
    with reading_bar(2 * size, "converting") as report:
        sums = {leaf.path: _checksum_of(tensors, leaf, source, report) for leaf in leaves}

        def read(block: Block) -> np.ndarray:
            values = _read_block(tensors, block)
            report(values.nbytes)
            return values

        write_checkpoint(folder / "checkpoints", dataclasses.asdict(run), leaves, read, sums)
    (folder / "config.json").write_text(config_json(run), encoding="utf-8")
    origin = Origin(config, naming, tensors.layout)
    (folder / HUGGINGFACE).write_text(origin_text(origin, dropped), encoding="utf-8")
    carry(TOKENIZER_FILES + GENERATION_FILES, [source], folder)
    notes = []
    if dropped:
        notes.append(f"left out {len(dropped)} constants that are no parameters, such as {dropped[0]}")
    if check:
        from experiments.same_logits import check_import

        notes += check_import(source, folder, model, naming)
    return Summary(f"{config['model_type']} of {size // 4:,} parameters in float32", tuple(notes))


def export_model(
    source: Path,
    folder: Path,
    step: int | None = None,
    dtype: str | None = None,
    shard_bytes: int | None = None,
    *,
    check: bool = False,
) -> Summary:
    """Write a Hugging Face folder of a checkpoint of ours.

    Args:
        source: run, checkpoint in one, or what `import_model` wrote.
        folder: to write to.
        step: which checkpoint; None takes the newest.
        dtype: of the weights, as `DTYPES` calls it; None takes what they came in, or float32.
        shard_bytes: largest file; None takes the files they came in, or `SHARD_BYTES`.
        check: compare logits.

    Raises:
        ConfigError: for a checkpoint that is not there or damaged, a model that none of Hugging Face's is, or a result
            that differs.
    """
    run = read_config(source)
    checkpoint = _checkpoint_path(source, step)
    with complaints_about(source):
        model = model_config(run)
        origin, notes = origin_of(source, run, model)
        written = written_as(origin, model, dtype, shard_bytes)
    stored = StoredParameters(checkpoint)
    leaves = plan(huggingface.pieces(model, written.naming), huggingface.leaf_shapes(model))
    if differing := sorted(stored.names() ^ {leaf.path for leaf in leaves}):
        raise ConfigError(f"checkpoint {checkpoint} and config.json are of different models: {differing[0]}")
    _check_space(folder, written.layout.nbytes)
    with (
        reading_bar(_nbytes(leaves), "converting") as report,
        TensorWriter(folder, written.layout) as writer,
    ):
        for leaf in leaves:
            _export_leaf(stored, leaf, written.layout, writer, report)
    (folder / "config.json").write_text(json.dumps(written.config, indent=2) + "\n", encoding="utf-8")
    beside = split_checkpoint(source)[0]
    carry(TOKENIZER_FILES, [beside, *_tokenizer_folder(source, run)], folder)
    if not (beside / HUGGINGFACE).exists() and tokenizer_of(source, run) in ("", BYTES):
        for name, text in byte_tokenizer_files().items():
            (folder / name).write_text(text, encoding="utf-8")
    carry(GENERATION_FILES, [beside, *([Path(run.init_from)] if run.init_from else [])], folder)
    types = sorted({DTYPES[info.dtype].name for info in written.layout.tensors.values()})
    if check:
        from experiments.same_logits import check_export

        notes += check_export(checkpoint, folder, model, written.naming, types)
    count = len(written.layout.files)
    description = (
        f"{written.config['model_type']} of step {checkpoint.name}, {len(written.layout.tensors)} tensors in "
        f"{' and '.join(types)}, {count} file{'s' * (count > 1)}"
    )
    return Summary(description, tuple(notes))


def _read_block(tensors: TensorFolder, block: Block) -> np.ndarray:
    """Return f32 of a block's shape."""
    values = np.empty(block.shape, np.float32)
    for piece in block.pieces:
        if not piece.is_copy:
            values[block.inside(piece)] = piece.to_leaf(tensors.read(piece.tensor, piece.rows))
    return values


def _checksum_of(tensors: TensorFolder, leaf: Leaf, source: Path, report: Callable[[int], None]) -> int:
    """Return a leaf's checksum; compare with it what must be equal to it."""
    total = 0
    for block in leaf.blocks:
        values = _read_block(tensors, block)
        total += region_checksum(values, block.start, leaf.shape)
        for copy in [piece for piece in block.pieces if piece.is_copy]:
            original = next(p for p in block.pieces if not p.is_copy and p.region == copy.region)
            rows = tensors.read(original.tensor, original.rows), tensors.read(copy.tensor, copy.rows)
            with complaints_about(source):
                huggingface.check_copy(copy.tensor, *rows)
        report(values.nbytes)
    return total % 2**32


def _export_leaf(
    stored: StoredParameters, leaf: Leaf, layout: Layout, writer: TensorWriter, report: Callable[[int], None]
) -> None:
    """Write the tensors that hold a leaf, and compare it with its checksum."""
    tensors = layout.tensors
    total = 0
    for block, values in stored.blocks(leaf):
        total += region_checksum(values, block.start, leaf.shape)
        for piece in block.pieces:
            rows = piece.to_rows(values[block.inside(piece)])
            dtype = DTYPES[tensors[piece.tensor].dtype]
            writer.write(piece.tensor, piece.first_row, _narrowed(rows, dtype, piece.tensor))
        report(values.nbytes)
    if total % 2**32 != stored.checksum(leaf.path):
        raise ConfigError(
            f"checkpoint {stored.path} is damaged: {leaf.path} has other bytes than were saved; --step names another"
        )


def _narrowed(rows: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        narrow = rows.astype(dtype)
    if dtype != rows.dtype and not np.isfinite(narrow.astype(np.float32)).all() and np.isfinite(rows).all():
        largest = np.abs(rows).max()
        raise ConfigError(f"{name} has values up to {largest:g}, more than {dtype.name} holds; choose another --dtype")
    return narrow


def _checkpoint_path(source: Path, step: int | None) -> Path:
    folder, named = split_checkpoint(source)
    if step is not None and named is not None:
        raise ConfigError(f"{source} names a checkpoint already; leave out --step")
    checkpoints = folder / "checkpoints"
    there = [int(path.name) for path in checkpoints.iterdir() if path.name.isdigit()]
    return checkpoints / str(chosen_step(checkpoints, there, named if step is None else step))


def _tokenizer_folder(source: Path, run: TrainConfig) -> list[Path]:
    """Return where the tokenizer is that a run read, if it is a file."""
    name = tokenizer_of(source, run)
    with contextlib.suppress(ConfigError):
        return [] if name in ("", BYTES) else [tokenizer_files(name)[0].parent]
    return []


def _check_has_weights(source: Path) -> None:
    if (source / SINGLE).exists() or (source / INDEX).exists():
        return
    others = [path.name for path in sorted(source.iterdir()) if path.suffix in (".safetensors", ".bin", ".pt", ".pth")]
    there = f"; {others[0]} is not read" if others else ""
    raise ConfigError(f"{source} has neither {SINGLE} nor {INDEX}{there}")


def _nbytes(leaves: list[Leaf]) -> int:
    return 4 * sum(math.prod(leaf.shape) for leaf in leaves)


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(f"OUT takes {needed / 2**20:,.1f} MiB, {free / 2**20:,.1f} MiB are free")
