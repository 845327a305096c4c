"""Folders of safetensors files: tensors are read and written some rows at a time."""

import contextlib
import json
import math
import os
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from experiments.config import ConfigError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""The types that weights may have, as the files call them."""
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class TensorInfo:
    """Type, as the files call it, and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Layout:
    """What a folder of files holds.

    Attributes:
        files: tensors under the names of their files, both in the order in which they lie there.
        metadata: texts that each file carries.
        index: what the index of several files says beside the tensors' places.
    """

    files: Mapping[str, Mapping[str, TensorInfo]]
    metadata: Mapping[str, Mapping[str, str]]
    index: Mapping[str, Any]

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """All tensors under their names."""
        return {name: info for file in self.files.values() for name, info in file.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())


class TensorFolder:
    """The tensors in model.safetensors, or in the files that model.safetensors.index.json lists.

    Raises:
        ConfigError: for a folder without them, or a file that is missing or damaged.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        index = _read_index(folder)
        names = sorted(set(index["weight_map"].values())) if index else [SINGLE]
        self._files = {name: self._open(name) for name in names}
        self._place = {tensor: name for name, file in self._files.items() for tensor in file.keys()}
        if index and (wrong := [t for t, name in index["weight_map"].items() if self._place.get(t) != name]):
            raise ConfigError(f"{folder / index['weight_map'][wrong[0]]} lacks {wrong[0]}, which {INDEX} says it holds")
        self.layout = Layout(
            files={name: {t: self._info(file, t) for t in file.offset_keys()} for name, file in self._files.items()},
            metadata={name: file.metadata() or {} for name, file in self._files.items()},
            index=index.get("metadata") or {} if index else {},
        )
        self._tensors = self.layout.tensors

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Return rows of a tensor, in its own type."""
        try:
            return self._files[self._place[name]].get_slice(name)[rows]
        except SafetensorError as error:
            raise ConfigError(f"cannot read {name} in {self.folder / self._place[name]}: {error}") from None

    def check_types(self, names: Iterable[str]) -> None:
        """Compare the types of tensors with `DTYPES`.

        Raises:
            ConfigError: for one of another type.
        """
        for name in names:
            if (dtype := self._tensors[name].dtype) not in DTYPES:
                raise ConfigError(f"{name} in {self.folder} has the type {dtype}; we read {', '.join(DTYPES)} weights")

    def _open(self, name: str) -> Any:
        path = self.folder / name
        if not path.is_file():
            raise ConfigError(f"there is no {path}" + ("" if name == SINGLE else f", which {INDEX} lists"))
        try:
            return safe_open(path, framework="numpy")
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"cannot read {path}: {str(error).splitlines()[0]}") from None

    @staticmethod
    def _info(file: Any, name: str) -> TensorInfo:
        found = file.get_slice(name)
        return TensorInfo(found.get_dtype(), tuple(found.get_shape()))


class TensorWriter:
    """Writes the files of a layout, rows in any order; a context manager, which brings them to the disk."""

    def __init__(self, folder: Path, layout: Layout):
        self._folder, self._layout, self._tensors = folder, layout, layout.tensors
        self._files: dict[str, BinaryIO] = {}
        self._place: dict[str, tuple[BinaryIO, int]] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "TensorWriter":
        for name, tensors in self._layout.files.items():
            file = self._stack.enter_context(open(self._folder / name, "wb"))
            header, offsets, size = _header(tensors, self._layout.metadata.get(name, {}))
            file.write(header)
            file.truncate(len(header) + size)
            self._place |= {tensor: (file, len(header) + offset) for tensor, offset in offsets.items()}
            self._files[name] = file
        if list(self._layout.files) != [SINGLE]:
            (self._folder / INDEX).write_text(_index_text(self._layout), encoding="utf-8")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._stack:
            if error is None:
                for file in self._files.values():
                    file.flush()
                    os.fsync(file.fileno())

    def write(self, name: str, first_row: int, rows: np.ndarray) -> None:
        """Write `rows`, in the tensor's type, from `first_row` on."""
        info = self._tensors[name]
        assert rows.dtype == DTYPES[info.dtype] and rows.shape[1:] == info.shape[1:], (name, rows.dtype, rows.shape)
        file, start = self._place[name]
        file.seek(start + first_row * math.prod(info.shape[1:]) * rows.dtype.itemsize)
        file.write(np.ascontiguousarray(rows).view(np.uint8).data)


def shard(tensors: Mapping[str, TensorInfo], max_bytes: int) -> Layout:
    """Return how tensors are laid out in files of at most `max_bytes`, or of a single tensor, in their order."""
    parts: list[dict[str, TensorInfo]] = [{}]
    size = 0
    for name, info in tensors.items():
        if parts[-1] and size + info.nbytes > max_bytes:
            parts.append({})
            size = 0
        parts[-1][name] = info
        size += info.nbytes
    count = len(parts)
    names = [SINGLE] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    return Layout(dict(zip(names, parts, strict=True)), {name: {"format": "pt"} for name in names}, {})


def parse_size(text: str) -> int:
    """Return the number of bytes that "5GB" or "500MiB" is.

    Raises:
        ConfigError: for anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?I?B)", text.strip().upper())
    if not match or match[2] not in _UNITS or not float(match[1]):
        raise ConfigError(f"a size is a number with MB, GB, MiB or GiB, such as 5GB; got {text!r}")
    return int(float(match[1]) * _UNITS[match[2]])


def _read_index(folder: Path) -> dict[str, Any] | None:
    path = folder / INDEX
    if (folder / SINGLE).exists() or not path.exists():
        return None
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        names = index["weight_map"].values()
        if any(Path(name).name != name for name in names):
            raise ValueError("it names files outside the folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = str(error) if type(error) is ValueError else "it is no index of safetensors files"
        raise ConfigError(f"cannot read {path}: {reason}") from None
    return index


def _header(tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int], int]:
    """Return what a file begins with, where the tensors begin behind it, and their bytes."""
    content: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offsets: dict[str, int] = {}
    end = 0
    for name, info in tensors.items():
        offsets[name], end = end, end + info.nbytes
        content[name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [offsets[name], end]}
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, offsets, end


def _index_text(layout: Layout) -> str:
    weight_map = {name: file for file, tensors in layout.files.items() for name in tensors}
    content = {"metadata": {"total_size": layout.nbytes, **layout.index}, "weight_map": weight_map}
    return json.dumps(content, indent=2, sort_keys=True) + "\n"
