import hashlib
import json
import shutil
import sys

import numpy as np
import pytest
import tokenizers
from gpt2 import gpt2_folder

from experiments.config import ConfigError
from experiments.tokenizer import byte_tokenizer_files, load_tokenizer

TEXTS = [
    "In the beginning God created the heaven and the earth.",
    "don't  stop \n\n\tat 12,345.67 —",
    "naïve café, Ünïcödé, 漢字かな, العربية",
    "🙂 👩‍👩‍👧 🇺🇳 é",
]


@pytest.fixture(scope="module")
def gpt2():
    return load_tokenizer(str(gpt2_folder()))


def ids(tokenizer, text: str) -> list[int]:
    return tokenizer.encode([text.encode()])[0].tolist()


@pytest.fixture
def words(tmp_path):
    """A tokenizer.json of three words whose ids leave holes, and that would cut texts after two."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "a": 2, "b": 7}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(max_length=2)
    tokenizer.enable_padding(length=5)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_bytes():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.name, tokenizer.digest, tokenizer.vocab_size) == ("bytes", "bytes", 256)
    assert ids(tokenizer, "aé") == [97, 195, 169]
    assert tokenizer.encode([b"\xff"])[0].dtype == np.uint8
    assert tokenizer.decode([97, 195, 169, 255]) == "aé\ufffd"


def test_known_ids_of_gpt2(gpt2):
    assert ids(gpt2, "Hello world") == [15496, 995]
    assert ids(gpt2, " the") == [262]
    assert gpt2.vocab_size == 50257 and list(gpt2.unused) == []
    # The end of a document, also where a text spells it out.
    assert gpt2.separator == [50256]
    assert ids(gpt2, "a<|endoftext|>b") == [64, 50256, 65]


@pytest.mark.parametrize("text", TEXTS)
def test_gpt2_gives_the_text_back(gpt2, text):
    assert gpt2.decode(ids(gpt2, text)) == text
    assert len(ids(gpt2, text)) < len(text.encode())


def test_a_pair_a_folder_and_a_tokenizer_json_mean_the_same(gpt2, tmp_path):
    vocab, merges = gpt2_folder() / "encoder.json", gpt2_folder() / "vocab.bpe"
    pair = load_tokenizer(f"{vocab},{merges}")
    shutil.copy(vocab, tmp_path / "vocab.json")
    shutil.copy(merges, tmp_path / "merges.txt")
    folder = load_tokenizer(str(tmp_path))
    expected = hashlib.sha256(vocab.read_bytes() + merges.read_bytes()).hexdigest()
    assert gpt2.digest == pair.digest == folder.digest == expected
    gpt2._tokenizer.save(str(tmp_path / "tokenizer.json"))
    single = load_tokenizer(str(tmp_path))
    for text in TEXTS:
        assert ids(pair, text) == ids(folder, text) == ids(single, text) == ids(gpt2, text)
    assert single.digest == hashlib.sha256((tmp_path / "tokenizer.json").read_bytes()).hexdigest()


def test_a_tokenizer_json_neither_cuts_nor_pads_and_knows_its_holes(words):
    tokenizer = load_tokenizer(str(words))
    assert ids(tokenizer, "a b a b b") == [2, 7, 2, 7, 7]
    assert tokenizer.vocab_size == 8 and list(tokenizer.unused) == [1, 3, 4, 5, 6]


@pytest.mark.parametrize("eos", ["b", {"content": "b"}])
def test_tokenizer_config_names_the_end_of_a_document(words, eos):
    assert load_tokenizer(str(words)).separator == []  # a line feed has no token either
    words.with_name("tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    assert load_tokenizer(str(words)).separator == [7]


def test_mistakes_are_one_line(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.json").write_text("In the beginning\n")
    cases = {
        "empty": "holds no tokenizer: neither tokenizer.json nor vocab.json and merges.txt",
        "none.json": "none.json: No such file",
        "none.json,none.txt": "none.json: No such file",
        "text.json": "is neither a tokenizer.json nor VOCAB,MERGES",
        "text.json,text.json": "is neither a tokenizer.json nor VOCAB,MERGES",
    }
    monkeypatch.chdir(tmp_path)
    for name, part in cases.items():
        with pytest.raises(ConfigError) as caught:
            load_tokenizer(name)
        assert part in str(caught.value) and "\n" not in str(caught.value)


def test_without_the_package_the_mistake_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"pip install 'taco_jax\[text\]'"):
        load_tokenizer(str(gpt2_folder()))
    assert load_tokenizer("bytes").vocab_size == 256


def test_bytes_as_files_are_bytes_again(tmp_path):
    for name, text in byte_tokenizer_files().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    text = bytes(range(128)).decode() + "naïve — \N{SNOWMAN} 漢字\r\n\t\x00"
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert theirs.encode(text).ids == list(text.encode())
    assert theirs.decode(list(text.encode())) == text
    assert theirs.get_vocab_size() == 256
    assert load_tokenizer(str(tmp_path)).name == "bytes"
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content, indent=2, sort_keys=True))
    assert load_tokenizer(str(tmp_path)).item == "byte"
    content["model"]["merges"] = [["a", "b"]]
    content["model"]["vocab"]["ab"] = 256
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(str(tmp_path)).vocab_size == 257
