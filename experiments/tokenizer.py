"""Tokenizers of the trainer: bytes, a Hugging Face `tokenizer.json`, or GPT-2's vocabulary and merges.

A tokenizer is known by the SHA-256 of its files: of `tokenizer.json`, or of the vocabulary followed by the merges. So
`sha256sum tokenizer.json` or `cat vocab.json merges.txt | sha256sum` tells whether two are the same.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from experiments.config import ConfigError

BYTES = "bytes"
"""Name of the tokenizer that needs no files."""

# A folder holds one of these; the second pair is what OpenAI named the files of GPT-2.
_PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
_END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]")


class Tokenizer(Protocol):
    """What turns a text into token ids and back.

    Attributes:
        name: "bytes", or the path it was loaded from.
        digest: SHA-256 of its files; "bytes" for bytes.
        vocab_size: its largest id + 1.
        unused: ids below `vocab_size` that no token has.
        separator: ids that stand between two documents.
        item: what one id is called, "byte" or "token".
    """

    name: str
    digest: str
    vocab_size: int
    unused: Sequence[int]
    separator: Sequence[int]
    item: str

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Return the ids of each UTF-8 text; nothing is added to them.

        Raises:
            UnicodeDecodeError: if one is not UTF-8; bytes take everything.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special tokens included."""
        ...


class ByteTokenizer:
    """Every byte is its own id; documents are separated by a line feed, since no byte means the end of one."""

    name = digest = BYTES
    vocab_size = 256
    unused: Sequence[int] = ()
    separator: Sequence[int] = (ord("\n"),)
    item = "byte"

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Return each text as u8[N]."""
        return [np.frombuffer(text, np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the bytes as text, what is not UTF-8 replaced."""
        return bytes(ids).decode("utf-8", errors="replace")


def byte_tokenizer_files() -> dict[str, str]:
    """Return the files, name -> text, with which Hugging Face's libraries read bytes as `ByteTokenizer` does."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return {"tokenizer.json": json.dumps(tokenizer, ensure_ascii=False), "tokenizer_config.json": json.dumps(config)}


def _byte_characters() -> str:
    """Return the character of each byte in byte-level vocabularies: itself if it can be seen, or 256 + n."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in seen]
    return "".join(chr(byte if byte in seen else 256 + others.index(byte)) for byte in range(256))


class SubwordTokenizer:
    """A tokenizer of the package `tokenizers`; without an end-of-document token a line feed separates documents.

    Args:
        name: the path it was loaded from.
        digest: SHA-256 of its files.
        implementation: a `tokenizers.Tokenizer`.
        end_of_document: text of the token between documents, if it has one.
    """

    item = "token"

    def __init__(self, name: str, digest: str, implementation: Any, end_of_document: str | None):
        # A file may say that texts are cut or padded to one length.
        implementation.no_truncation()
        implementation.no_padding()
        self.name, self.digest = name, digest
        self._tokenizer = implementation
        used = set(implementation.get_vocab(with_added_tokens=True).values())
        self.vocab_size = max(used) + 1
        self.unused: Sequence[int] = sorted(set(range(self.vocab_size)) - used)
        end = implementation.token_to_id(end_of_document) if end_of_document else None
        self.separator: Sequence[int] = self.encode([b"\n"])[0].tolist() if end is None else [end]

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Return each text as u32[N]; special tokens that it spells out are read as such."""
        encodings = self._tokenizer.encode_batch_fast([text.decode() for text in texts], add_special_tokens=False)
        return [np.asarray(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special tokens included."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer called `name`.

    Args:
        name: "bytes", a tokenizer.json (one that maps each byte to itself is bytes), a folder with one or with
            vocab.json and merges.txt (or encoder.json and vocab.bpe), or the two paths "VOCAB,MERGES".

    Raises:
        ConfigError: if there is no such file, it holds no tokenizer, or the package `tokenizers` is missing.
    """
    if name == BYTES:
        return ByteTokenizer()
    files = tokenizer_files(name)
    try:
        contents = [file.read_bytes() for file in files]
    except OSError as error:
        raise ConfigError(f"cannot read the tokenizer {name}: {error.filename}: {error.strerror}") from None
    if _is_of_bytes(contents):
        return ByteTokenizer()
    try:
        import tokenizers
    except ImportError:
        raise ConfigError(
            f"the tokenizer {name} needs the package tokenizers, which is not installed: pip install 'taco_jax[text]'"
        ) from None
    try:
        if len(files) == 1:
            implementation = tokenizers.Tokenizer.from_file(str(files[0]))
        else:
            implementation = _byte_level_bpe(tokenizers, *map(str, files))
    except Exception as error:  # the package raises Exception itself
        reason = str(error).split("\n")[0]
        raise ConfigError(
            f"the tokenizer {name} is neither a tokenizer.json nor VOCAB,MERGES of GPT-2: {reason}"
        ) from None
    end = _end_of_document(implementation, files[0].parent)
    return SubwordTokenizer(name, hashlib.sha256(b"".join(contents)).hexdigest(), implementation, end)


def _is_of_bytes(contents: Sequence[bytes]) -> bool:
    """Whether a tokenizer.json is the one of `byte_tokenizer_files`, whoever has formatted it."""
    try:
        return json.loads(contents[0]) == json.loads(byte_tokenizer_files()["tokenizer.json"])
    except ValueError:
        return False


def tokenizer_files(name: str) -> tuple[Path, ...]:
    """Return the tokenizer.json, or vocabulary and merges, that `name` stands for; they need not exist.

    Raises:
        ConfigError: for a folder without them.
    """
    path = Path(name)
    if os.path.isdir(name):
        for names in (("tokenizer.json",), *_PAIRS):
            if all((path / file).exists() for file in names):
                return tuple(path / file for file in names)
        raise ConfigError(f"the folder {name} holds no tokenizer: neither tokenizer.json nor vocab.json and merges.txt")
    parts = name.split(",")
    return tuple(map(Path, parts)) if len(parts) == 2 and not os.path.exists(name) else (path,)


def _byte_level_bpe(tokenizers: Any, vocab: str, merges: str) -> Any:
    """Return GPT-2's tokenizer; its vocabulary knows <|endoftext|>, but not that this token is a special one."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(vocab, merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([token for token in _END_OF_DOCUMENT if tokenizer.token_to_id(token) is not None])
    return tokenizer


def _end_of_document(tokenizer: Any, folder: Path) -> str | None:
    """Return the token that ends a document: what tokenizer_config.json beside it says, or a well-known one."""
    try:
        end = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))["eos_token"]
        names = [end["content"] if isinstance(end, dict) else end]
    except (OSError, ValueError, KeyError, TypeError):
        names = list(_END_OF_DOCUMENT)
    return next((name for name in names if name and tokenizer.token_to_id(name) is not None), None)
