import dataclasses
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from gpt2 import gpt2_folder

from experiments import step, token_file, train
from experiments.config import ConfigError, DataConfig
from experiments.data import TrainingData, load_corpus
from experiments.token_file import Sidecar, file_identity, read_sidecar, sidecar_path, smallest_dtype, write_sidecar

GPT2_SHA256 = "00f404d36600411e497efb3df08d3b4e094f0820e2595afcb7cbd0c4353d4fcb"


def write(path: Path, ids: np.ndarray, **fields) -> Path:
    """Write a file of ids as somebody else would, without prepare."""
    path.write_bytes(ids.tobytes())
    sidecar = {"dtype": ids.dtype.name, "vocab_size": 256, "tokenizer": "bytes", "tokenizer_sha256": "bytes"}
    sidecar_path(path).write_text(json.dumps(sidecar | fields))
    return path


def config(path, **fields) -> DataConfig:
    return DataConfig(path=str(path), sequence_length=16, batch_size=4, validation_fraction=0.25, **fields)


@pytest.fixture
def ids() -> np.ndarray:
    return np.arange(1000, dtype=np.uint16) % 251


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_ids_of_every_dtype_are_the_text_s(tmp_path, ids, dtype):
    (tmp_path / "x.txt").write_bytes(ids.astype(np.uint8).tobytes())
    corpus = load_corpus(config(write(tmp_path / "x.bin", ids.astype(dtype))))
    text = load_corpus(config(tmp_path / "x.txt"))
    assert isinstance(corpus.train, np.memmap) and corpus.train.dtype == dtype
    batch, expected = (TrainingData(c, config(""), seed=3)[7] for c in (corpus, text))
    for name in expected:
        np.testing.assert_array_equal(batch[name], expected[name])


@pytest.mark.parametrize(
    ("vocab_size", "name"),
    [(2, "uint8"), (256, "uint8"), (257, "uint16"), (50257, "uint16"), (65536, "uint16"), (65537, "uint32")],
)
def test_the_smallest_dtype_that_holds_a_vocabulary(vocab_size, name):
    dtype = smallest_dtype(vocab_size)
    assert dtype.name == name and dtype.newbyteorder("<") == dtype
    assert np.iinfo(dtype).max >= vocab_size - 1


@pytest.mark.parametrize(("size", "is_checked"), [(1 << 31, True), (1 << 28, False)])
def test_a_large_file_is_not_read_into_memory(tmp_path, size, is_checked):
    path = write(tmp_path / "x.bin", np.empty(0, np.uint16))
    with path.open("r+b") as file:  # a hole, that takes no space on the disk
        file.truncate(size)
        file.seek(size - 2)
        file.write(np.uint16(77).tobytes())
    if is_checked:
        write_sidecar(
            path, Sidecar("uint16", 256, "bytes", "bytes", checked=file_identity(path.stat()) | {"largest_id": 77})
        )

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    corpus = load_corpus(config(path))
    batch = TrainingData(corpus, config(path), seed=0)[1000]
    assert resident() - before < 64 << 20
    assert len(corpus.train) + len(corpus.validation) == size // 2
    assert corpus.validation[-1] == 77 and batch["tokens"].shape == (4, 16)
    assert read_sidecar(path).checked["largest_id"] == 77


def count_scans(monkeypatch) -> list[Path]:
    scans, scan = [], token_file._largest
    monkeypatch.setattr(token_file, "_largest", lambda path, dtype: scans.append(path) or scan(path, dtype))
    return scans


def test_ids_are_compared_with_the_vocabulary_once(tmp_path, ids, monkeypatch):
    scans = count_scans(monkeypatch)
    path = write(tmp_path / "x.bin", ids)
    digest = load_corpus(config(path)).digest
    assert read_sidecar(path).checked == file_identity(path.stat()) | {"largest_id": 250}
    assert load_corpus(config(path)).digest == digest and len(scans) == 1
    # A file that has changed since is read through again.
    ids[500] = 256
    path.write_bytes(ids.tobytes())
    os.utime(path, ns=(0, 0))
    with pytest.raises(ConfigError, match=r"x\.bin holds the id 256; its vocabulary ends at 255"):
        load_corpus(config(path))
    assert len(scans) == 2


def test_no_id_of_the_dtype_can_be_too_large(tmp_path, ids, monkeypatch):
    scans = count_scans(monkeypatch)
    load_corpus(config(write(tmp_path / "x.bin", ids.astype(np.uint8))))
    assert scans == []


def test_a_sidecar_that_cannot_be_written_is_no_mistake(tmp_path, ids, monkeypatch):
    path = write(tmp_path / "x.bin", ids)
    expected = load_corpus(config(path)).digest
    write(path, ids)

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(token_file.tempfile, "mkstemp", refuse)
    assert load_corpus(config(path)).digest == expected
    assert read_sidecar(path).checked == {}


