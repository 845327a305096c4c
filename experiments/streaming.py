"""Parameters of a checkpoint, written and read block by block: a few blocks are in memory, never a layer stack.

A checkpoint is the one of `experiments.checkpoint`, its state the parameters alone.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
import math
import operator
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from flax import traverse_util

from experiments.checkpoint import Damaged, Position, reason_of, sealed, signature, unsealed
from experiments.config import ConfigError
from taco_jax.models.huggingface import Piece

BLOCK_BYTES = 2**24
"""What is read, converted and written at a time, if no single row is larger."""
_FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True)
class Block:
    """A region of a leaf, and the rows of tensors that fill it."""

    region: tuple[slice, ...]
    pieces: tuple[Piece, ...]

    @property
    def start(self) -> tuple[int, ...]:
        """Index in the leaf of its first element."""
        return tuple(s.start for s in self.region)

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the region."""
        return tuple(s.stop - s.start for s in self.region)

    def inside(self, piece: Piece) -> tuple[slice, ...]:
        """Return where in the block a piece lies."""
        return tuple(slice(s.start - o, s.stop - o) for s, o in zip(piece.region, self.start, strict=True))


@dataclass(frozen=True)
class Leaf:
    """A float32 array of the tree, cut into blocks that are the chunks of its file, but for shorter ones at an end."""

    path: str
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]


def plan(pieces: Iterable[Piece], shapes: Mapping[str, tuple[int, ...]], block_bytes: int = BLOCK_BYTES) -> list[Leaf]:
    """Return the leaves that `pieces` fill, in their order.

    Args:
        pieces: all of every leaf's.
        shapes: the leaves' shapes under their paths.
        block_bytes: upper limit of a block, unless a single row of a tensor is larger.
    """
    by_path: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_path.setdefault(piece.path, []).append(piece)
    size = block_bytes // _FLOAT32.itemsize
    return [Leaf(path, shapes[path], tuple(_blocks(found, shapes[path], size))) for path, found in by_path.items()]


def _blocks(pieces: Sequence[Piece], shape: tuple[int, ...], max_size: int) -> Iterator[Block]:
    is_layered = pieces[0].row_axis > 0
    layers = max_size // math.prod(shape[1:]) if is_layered else 0
    found: dict[tuple[tuple[int, int], ...], list[Piece]] = {}
    for piece in pieces:
        if layers:
            first = piece.region[0].start // layers * layers
            bounds = ((first, min(first + layers, shape[0])), *((0, size) for size in shape[1:]))
            found.setdefault(bounds, []).append(piece)
            continue
        for part in piece.split(max_size):
            found.setdefault(tuple((s.start, s.stop) for s in part.region), []).append(part)
    for bounds, parts in found.items():
        yield Block(tuple(slice(*b) for b in bounds), tuple(parts))


def write_checkpoint(
    folder: Path,
    config: dict[str, Any],
    leaves: Sequence[Leaf],
    read: Callable[[Block], np.ndarray],
    checksums: Mapping[str, int],
) -> None:
    """Write the checkpoint of step 0 that `Checkpoints` of a run restores parameters from.

    Args:
        folder: of the checkpoints; made here.
        config: configuration as nested dicts.
        leaves: what to write.
        read: returns the values f32 of a block; called once for each, in the order of the leaves.
        checksums: of the leaves, under their paths.

    Raises:
        ConfigError: if it cannot be written.
    """
    arrays = {f"params.{x.path.replace('/', '.')}": [signature(_FLOAT32, x.shape), checksums[x.path]] for x in leaves}
    record = {**dataclasses.asdict(Position(0, config, "")), "arrays": arrays}
    tree = traverse_util.unflatten_dict({leaf.path: _Lazy(leaf, read) for leaf in leaves}, sep="/")
    handler = _LazyHandler()
    # Orbax warns of a registry that knows no arrays of JAX.
    registry = ocp.type_handlers.create_type_handler_registry(
        (_Lazy, handler), (jax.Array, ocp.type_handlers.ArrayHandler())
    )
    items = {
        "state": ocp.PyTreeCheckpointHandler(type_handler_registry=registry),
        "position": ocp.JsonCheckpointHandler(),
    }
    args = ocp.args.Composite(state=ocp.args.PyTreeSave({"params": tree}), position=ocp.args.JsonSave(sealed(record)))
    with _interrupting(handler), _silenced():
        try:
            with ocp.CheckpointManager(folder.resolve(), item_handlers=items) as manager:
                manager.save(0, args=args)
                manager.wait_until_finished()
                manager.check_for_errors()
        except Exception as error:
            handler.error = handler.error or error
    if isinstance(handler.error, Exception) and not isinstance(handler.error, ConfigError):
        raise ConfigError(f"the checkpoint could not be written: {reason_of(handler.error)}") from handler.error
    if handler.error:
        raise handler.error


