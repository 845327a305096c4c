"""Files of token ids: NAME.bin, mapped into memory, and NAME.bin.json, which says what the ids mean.

NAME.bin holds nothing but ids, little-endian, of one dtype. NAME.bin.json is an object with the fields of `Sidecar`;
`python -m experiments.prepare` writes both. For a file of ids from elsewhere this much is enough:

    {"dtype": "uint16", "vocab_size": 50257, "tokenizer": "gpt2", "tokenizer_sha256": "..."}
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np

from experiments.config import ConfigError, nearest
from experiments.tokenizer import BYTES, Tokenizer, load_tokenizer, tokenizer_files

DTYPES = ("uint8", "uint16", "uint32")
_CHUNK = 1 << 24
_ENDS = 1 << 16


@dataclass(frozen=True)
class Sidecar:
    """What NAME.bin.json says; the fields without a default must be there.

    Attributes:
        dtype: of an id: uint8, uint16 or uint32.
        vocab_size: of the tokenizer; every id is below it.
        tokenizer: "bytes", or where the tokenizer is, seen from the sidecar's folder.
        tokenizer_sha256: digest of its files (`experiments.tokenizer`); "bytes" for bytes.
        tokens: number of ids; 0 if unknown.
        text_bytes: UTF-8 bytes of the text; 0 if unknown.
        source_sha256: SHA-256 of the files that the text came from, one after the other.
        checked: size and modification time of the file when its ids were last compared with `vocab_size`, and the
            largest of them; the file is read through again if it has another size or time.
    """

    dtype: str
    vocab_size: int
    tokenizer: str
    tokenizer_sha256: str
    tokens: int = 0
    text_bytes: int = 0
    source_sha256: str = ""
    checked: dict[str, int] = dataclasses.field(default_factory=dict)


def sidecar_path(path: Path) -> Path:
    """Return the name of the sidecar of NAME.bin."""
    return path.with_name(f"{path.name}.json")


def read_sidecar(path: Path) -> Sidecar:
    """Return what the sidecar of NAME.bin says.

    Raises:
        ConfigError: if it is missing, is no JSON object, or a field is missing, unknown or of another type.
    """
    place = sidecar_path(path)
    try:
        values = json.loads(place.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read {place}, which says what the ids in {path.name} mean: {error.strerror}; "
            "python -m experiments.prepare writes both"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{place} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{place} is not a JSON object")
    fields = {field.name: field.default for field in dataclasses.fields(Sidecar)}
    kinds = {name: dict if name == "checked" else kind for name, kind in get_type_hints(Sidecar).items()}
    for name, value in values.items():
        if name not in fields:
            raise ConfigError(f"{place} has a field {name!r} that means nothing{nearest(name, fields)}")
        if type(value) is not kinds[name]:
            raise ConfigError(f"{place}: {name} must be of type {kinds[name].__name__}, got {value!r}")
    missing = [field.name for field in dataclasses.fields(Sidecar)[:4] if field.name not in values]
    if missing:
        raise ConfigError(f"{place} lacks {', '.join(missing)}")
    sidecar = Sidecar(**values)
    if sidecar.dtype not in DTYPES:
        raise ConfigError(f"{place}: dtype must be one of {', '.join(DTYPES)}, got {sidecar.dtype!r}")
    if not 0 < sidecar.vocab_size <= np.iinfo(np.int32).max:
        raise ConfigError(f"{place}: vocab_size must be from 1 to 2^31 - 1, got {sidecar.vocab_size}")
    return sidecar


def write_sidecar(path: Path, sidecar: Sidecar, ids: Path | None = None) -> None:
    """Write the sidecar of NAME.bin in one move; several processes may do so at once.

    Args:
        path: NAME.bin.
        sidecar: what to write.
        ids: a finished file that becomes NAME.bin; at no time a NAME.bin stands beside another one's sidecar.
    """
    place = sidecar_path(path)
    handle, temporary = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(sidecar), indent=2) + "\n")
            os.fchmod(file.fileno(), 0o644)  # temporary files are private
            if ids:
                file.flush()
                os.fsync(file.fileno())
        if ids:
            place.unlink(missing_ok=True)
            os.replace(ids, path)
        os.replace(temporary, place)
    except BaseException:
        os.unlink(temporary)
        raise


def sidecar_tokenizer(path: Path, sidecar: Sidecar) -> Tokenizer:
    """Return the tokenizer that the sidecar of NAME.bin names.

    Raises:
        ConfigError: if it cannot be loaded.
    """
    if sidecar.tokenizer == BYTES:
        return load_tokenizer(BYTES)
    try:
        places = [os.path.normpath(path.parent.resolve() / part) for part in sidecar.tokenizer.split(",")]
        return load_tokenizer(",".join(places))
    except ConfigError as error:
        raise ConfigError(f"{sidecar_path(path)}: {error}; data.tokenizer can name another place") from None


def tokenizer_place(name: str, path: Path) -> str:
    """Return what the sidecar of NAME.bin calls the tokenizer `name`: its place, seen from the sidecar's folder."""
    if name == BYTES:
        return BYTES
    places = [Path(name)] if os.path.exists(name) else tokenizer_files(name)
    # The names of links are kept: what they point to may be called anything.
    return ",".join(os.path.relpath(place.parent.resolve() / place.name, path.parent.resolve()) for place in places)