@pytest.mark.parametrize("place", [0, 999, (1 << 23) + 1])
def test_the_largest_id_is_found_wherever_it_stands(tmp_path, place):
    ids = np.zeros((1 << 23) + 5, np.uint16)
    ids[place] = 300
    with pytest.raises(ConfigError, match="holds the id 300"):
        load_corpus(config(write(tmp_path / "x.bin", ids)))


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"dtype": "int64"}, "dtype must be one of uint8, uint16, uint32, got 'int64'"),
        ({"vocab_size": 0}, "vocab_size must be from 1 to 2^31 - 1, got 0"),
        ({"vocab_size": "256"}, "vocab_size must be of type int, got '256'"),
        ({"vocab_size": 300}, "vocab_size is 300, that of the tokenizer bytes is 256"),
        ({"tokens": 999}, "holds 1,000 ids, its sidecar says 999"),
        ({"token": 1000}, "has a field 'token' that means nothing; did you mean tokens?"),
        ({"tokenizer_sha256": "abc"}, "was made with the tokenizer bytes (sha256 abc), not with bytes (sha256 bytes)"),
        ({"tokenizer": "gone.json"}, "gone.json: No such file or directory; data.tokenizer can name another place"),
    ],
)
def test_a_sidecar_that_does_not_fit_is_a_mistake(tmp_path, ids, fields, part):
    path = write(tmp_path / "x.bin", ids, **fields)
    with pytest.raises(ConfigError) as caught:
        load_corpus(config(path))
    assert part in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[]", '{"dtype": "uint16"}'])
def test_a_sidecar_that_cannot_be_read_is_a_mistake(tmp_path, ids, text):
    path = write(tmp_path / "x.bin", ids)
    sidecar_path(path).write_text(text)
    with pytest.raises(ConfigError, match="is not JSON|is not a JSON object|lacks vocab_size, tokenizer, token"):
        load_corpus(config(path))


def test_a_sidecar_with_the_four_fields_is_enough(tmp_path, ids):
    values = dataclasses.asdict(read_sidecar(write(tmp_path / "x.bin", ids)))
    assert values == dataclasses.asdict(Sidecar("uint16", 256, "bytes", "bytes"))


def test_mistakes_end_the_trainer_with_one_line_and_code_2(tmp_path, ids, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(step, "build", None)  # nothing may be compiled
    good = write(tmp_path / "good.bin", np.tile(ids, 3))
    gpt2 = write(
        tmp_path / "gpt2.bin",
        np.tile(ids, 3),
        vocab_size=50257,
        tokenizer=str(gpt2_folder()),
        tokenizer_sha256=GPT2_SHA256,
    )
    shutil.copy(good, "alone.bin")
    write(tmp_path / "odd.bin", np.zeros(3001, np.uint8), dtype="uint16")
    write(tmp_path / "empty.bin", ids[:0])
    Path("text.txt").write_bytes(b"In the beginning " * 200)
    Path("broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    cases = [
        (["--data=alone.bin"], "cannot read alone.bin.json, which says what the ids in alone.bin mean: No such file"),
        (["--data=odd.bin"], "odd.bin holds 3,001 bytes, no multiple of the 2 of a uint16"),
        (["--data=empty.bin"], "empty.bin is too short: its 0 bytes"),
        (["--data=gone.bin"], "cannot read gone.bin.json"),
        (["--data=broken.jsonl"], "broken.jsonl, line 2 is not JSON"),
        (["--data=text.txt:0.5,good.bin"], "give every file a weight or none; good.bin has none"),
        (["--data=text.txt.gz"], "text.txt.gz is not text"),
        ([f"--data={good}", f"--set=data.tokenizer={gpt2_folder()}"], "was made with the tokenizer bytes"),
        ([f"--data={gpt2}", "--set=data.tokenizer=bytes"], f"(sha256 {GPT2_SHA256[:12]}), not with bytes"),
        ([f"--data={gpt2},{good}"], "good.bin was made with the tokenizer bytes (sha256 bytes), not with"),
        ([f"--data={gpt2}", "--set=model.vocab_size=50000"], "model.vocab_size=50000 is smaller than the 50257 of"),
        (["--set=model.vocab_size=255"], "model.vocab_size=255 is smaller than the 256 of the tokenizer bytes"),
        (["--set=model.vocab_size=-1"], "model: vocab_size must be 0 or more, got -1"),
        (["--set=data.tokenizer=gone.json"], "cannot read the tokenizer gone.json: gone.json: No such file"),
    ]
    for argv, part in cases:
        assert train.main(["--recipe=tiny", *argv]) == 2, argv
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1, argv
        assert captured.err.startswith("python -m experiments.train: error: ") and part in captured.err, captured.err
    assert not Path("runs").exists()