class StoredParameters:
    """The parameters in a checkpoint, read one region at a time.

    Args:
        path: the checkpoint's folder, named by its step.

    Raises:
        ConfigError: if its position cannot be read, or has other bytes than were saved.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            record = json.loads((path / "position" / "metadata").read_text(encoding="utf-8"))
            self._arrays = unsealed(record)["arrays"]
        except (OSError, ValueError, AttributeError, Damaged) as error:
            raise self._unreadable(reason_of(error)) from None

    def names(self) -> set[str]:
        """Return the paths of the leaves."""
        return {name.removeprefix("params.").replace(".", "/") for name in self._arrays if name.startswith("params.")}

    def checksum(self, path: str) -> int:
        """Return the checksum that a leaf was saved with."""
        return self._arrays[f"params.{path.replace('/', '.')}"][1]

    def blocks(self, leaf: Leaf) -> Iterator[tuple[Block, np.ndarray]]:
        """Yield the blocks of a leaf with their values f32; padding at the end of an axis is not read.

        Raises:
            ConfigError: if they cannot be read, or the array is smaller or of another type.
        """
        try:
            store = self._open(leaf, 0)
            fits = len(store.shape) == len(leaf.shape) and all(map(operator.ge, store.shape, leaf.shape))
            if store.dtype.numpy_dtype != _FLOAT32 or not fits:
                wanted = signature(_FLOAT32, leaf.shape)
                raise self._unreadable(f"{leaf.path} is {store.dtype.name}{list(store.shape)}, its model has {wanted}")
            chunk = store.chunk_layout.read_chunk.shape
            # Where chunks reach beyond a block they are decoded once and kept for the blocks that follow.
            if kept := max(_covering_size(block, chunk) for block in leaf.blocks):
                store = self._open(leaf, kept)
            for block in leaf.blocks:
                yield block, store[block.region].read().result()
        except ConfigError:
            raise
        except Exception as error:
            raise self._unreadable(f"{leaf.path}: {reason_of(error)}") from error

    def _open(self, leaf: Leaf, cache_bytes: int) -> Any:
        state = (self.path / "state").resolve()
        kvstore = {
            "driver": "ocdbt",
            "base": {"driver": "file", "path": f"{state}/"},
            "path": f"params.{leaf.path.replace('/', '.')}/",
        }
        context = ts.Context({"cache_pool": {"total_bytes_limit": cache_bytes}})
        return ts.open({"driver": "zarr", "kvstore": kvstore}, open=True, read=True, context=context).result()

    def _unreadable(self, reason: str) -> ConfigError:
        return ConfigError(f"checkpoint {self.path} cannot be read: {reason}")


def _covering_size(block: Block, chunk: Sequence[int]) -> int:
    """Return the bytes of the chunks that a block lies in, 0 if it fills them."""
    bounds = [
        (s.start // size * size, math.ceil(s.stop / size) * size) for s, size in zip(block.region, chunk, strict=True)
    ]
    covered = math.prod(stop - start for start, stop in bounds)
    return 0 if covered <= math.prod(block.shape) else covered * _FLOAT32.itemsize


class _Lazy:
    """Stands for a leaf in the tree that Orbax saves."""

    def __init__(self, leaf: Leaf, read: Callable[[Block], np.ndarray]):
        self.leaf, self.read = leaf, read
        self.shape, self.dtype, self.ndim = leaf.shape, _FLOAT32, len(leaf.shape)
        self.size = math.prod(leaf.shape)
        self.nbytes = self.size * _FLOAT32.itemsize


class _LazyHandler(ocp.type_handlers.NumpyHandler):
    """Writes arrays as Orbax writes NumPy's, but for the chunks, and one block after the other.

    An error is kept, not raised: arrays that still wait for their turn would be told of a closed event loop.
    """

    def __init__(self) -> None:
        super().__init__(deepcopy_host_arrays=False)
        self._turn = asyncio.Lock()
        self.error: BaseException | None = None

    async def _open_and_write(self, value: Any, tspec: dict[str, Any], ts_context: ts.Context) -> None:
        async with self._turn:
            try:
                tspec["metadata"]["chunks"] = list(value.leaf.blocks[0].shape)
                store = await ts.open(ts.Spec(tspec), create=True, open=True, context=ts_context)
                for block in value.leaf.blocks:
                    if self.error:
                        return
                    await store[block.region].write(value.read(block))
            except Exception as error:
                self.error = self.error or error


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Keep Orbax from printing the stack of each of its threads for an error that is raised anyway."""
    log = logging.getLogger("absl")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


@contextlib.contextmanager
def _interrupting(handler: _LazyHandler) -> Iterator[None]:
    """Let Ctrl-C end the writing between two blocks, not Orbax's waiting for it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        handler.error = handler.error or KeyboardInterrupt()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