def open_tokens(path: Path, sidecar: Sidecar, tokenizer: Tokenizer) -> np.ndarray:
    """Return the ids of NAME.bin, mapped into memory, after comparing them with what its sidecar and the run say.

    Every id is compared with vocab_size once: the file is read through in chunks of 16 MiB, and its size, modification
    time and largest id are noted in the sidecar, if that can be written. As long as both are the same it is not read
    through again.

    Raises:
        ConfigError: if the file cannot be read, is no whole number of ids, has ids outside of the vocabulary, or was
            made with another tokenizer.
    """
    if sidecar.tokenizer_sha256 != tokenizer.digest:
        raise ConfigError(
            f"{path} was made with the tokenizer {sidecar.tokenizer} (sha256 {sidecar.tokenizer_sha256[:12]}), "
            f"not with {tokenizer.name} (sha256 {tokenizer.digest[:12]})"
        )
    if sidecar.vocab_size != tokenizer.vocab_size:
        raise ConfigError(
            f"{sidecar_path(path)}: vocab_size is {sidecar.vocab_size}, that of the tokenizer {tokenizer.name} is "
            f"{tokenizer.vocab_size}"
        )
    dtype = np.dtype(sidecar.dtype).newbyteorder("<")
    try:
        stat = path.stat()
        if stat.st_size % dtype.itemsize:
            raise ConfigError(
                f"{path} holds {stat.st_size:,} bytes, no multiple of the {dtype.itemsize} of a {sidecar.dtype}"
            )
        tokens = stat.st_size // dtype.itemsize
        if sidecar.tokens and sidecar.tokens != tokens:
            raise ConfigError(f"{path} holds {tokens:,} ids, its sidecar says {sidecar.tokens:,}")
        _check_ids(path, sidecar, dtype, stat)
        return np.memmap(path, dtype, "r") if tokens else np.empty(0, dtype)
    except OSError as error:
        raise ConfigError(f"cannot read --data={path}: {error.strerror}") from None


def tokens_digest(path: Path, sidecar: Sidecar) -> str:
    """Return a digest of NAME.bin without reading it all.

    It covers where the text came from, the tokenizer, the dtype, the size, and the first and the last 64 KiB.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(_ENDS)
        file.seek(max(0, size - _ENDS))
        ends = hashlib.sha256(first + file.read(_ENDS)).hexdigest()
    identity = [sidecar.source_sha256, sidecar.tokenizer_sha256, sidecar.dtype, size, ends]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def file_identity(stat: os.stat_result) -> dict[str, int]:
    """Return what must be unchanged for ids not to be compared again."""
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def smallest_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest little-endian dtype that holds every id below `vocab_size`."""
    bits = max(1, math.ceil(math.log2(vocab_size)))
    return np.dtype(next(name for name in DTYPES if int(name[4:]) >= bits)).newbyteorder("<")


def _check_ids(path: Path, sidecar: Sidecar, dtype: np.dtype, stat: os.stat_result) -> None:
    if sidecar.vocab_size > np.iinfo(dtype).max:
        return
    identity = file_identity(stat)
    known: Any = sidecar.checked.get("largest_id")
    is_known = isinstance(known, int) and sidecar.checked == identity | {"largest_id": known}
    largest = known if is_known else _largest(path, dtype)
    if largest >= sidecar.vocab_size:
        raise ConfigError(f"{path} holds the id {largest:,}; its vocabulary ends at {sidecar.vocab_size - 1:,}")
    if not is_known:
        with contextlib.suppress(OSError):  # data may be read-only: it is then read through by every run
            write_sidecar(path, dataclasses.replace(sidecar, checked=identity | {"largest_id": largest}))


def _largest(path: Path, dtype: np.dtype) -> int:
    """Return the largest id; read, not mapped, so that a large file does not count as this process's memory."""
    buffer = np.empty(_CHUNK // dtype.itemsize, dtype)
    largest = -1
    with path.open("rb") as file:
        while count := file.readinto(buffer.view(np.uint8)):
            largest = max(largest, int(buffer[: count // dtype.itemsize].max()))
    return largest
