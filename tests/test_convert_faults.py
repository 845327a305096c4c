"""What a conversion refuses or survives, and the memory that it takes."""

import filecmp
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from conversions import copied, refusal, rewrite, run, saved_run
from safetensors.numpy import load_file, save_file

from experiments import convert, exchange
from taco_jax.models import huggingface, huggingface_config
from taco_jax.models.config import ModelConfig


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def damage(path: Path, how: str) -> None:
    """Damage the largest data file of a checkpoint, or its position."""
    if how == "position":
        text = path.joinpath("position/metadata").read_text()
        path.joinpath("position/metadata").write_text(text.replace('"step": ', '"step": 1', 1))
        return
    file = max((f for f in path.rglob("d/*") if f.is_file()), key=lambda f: f.stat().st_size)
    content = bytearray(file.read_bytes())
    if how == "truncated":
        content = content[: len(content) // 2]
    else:
        content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("how", ["truncated", "flipped", "position"])
def test_a_damaged_checkpoint_is_refused(how, capsys):
    copied("qwen3-tiny", "hf")
    run("hf", "ours")
    damage(Path("ours/checkpoints/0"), how)
    capsys.readouterr()
    message = refusal(capsys, "ours", "back")
    assert message.startswith("checkpoint ours/checkpoints/0 ")


def test_other_values_in_a_checkpoint_are_noticed(capsys, monkeypatch):
    """As a flipped bit that decompression lets through."""
    copied("qwen3-tiny", "hf")
    read = exchange._read_block
    monkeypatch.setattr(exchange, "_read_block", lambda *a: read(*a) + (a[1].pieces[0].path == "norm/scale"))
    sums = exchange._checksum_of
    monkeypatch.setattr(exchange, "_checksum_of", lambda *a: sums(*a) ^ (a[1].path == "norm/scale"))
    run("hf", "ours")
    capsys.readouterr()
    message = refusal(capsys, "ours", "back")
    assert message == (
        "checkpoint ours/checkpoints/0 is damaged: norm/scale has other bytes than were saved; --step names another"
    )


def test_refusals(capsys, monkeypatch):
    copied("qwen2-tiny", "hf")
    run("hf", "ours")
    saved_run("run", ModelConfig(2, 24, 6, vocab_size=30), shards=1, steps=(3, 6))
    Path("file").write_text("")
    capsys.readouterr()
    for argv, message in (
        (["hf"], "name a folder to read and a folder to write: IN OUT"),
        (["hf", "ours"], "ours exists; choose another OUT or remove it"),
        (["hf", "a/b"], "cannot write a/b: there is no folder a"),
        (["none", "x"], "there is no folder none"),
        (["file", "x"], "there is no folder file"),
        ([".", "x"], ". is neither Hugging Face's (config.json with a model_type, model.safetensors or "),
        (["hf", "x", "--dtype=bfloat16"], "--dtype is for writing a Hugging Face folder; hf is one to read"),
        (["hf", "x", "--step=0"], "--step is for writing a Hugging Face folder"),
        (["ours", "x", "--dtype=float8"], "--dtype must be one of float32, float16, bfloat16, got 'float8'"),
        (["ours", "x", "--shard-size=5"], "a size is a number with MB, GB, MiB or GiB, such as 5GB; got '5'"),
        (["run", "x", "--step=4"], "there is no checkpoint of step 4 in run/checkpoints; there are: 3, 6"),
        (["run/checkpoints/3", "x", "--step=3"], "run/checkpoints/3 names a checkpoint already; leave out --step"),
        (["ours", "x", "--chek"], "there is no option --chek; did you mean --check?"),
    ):
        assert message in refusal(capsys, *argv)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    assert refusal(capsys, "hf", "x") == "OUT takes 0.3 MiB, 0.0 MiB are free"
    assert refusal(capsys, "ours", "x") == "OUT takes 0.3 MiB, 0.0 MiB are free"


def test_refusals_of_hugging_face_folders(capsys):
    copied("qwen2-tiny", "hf")
    weights, config = Path("hf/model.safetensors"), Path("hf/config.json")
    tensors, text = load_file(weights), config.read_text()
    rewrite(config, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    assert refusal(capsys, "hf", "x") == (
        "hf: config.json of a qwen2: rope_scaling is of type 'yarn'; we compute 'default'"
    )
    rewrite(config, rope_scaling=None, intermediate_size=80)
    assert refusal(capsys, "hf", "x").startswith(
        "hf: 12 tensors have other shapes than config.json says: model.layers.0"
    )
    config.write_text(text)
    save_file({k: t for k, t in tensors.items() if "q_proj.bias" not in k}, weights)
    assert refusal(capsys, "hf", "x") == (
        "hf: 4 of 51 tensors of this qwen2 are missing: model.layers.0.self_attn.q_proj.bias, "
        "model.layers.1.self_attn.q_proj.bias, model.layers.2.self_attn.q_proj.bias and 1 more"
    )
    save_file(tensors | {"score.weight": np.zeros(3, np.float32)}, weights)
    assert refusal(capsys, "hf", "x") == "hf: 1 tensors are no part of this qwen2: score.weight"
    save_file(tensors | {"model.norm.weight": np.zeros(48, np.int8)}, weights)
    assert refusal(capsys, "hf", "x") == ("model.norm.weight in hf has the type I8; we read F32, F16, BF16 weights")
    save_file(tensors, weights)
    with weights.open("r+b") as file:
        file.truncate(100_000)
    assert refusal(capsys, "hf", "x").startswith("cannot read hf/model.safetensors: ")
    weights.rename("hf/pytorch_model.bin")
    assert refusal(capsys, "hf", "x") == (
        "hf has neither model.safetensors nor model.safetensors.index.json; pytorch_model.bin is not read"
    )
    index = Path("hf/model.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model-00001-of-00002.safetensors")}))
    assert refusal(capsys, "hf", "x") == (
        "there is no hf/model-00001-of-00002.safetensors, which model.safetensors.index.json lists"
    )
    index.write_text(json.dumps({"weight_map": {"a": "../file"}}))
    assert refusal(capsys, "hf", "x") == f"cannot read {index}: it names files outside the folder"
    config.write_text("{")
    assert refusal(capsys, "hf", "x").startswith("cannot read hf/config.json: ")


