import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from gpt2 import gpt2_folder

from experiments import prepare, token_file, train
from experiments.config import ConfigError, DataConfig
from experiments.data import load_corpus
from experiments.metrics import read_metrics
from experiments.token_file import read_sidecar
from experiments.tokenizer import load_tokenizer

DOCUMENTS = ["In the beginning God created the heaven\n and the earth.", "naïve 漢字 🙂\n\n", "", "and the end"]
TEXT = "Another text, of its own. \n" * 40


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    Path("b.txt").write_text(TEXT)
    return tmp_path


def files() -> set[str]:
    return {path.name for path in Path.cwd().iterdir()} - {"a.jsonl", "b.txt"}


def test_pulse(capsys):
    assert prepare.main(["a.jsonl", "b.txt", "--out=x.bin", f"--tokenizer={gpt2_folder()}"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "" and captured.out.count("\n") == 1
    sidecar = read_sidecar(Path("x.bin"))
    assert captured.out.startswith(f"x.bin: {sidecar.tokens:,} tokens of uint16")
    size = len("".join(DOCUMENTS).encode()) + len(TEXT)
    assert f"{size:,} bytes of text, {size / sidecar.tokens:.3f} bytes/token" in captured.out
    assert (sidecar.dtype, sidecar.vocab_size, sidecar.text_bytes) == ("uint16", 50257, size)
    assert files() == {"x.bin", "x.bin.json"}
    ids = np.fromfile("x.bin", "<u2")
    assert len(ids) == sidecar.tokens and sidecar.checked["largest_id"] == ids.max() == 50256
    sources = subprocess.run("cat a.jsonl b.txt | sha256sum", shell=True, capture_output=True, text=True, check=True)
    assert sidecar.source_sha256 == sources.stdout.split()[0]


def test_texts_come_back():
    tokenizer = load_tokenizer(str(gpt2_folder()))
    assert prepare.main(["a.jsonl", "b.txt", "--out=x.bin", f"--tokenizer={gpt2_folder()}"]) == 0
    text = tokenizer.decode(np.fromfile("x.bin", "<u2").tolist())
    assert text.split("<|endoftext|>") == [*DOCUMENTS, TEXT]
    assert prepare.main(["b.txt", "a.jsonl", "--out=y.bin"]) == 0
    assert Path("y.bin").read_bytes() == "\n".join([TEXT, *DOCUMENTS]).encode()


@pytest.mark.parametrize("name", ["a.jsonl", "b.txt"])
@pytest.mark.parametrize("tokenizer", ["bytes", str(gpt2_folder())])
def test_the_trainer_reads_from_a_text_what_prepare_wrote(name, tokenizer, monkeypatch):
    config = {"sequence_length": 4, "validation_fraction": 0.5}
    assert prepare.main([name, "--out=data/x.bin", f"--tokenizer={tokenizer}"]) == 2  # there is no such folder
    Path("data").mkdir()
    assert prepare.main([name, "--out=data/x.bin", f"--tokenizer={tokenizer}"]) == 0
    monkeypatch.setattr(token_file, "_largest", None)  # prepare has compared the ids
    prepared = load_corpus(DataConfig(path="data/x.bin", **config))
    on_the_fly = load_corpus(DataConfig(path=name, tokenizer=tokenizer, **config))
    np.testing.assert_array_equal(prepared.train, on_the_fly.train)
    np.testing.assert_array_equal(prepared.validation, on_the_fly.validation)
    assert prepared.tokenizer.digest == on_the_fly.tokenizer.digest
    assert prepared.sources[0].bytes_per_token == on_the_fly.sources[0].bytes_per_token


def test_a_moved_folder_of_data_and_tokenizer_still_goes_together(folder):
    Path("set").mkdir()
    load_tokenizer(str(gpt2_folder()))._tokenizer.save("set/tokenizer.json")
    assert prepare.main(["b.txt", "--out=set/x.bin", "--tokenizer=set/tokenizer.json"]) == 0
    assert read_sidecar(Path("set/x.bin")).tokenizer == "tokenizer.json"
    config = {"sequence_length": 4, "validation_fraction": 0.5}
    digest = load_corpus(DataConfig(path="set/x.bin", **config)).digest
    Path("set").rename("moved")
    assert load_corpus(DataConfig(path="moved/x.bin", **config)).digest == digest


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ([], "name at least one text or .jsonl file"),
        (["b.txt"], "--out must name a file that ends in .bin, got ''"),
        (["b.txt", "--out=x.txt"], "got 'x.txt'"),
        (["none.txt", "--out=x.bin"], "cannot read none.txt: there is no such file"),
        ([".", "--out=x.bin"], "cannot read .: it is a folder"),
        (["b.bin", "--out=x.bin"], "b.bin holds token ids already"),
        (["b.txt.gz", "--out=x.bin"], "b.txt.gz is not text"),
        (["b.txt", "--out=no/x.bin"], "cannot write --out=no/x.bin: No such file"),
        (["b.txt", "--out=x.bin", "--tokenizer=none"], "cannot read the tokenizer none"),
        (["a.jsonl", "--out=x.bin", "--text-field=body"], "a.jsonl, line 1 has no field 'body' (its fields: text)"),
        (["b.txt", "--out=x.bin", "--frce"], "there is no option --frce; did you mean --force?"),
        (["/dev/null", "--out=x.bin"], "there is no text in /dev/null"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(argv, part, capsys):
    assert prepare.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("python -m experiments.prepare: error: ") and part in captured.err
    assert files() == set()


def test_what_is_there_is_replaced_only_by_force(capsys):
    assert prepare.main(["b.txt", "--out=x.bin"]) == 0
    assert prepare.main(["a.jsonl", "--out=x.bin"]) == 2
    assert "x.bin exists; --force replaces it" in capsys.readouterr().err
    assert Path("x.bin").read_text() == TEXT
    assert prepare.main(["a.jsonl", "--out=x.bin", "--force"]) == 0
    assert Path("x.bin").read_text() == "\n".join(DOCUMENTS)


def test_a_broken_input_leaves_what_was_there(capsys):
    assert prepare.main(["b.txt", "--out=x.bin"]) == 0
    before = {name: Path(name).read_bytes() for name in files()}
    Path("c.jsonl").write_text('{"text": "fine"}\n' * 99 + "broken\n")
    assert prepare.main(["b.txt", "c.jsonl", "--out=x.bin", "--force"]) == 2
    assert "c.jsonl, line 100 is not JSON" in capsys.readouterr().err
    assert {name: Path(name).read_bytes() for name in files() - {"c.jsonl"}} == before


@pytest.mark.parametrize("limit", [99, 200])  # the ids, or the sidecar alone, are longer
def test_a_disk_that_takes_no_more_is_one_line(limit, capsys):
    Path("b.txt").write_text(TEXT[:100])
    with file_size_limit(limit):
        assert prepare.main(["b.txt", "--out=x.bin"]) == 2
    captured = capsys.readouterr()
    assert "cannot write --out=x.bin: File too large" in captured.err and captured.err.count("\n") == 1
    assert files() == set()


@contextlib.contextmanager
def file_size_limit(size: int):
    """Let this process write no longer files."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_second_process_does_not_write_into_the_first_ones_file(capsys):
    with prepare._locked(Path(".x.bin.tmp"), Path("x.bin")):
        assert prepare.main(["b.txt", "--out=x.bin"]) == 2
    assert "another process is writing x.bin" in capsys.readouterr().err
    assert prepare.main(["b.txt", "--out=x.bin"]) == 0


ROOT = Path(__file__).parent.parent


def start(*argv: str, code: str = "") -> subprocess.Popen:
    code = f"import sys\nfrom experiments import prepare, token_file\n{code}\nsys.exit(prepare.main(sys.argv[1:]))"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", code, *argv], env=environment)


def test_a_kill_while_it_reads_leaves_what_was_there():
    assert prepare.main(["b.txt", "--out=x.bin"]) == 0
    before = {name: Path(name).read_bytes() for name in files()}
    os.mkfifo("pipe.jsonl")
    with start("pipe.jsonl", "--out=x.bin", "--force") as process, open("pipe.jsonl", "w") as pipe:
        for _ in range(300):
            pipe.write(json.dumps({"text": "x" * 10_000}) + "\n")
        pipe.flush()
        deadline = time.monotonic() + 60
        while not (Path(".x.bin.tmp").exists() and Path(".x.bin.tmp").stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert process.poll() is None and Path(".x.bin.tmp").stat().st_size > 0
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert {name: Path(name).read_bytes() for name in files() - {"pipe.jsonl", ".x.bin.tmp"}} == before
    # What the kill left is used by the next one.
    assert prepare.main(["a.jsonl", "--out=x.bin", "--force"]) == 0
    assert Path("x.bin").read_text() == "\n".join(DOCUMENTS) and ".x.bin.tmp" not in files()


def test_a_kill_between_the_two_files_leaves_no_sidecar_of_another_file():
    assert prepare.main(["b.txt", "--out=x.bin"]) == 0
    code = (
        "import os, signal\n"
        "replace = os.replace\n"
        "def replace_and_die(source, target):\n"
        "    replace(source, target)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "os.replace = replace_and_die\n"
    )
    with start("a.jsonl", "--out=x.bin", "--force", code=code) as process:
        pass
    assert process.returncode == -signal.SIGKILL
    assert Path("x.bin").read_text() == "\n".join(DOCUMENTS)
    with pytest.raises(ConfigError, match=r"cannot read x\.bin\.json"):
        load_corpus(DataConfig(path="x.bin"))


@pytest.mark.slow
def test_the_trainer_learns_from_a_prepared_file(folder, capsys):
    Path("long.txt").write_text("The quick brown fox jumps over the lazy dog. \n" * 400)
    assert prepare.main(["long.txt", "--out=x.bin", f"--tokenizer={gpt2_folder()}"]) == 0
    argv = ["--recipe=tiny", "--compression=none", "--set=model.num_layers=1", "--set=model.hidden_size=32"]
    argv += ["--set=parallel.num_microbatches=1", "--set=parallel.remat=false", "--set=data.batch_size=4"]
    argv += ["--set=sample_length=8", "--set=eval_every=9", "--set=eval_batches=1", "--steps=4"]
    assert train.main([*argv, "--data=x.bin", f"--out={folder}/run"]) == 0
    out = capsys.readouterr().out
    assert "training tokens 0..4,559" in out and "50,257 ids" in out
    assert "sample: " in out and " bits/byte at " in out and " nats/token (" in out
    losses = [values["loss"] for values in read_metrics(Path("run/metrics.jsonl"))]
    assert losses[0] == pytest.approx(np.log(50257), abs=0.2)  # M6: not that of the padded 50,304
    assert losses[-1] < losses[0] - 0.1
    assert json.loads(Path("run/config.json").read_text())["model"]["vocab_size"] == 50257
