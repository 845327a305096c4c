"""What a folder of a run, or of `experiments.convert`, holds beside arrays: its model and its tokenizer."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

from experiments.config import ConfigError, TrainConfig
from experiments.tokenizer import tokenizer_files

HUGGINGFACE = "huggingface.json"
"""File of a folder whose model came from Hugging Face: its config.json and the names and dtypes of its tensors."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "qwen.tiktoken",
)
GENERATION_FILES = ("generation_config.json",)


def make_folder(folder: Path) -> None:
    """Make the folder of --out, and see whether files can be written there.

    Raises:
        ConfigError: if not.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write to --out={folder}: {error.strerror}") from None


def split_checkpoint(path: Path) -> tuple[Path, int | None]:
    """Return the folder of a run, and the step if `path` is one of its checkpoints.

    Raises:
        ConfigError: if there is no folder with checkpoints.
    """
    step = int(path.name) if path.parent.name == "checkpoints" and path.name.isdigit() else None
    folder = path.parent.parent if step is not None else path
    if not (folder / "checkpoints").is_dir():
        raise ConfigError(f"{path} is no folder of a run or of experiments.convert: it has no checkpoints")
    return folder, step


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file.

    Raises:
        ConfigError: if there is none.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return content


def read_config(path: Path) -> TrainConfig:
    """Return the configuration in a folder, or in the folder of a checkpoint; fields it does not know have defaults.

    Raises:
        ConfigError: if there is none, or it is not one of ours.
    """
    file = split_checkpoint(path)[0] / "config.json"
    content = read_json(file)
    try:
        return _from_dict(TrainConfig(), content)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file} is not the configuration of a run: {error}") from None


def with_model_of(config: TrainConfig, path: Path) -> TrainConfig:
    """Return `config` with the model of a folder and, unless it has one, the tokenizer.

    Raises:
        ConfigError: as `read_config`.
    """
    saved = read_config(path)
    tokenizer = config.data.tokenizer or tokenizer_of(path, saved)
    data = dataclasses.replace(config.data, tokenizer=tokenizer)
    return dataclasses.replace(config, model=saved.model, data=data)


def tokenizer_of(path: Path, saved: TrainConfig) -> str:
    """Return the name of the tokenizer that a folder holds or that its run read; empty if it does not say."""
    folder = split_checkpoint(path)[0]
    try:
        tokenizer_files(str(folder))
    except ConfigError:
        return saved.data.tokenizer
    return str(folder)


def carry(names: tuple[str, ...], sources: list[Path], folder: Path) -> None:
    """Copy files that go along as they are, from the first folder that has some of them."""
    for source in sources:
        if there := [name for name in names if (source / name).is_file()]:
            for name in there:
                shutil.copyfile(source / name, folder / name)
            return


def keep_origin(config: TrainConfig, folder: Path) -> None:
    """Copy to a run's folder what came with the model that it starts from, so that the run can be used without it."""
    source = split_checkpoint(Path(config.init_from))[0]
    carry((HUGGINGFACE, *GENERATION_FILES), [source], folder)
    if config.data.tokenizer == str(source):
        carry(TOKENIZER_FILES, [source], folder)


def _from_dict(default: Any, content: dict[str, Any]) -> Any:
    """Return the dataclass `default` with the values of nested dicts."""
    fields = {}
    for name, value in content.items():
        before = getattr(default, name)
        fields[name] = _from_dict(before, value) if dataclasses.is_dataclass(before) else value
    return dataclasses.replace(default, **fields)