def test_what_a_type_cannot_hold_is_refused(capsys):
    copied("qwen2-tiny", "hf")
    tensors = load_file("hf/model.safetensors")
    tensors["model.norm.weight"][3] = 7e4
    save_file(tensors, "hf/model.safetensors")
    run("hf", "ours")
    capsys.readouterr()
    assert refusal(capsys, "ours", "x", "--dtype=float16") == (
        "model.norm.weight has values up to 70000, more than float16 holds; choose another --dtype"
    )
    run("ours", "x", "--dtype=bfloat16")


def test_an_interruption_leaves_nothing(capsys, monkeypatch):
    copied("qwen2-tiny", "hf")

    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(exchange, "region_checksum", interrupt)
    assert convert.main(["hf", "ours"]) == 130
    assert capsys.readouterr().err == "python -m experiments.convert: interrupted; nothing was written\n"
    assert os.listdir() == ["hf"]


def test_an_interruption_while_the_checkpoint_is_written_leaves_nothing(capsys, monkeypatch):
    copied("qwen2-tiny", "hf")
    read, writing = exchange._read_block, []

    def interrupting(*arguments):
        if threading.current_thread() is not threading.main_thread():
            writing.append(len(writing))
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
        return read(*arguments)

    monkeypatch.setattr(exchange, "_read_block", interrupting)
    assert convert.main(["hf", "ours"]) == 130
    assert capsys.readouterr().err == "python -m experiments.convert: interrupted; nothing was written\n"
    assert os.listdir() == ["hf"] and len(writing) < 3


def test_a_full_disk_is_one_line(capsys, small_disk):
    copied("qwen2-tiny", "hf")
    run("hf", "ours")
    disk = small_disk("4m", 12)  # room for the bytes, not for the files
    capsys.readouterr()
    message = refusal(capsys, "hf", f"{disk}/ours")
    assert message == "the checkpoint could not be written: No space left on device"
    for number in range(9):
        (disk / f"ballast{number}").touch()
    assert refusal(capsys, "ours", f"{disk}/back") == f"cannot read or write {disk}/back: No space left on device"
    assert len(os.listdir(disk)) == 9


def resident(process: subprocess.Popen) -> float:
    """Return the largest anonymous memory of a process until it ends, in MiB."""
    peak = 0.0
    while process.poll() is None:
        try:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        except OSError:
            break
        peak = max([peak, *(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))])
        time.sleep(0.002)
    assert process.wait(timeout=60) == 0
    return peak


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_memory_does_not_grow_with_the_model():
    """224 MiB in float32, layer stacks of up to 96 MiB: six blocks of 16 MiB beside the program suffice both ways."""
    model = ModelConfig(
        16,
        512,
        8,
        family="qwen",
        num_kv_heads=4,
        intermediate_size=1536,
        vocab_size=8192,
        max_positions=64,
        tie_embeddings=False,
        qkv_bias=True,
    ).resolved()
    shapes = huggingface.tensor_shapes(model, huggingface.default_naming(model))
    bits = np.random.default_rng(0).integers(0, 2**14, max(map(np.prod, shapes.values())), np.uint16)
    tensors = {name: bits[: np.prod(shape)].reshape(shape).view(ml_dtypes.bfloat16) for name, shape in shapes.items()}
    assert sum(t.size for t in tensors.values()) * 4 > 224 * 2**20
    Path("hf").mkdir()
    save_file(tensors, "hf/model.safetensors", metadata={"format": "pt"})
    Path("hf/config.json").write_text(json.dumps(huggingface_config.write_config(model, dtype="bfloat16")))
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parent.parent)}
    peaks = {}
    for argv in (["--help"], ["hf", "ours"], ["ours", "back"]):
        command = [sys.executable, "-m", "experiments.convert", *argv]
        peaks[argv[-1]] = resident(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
    assert filecmp.cmp("hf/model.safetensors", "back/model.safetensors", shallow=False)
    assert max(peaks["ours"], peaks["back"]) - peaks["--help"] < 96, peaks
