import gzip
import hashlib
import importlib.resources
import io
import json

import numpy as np
import pytest
from gpt2 import gpt2_folder

from experiments import sources
from experiments.config import ConfigError
from experiments.sources import Named, TokenStream, check_is_text, parse_sources
from experiments.tokenizer import load_tokenizer

BYTES = load_tokenizer("bytes")


@pytest.fixture(scope="module")
def gpt2():
    return load_tokenizer(str(gpt2_folder()))


def stream(data: bytes, tokenizer=BYTES, name: str = "x.txt", text_field: str = "text") -> TokenStream:
    return TokenStream(io.BytesIO(data), name, tokenizer, text_field)


def read(*arguments, **keywords) -> list[int]:
    return np.concatenate(list(stream(*arguments, **keywords))).tolist()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", [("", None)]),
        ("a.txt", [("a.txt", None)]),
        ("a.bin:0.7,b.txt:0.3", [("a.bin", 0.7), ("b.txt", 0.3)]),
        ("a.bin,b.txt,c", [("a.bin", None), ("b.txt", None), ("c", None)]),
        ("a:2", [("a", 2.0)]),
        ("s3:a.bin,t:b", [("s3:a.bin", None), ("t:b", None)]),
        ("s3:a.bin:1e-3", [("s3:a.bin", 1e-3)]),
        (r"a\,b.txt:3,c\:1", None),
        (r"a\,b.txt:3,c\:1:2", [("a,b.txt", 3.0), ("c:1", 2.0)]),
        (r"a\:7", [("a:7", None)]),
        ("x" * 300 + ":1,y:2", [("x" * 300, 1.0), ("y", 2.0)]),
    ],
)
def test_names_and_weights(text, expected):
    if expected is None:
        with pytest.raises(ConfigError, match="every file a weight or none"):
            parse_sources(text)
    else:
        assert parse_sources(text) == [Named(*pair) for pair in expected]


def test_a_file_that_exists_is_taken_as_it_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a:0.5,b:0.5").touch()
    assert parse_sources("a:0.5,b:0.5") == [Named("a:0.5,b:0.5", None)]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a:1,b", "give every file a weight or none; b has none"),
        ("a:0,b:1", "the weight of a must be above 0 and finite, got 0"),
        ("a:-1", "got -1"),
        ("a:nan", "got nan"),
        ("a:inf,b:1", "got inf"),
        ("a,", "a file name is empty"),
        (":3", "a file name is empty"),
    ],
)
def test_mistakes_in_names_and_weights(text, part):
    with pytest.raises(ConfigError) as caught:
        parse_sources(text)
    assert part in str(caught.value) and f"--data={text}" in str(caught.value)


def test_documents_are_joined_by_what_separates_them(gpt2):
    lines = b'{"text": "Hello world", "id": 1}\n\n{"text": ""}\n{"id": 2, "text": "Hello world"}'
    assert read(lines, gpt2, "x.jsonl") == [15496, 995, 50256, 50256, 15496, 995]
    assert bytes(read(lines, name="x.jsonl")) == b"Hello world\n\nHello world"
    one = stream(lines, gpt2, "x.jsonl")
    list(one)
    assert one.text_bytes == 22 and one.digest == hashlib.sha256(lines).hexdigest()


def test_another_field(gpt2):
    assert read(b'{"content": "Hello world"}', gpt2, "x.jsonl", text_field="content") == [15496, 995]


@pytest.mark.parametrize(
    ("line", "part"),
    [
        (b'{"text": "cut o', "is not JSON"),
        (b"[1]", "is not a JSON object with the field 'text'"),
        (b'{"title": 1, "body": 2}', "has no field 'text' (its fields: title, body)"),
        (b"{}", "(its fields: none)"),
        (b'{"text": 3}', "the field 'text' holds no text but int"),
        (b'{"text": null}', "holds no text but NoneType"),
        (b'{"text": "\xff"}', "is not UTF-8"),
        (b'{"text": "\\ud800"}', "half a surrogate pair"),
        (b'\xef\xbb\xbf{"text": ""}', "BOM"),
    ],
)
def test_a_broken_line_is_named(line, part):
    with pytest.raises(ConfigError) as caught:
        read(b'{"text": "fine"}\n\n' + line + b"\n", name="my/x.jsonl")
    message = str(caught.value)
    assert message.startswith("my/x.jsonl, line 3") and part in message and "\n" not in message


def test_pieces_have_the_ids_of_the_whole_text(gpt2, monkeypatch):
    packaged = importlib.resources.files("taco_jax.data").joinpath("kjv.txt.gz")
    text = gzip.decompress(packaged.read_bytes())[:200_000] + " naïve\n\n  漢字 x\r\n\n y—\n".encode() * 500
    whole = gpt2.encode([text])[0].tolist()
    # Short ones, so that many lie between words and lines.
    monkeypatch.setattr(sources, "_PIECE", 301)
    monkeypatch.setattr(sources, "_BATCH", 5000)
    assert read(text, gpt2) == whole
    assert bytes(read(text)) == text


@pytest.mark.parametrize("text", ["漢字🙂" * 300, "é" * 1000, "x" * 1000, " " * 1000, "。\n" * 400])
def test_pieces_end_between_characters(gpt2, monkeypatch, text):
    for size in (1, 2, 3, 4, 97):
        monkeypatch.setattr(sources, "_PIECE", size)
        assert gpt2.decode(read(text.encode(), gpt2)) == text


@pytest.mark.parametrize("data", [b"", b"\x80" * 1000, b"\xff\xfe" * 500, bytes(range(256)) * 9])
def test_bytes_take_everything(monkeypatch, data):
    monkeypatch.setattr(sources, "_PIECE", 7)
    assert b"".join(ids.tobytes() for ids in stream(data)) == data


def test_text_that_is_not_utf8_is_named_with_its_place(gpt2, monkeypatch):
    monkeypatch.setattr(sources, "_PIECE", 64)
    monkeypatch.setattr(sources, "_BATCH", 256)
    text = "word é ".encode() * 500
    with pytest.raises(ConfigError, match=r"x\.txt: byte 4,000 is not UTF-8"):
        read(text[:4000] + b"\xff" + text[4000:], gpt2)


def test_the_number_of_bytes_read_is_reported():
    reports = []
    data = json.dumps({"text": "a" * 100_000}).encode() + b"\n"
    for name in ("x.txt", "x.jsonl"):
        list(TokenStream(io.BytesIO(data), name, BYTES, "text", reports.append))
    assert sum(reports) == 2 * len(data)


def test_compressed_files_and_arrays_are_no_text():
    for name in ("x.txt.gz", "x.jsonl.zst", "x.parquet", "x.npy"):
        with pytest.raises(ConfigError, match=f"{name} is not text"):
            check_is_text(name)
    check_is_text("x.md")
