"""What a folder keeps of the Hugging Face folder it came from, so that the same files can be written again."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.config import ConfigError, TrainConfig
from experiments.saved import HUGGINGFACE, read_json, split_checkpoint
from experiments.tensor_files import DTYPES, Layout, TensorInfo, shard
from taco_jax.models import huggingface, huggingface_config
from taco_jax.models.config import ModelConfig
from taco_jax.models.huggingface import Naming

SHARD_BYTES = 5 * 10**9
"""Largest safetensors file of a model that did not come in other ones."""


@dataclass(frozen=True)
class Origin:
    """A Hugging Face folder without its numbers.

    Attributes:
        config: its config.json.
        naming: how its tensors are called.
        layout: its files.
    """

    config: Mapping[str, Any]
    naming: Naming
    layout: Layout


def origin_text(origin: Origin, dropped: tuple[str, ...]) -> str:
    """Return what huggingface.json holds; the tensors called `dropped` are not kept."""
    files = [
        {
            "name": file,
            "metadata": dict(origin.layout.metadata[file]),
            "tensors": {name: info.dtype for name, info in tensors.items() if name not in dropped},
        }
        for file, tensors in origin.layout.files.items()
    ]
    content = {
        "config": origin.config,
        "naming": dataclasses.asdict(origin.naming),
        "files": files,
        "index_metadata": origin.layout.index,
        "dropped": dropped,
    }
    return json.dumps(content, indent=2) + "\n"


def origin_of(source: Path, run: TrainConfig, model: ModelConfig) -> tuple[Origin | None, list[str]]:
    """Return where the model of a run or converted folder came from, and what there is to say of that.

    Args:
        source: the folder or a checkpoint in it.
        run: its configuration.
        model: its architecture with every size written out.

    Returns:
        The origin, None for a model that was trained from random parameters, or changed since.

    Raises:
        ConfigError: if huggingface.json cannot be read.
    """
    path = _origin_path(source, run)
    if path is None:
        if run.init_from and not Path(run.init_from).exists():
            return None, [f"{run.init_from}, which the run began with, is not there: config.json is written anew"]
        return None, []
    content = read_json(path)
    try:
        naming = Naming(**content["naming"])
        before = huggingface_config.read_config(content["config"])
        shapes = huggingface.tensor_shapes(model, naming)
        if changed := _changed(before, model):
            return None, [f"the model is another than that of {path} in {changed}: config.json is written anew"]
        layout = Layout(
            files={
                file["name"]: {name: TensorInfo(dtype, shapes[name]) for name, dtype in file["tensors"].items()}
                for file in content["files"]
            },
            metadata={file["name"]: file["metadata"] for file in content["files"]},
            index=content["index_metadata"],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is not what experiments.convert wrote: {error}") from None
    return Origin(content["config"], naming, layout), []


def written_as(origin: Origin | None, model: ModelConfig, dtype: str | None, shard_bytes: int | None) -> Origin:
    """Return the Hugging Face folder to write.

    Args:
        origin: the one that the model came from.
        model: architecture.
        dtype: of the weights, as `DTYPES` calls it; None takes the origin's, or float32.
        shard_bytes: largest file; None takes the origin's files, or `SHARD_BYTES`.

    Raises:
        ValueError: for a model that none of Hugging Face's is.
    """
    if origin is None:
        dtype = dtype or "F32"
        config = huggingface_config.write_config(model, dtype=DTYPES[dtype].name)
        naming = huggingface.default_naming(model)
        shapes = huggingface.tensor_shapes(model, naming)
        tensors = {name: TensorInfo(dtype, shapes[name]) for name in sorted(shapes)}
        return Origin(config, naming, shard(tensors, shard_bytes or SHARD_BYTES))
    config, layout = dict(origin.config), origin.layout
    if dtype:
        for name in [name for name in ("dtype", "torch_dtype") if name in config] or ["torch_dtype"]:
            config[name] = DTYPES[dtype].name
        files = {
            file: {name: dataclasses.replace(info, dtype=dtype) for name, info in tensors.items()}
            for file, tensors in layout.files.items()
        }
        rest = {name: value for name, value in layout.index.items() if name != "total_size"}
        layout = dataclasses.replace(layout, files=files, index=rest)
    if shard_bytes:
        layout = shard(layout.tensors, shard_bytes)
    return Origin(config, origin.naming, layout)


@contextlib.contextmanager
def complaints_about(source: Path) -> Iterator[None]:
    """Turn what the library finds wrong with a folder into the user's mistake."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{source}: {error}") from None


def _origin_path(source: Path, run: TrainConfig) -> Path | None:
    folders = [source, *([Path(run.init_from)] if run.init_from else [])]
    for folder in folders:
        with contextlib.suppress(ConfigError):
            path = split_checkpoint(folder)[0] / HUGGINGFACE
            if path.exists():
                return path
    return None


def _changed(before: ModelConfig, model: ModelConfig) -> str:
    """Return the fields in which architectures differ, as far as tensors and what is computed of them go."""
    ignored = {"embedding_std", "kernel_std", *(["max_positions"] if model.family == "qwen" else [])}
    names = [field.name for field in dataclasses.fields(model) if field.name not in ignored]
    return ", ".join(name for name in names if getattr(before, name) != getattr(model, name))
