"""Conversions by the program itself, of files as they lie on the disk."""

import dataclasses
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

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from experiments import convert, exchange, same_logits, streaming
from experiments.checkpoint import Checkpoints, Position
from experiments.checksum import checksums, region_checksum
from experiments.cli import config_json
from experiments.config import CheckpointConfig, DataConfig, TrainConfig
from experiments.saved import read_config
from experiments.tensor_files import TensorInfo, parse_size, shard
from taco_jax.models import huggingface, huggingface_config
from taco_jax.models.config import ModelConfig
from taco_jax.models.families import abstract_parameters

GOLDEN = Path(__file__).parent / "golden"
NAMES = ("gpt2-tiny", "qwen2-tiny", "qwen2-tied-tiny", "qwen3-tiny")
CARRIED = ("tokenizer.json", "merges.txt", "generation_config.json")

pytestmark = pytest.mark.usefixtures("quickly_compiled")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def copied(name: str, to: str) -> Path:
    """Copy a golden folder without its expected results, tokenizer files beside it."""
    shutil.copytree(GOLDEN / name, to, ignore=shutil.ignore_patterns("expected*"))
    for file in CARRIED[:2]:
        Path(to, file).write_text(f"{file} of {name}")
    return Path(to)


def rewrite(path: Path, **changes) -> dict:
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps(content, indent=2) + "\n")
    return content


def assert_same_folder(found: str, want: str) -> None:
    names = sorted(os.listdir(want))
    assert sorted(os.listdir(found)) == names
    assert filecmp.cmpfiles(found, want, names, shallow=False) == (names, [], [])


def assert_same_tensors(found: dict, want: dict) -> None:
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert found[name].tobytes() == tensor.tobytes(), name


def run(*argv: str) -> None:
    assert convert.main(list(argv)) == 0


def refusal(capsys, *argv: str) -> str:
    """Return the one line with which a command is refused; nothing is left behind."""
    before = sorted(os.listdir())
    assert convert.main(list(argv)) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert sorted(os.listdir()) == before
    return captured.err.removeprefix("python -m experiments.convert: error: ").strip()


def restored(folder: str, shards: int) -> dict:
    """Return the parameters that a run of `shards` devices per layer begins with."""
    model = read_config(Path(folder)).model
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target, unpadded = ({"params": abstract_parameters(model, shards=n)} for n in (shards, 0))
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), target)
    with Checkpoints(Path(folder, "checkpoints"), CheckpointConfig()) as checkpoints:
        return checkpoints.restore_parts(target, unpadded=unpadded)[0]["params"]


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_comes_back_byte_by_byte(name, capsys):
    copied(name, "hf")
    run("hf", "ours")
    assert capsys.readouterr().out.startswith(f"ours: {name.split('-')[0]} of ")
    run("ours", "back")
    assert_same_folder("back", "hf")
    assert sorted(os.listdir("ours")) == sorted(["checkpoints", "config.json", "huggingface.json", *CARRIED])
    model = huggingface_config.read_config(json.loads(Path("hf/config.json").read_text()))
    assert read_config(Path("ours")).model == model
    # What the trainer restores, with the padding of its mesh.
    parameters = restored("ours", shards=3)
    assert_same_tensors(dict(huggingface.to_tensors(model, parameters)), load_file("hf/model.safetensors"))


def test_sharded_files_come_back_as_they_were():
    copied("qwen2-tiny", "hf")
    run("hf", "ours")
    run("ours", "parts", "--shard-size=100KB")
    index = json.loads(Path("parts/model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) == 4 and all(Path("parts", file).stat().st_size < 110_000 for file in files)
    tensors = load_file("hf/model.safetensors")
    parts = {file: load_file(Path("parts", file)) for file in files}
    assert {name: file for file in files for name in parts[file]} == index["weight_map"]
    assert_same_tensors({k: v for file in parts.values() for k, v in file.items()}, tensors)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    rewrite(Path("parts/model.safetensors.index.json"), metadata={"total_parameters": 1, "total_size": 7})
    run("parts", "again")
    run("again", "back")
    assert_same_folder("back", "parts")


def test_types_of_sixteen_bits_come_back_exactly(capsys):
    copied("qwen3-tiny", "hf")
    tensors = load_file("hf/model.safetensors")
    half = {
        name: t.astype(ml_dtypes.bfloat16 if "proj" in name else np.float16 if "norm" in name else np.float32)
        for name, t in tensors.items()
    }
    save_file(half, "hf/model.safetensors", metadata={"format": "pt"})
    rewrite(Path("hf/config.json"), dtype="bfloat16")
    run("hf", "ours")
    run("ours", "back")
    assert_same_folder("back", "hf")
    assert "bfloat16 and float16 and float32" in capsys.readouterr().out
    run("ours", "wide", "--dtype=float32")
    assert_same_tensors(load_file("wide/model.safetensors"), {k: v.astype(np.float32) for k, v in half.items()})
    assert json.loads(Path("wide/config.json").read_text())["dtype"] == "float32"


def test_names_of_the_hubs_gpt2(capsys):
    """No prefix, causal masks among the tensors, a table that stands there twice."""
    copied("gpt2-tiny", "hf")
    tensors = {name.removeprefix("transformer."): t for name, t in load_file("hf/model.safetensors").items()}
    tensors["lm_head.weight"] = tensors["wte.weight"]
    masks = {f"h.{layer}.attn.bias": np.tril(np.ones((1, 1, 32, 32), np.float32)) for layer in range(4)}
    save_file(tensors | masks, "hf/model.safetensors")
    run("hf", "ours")
    assert "left out 4 constants that are no parameters, such as h.0.attn.bias\n" in capsys.readouterr().out
    run("ours", "back")
    assert_same_tensors(load_file("back/model.safetensors"), tensors)
    tensors["lm_head.weight"] = tensors["wte.weight"] + np.float32(1e-6)
    save_file(tensors, "hf/model.safetensors")
    capsys.readouterr()
    assert "hf: lm_head.weight differs from the token table" in refusal(capsys, "hf", "other")


def saved_run(folder: str, model: ModelConfig, shards: int, steps=(3,), **changes) -> dict:
    """Write what a run leaves, its parameters padded for `shards` devices per layer; return them unpadded."""
    config = TrainConfig(model=model, **{"data": DataConfig(sequence_length=24), **changes})
    resolved = dataclasses.replace(model, max_positions=model.max_positions or 24).resolved()
    Path(folder).mkdir()
    Path(folder, "config.json").write_text(config_json(config))
    stored, unpadded = (abstract_parameters(resolved, shards=n) for n in (shards, 0))
    with Checkpoints(Path(folder, "checkpoints"), CheckpointConfig()) as checkpoints:
        for step in steps:
            rng = np.random.default_rng(step)
            logical = jax.tree.map(lambda x, r=rng: r.normal(size=x.shape).astype(np.float32), unpadded)
            full = jax.tree.map(
                lambda x, s: jax.numpy.pad(x, [(0, n - m) for m, n in zip(x.shape, s.shape, strict=True)]),
                logical,
                stored,
            )
            state = {"params": full, "opt_state": {"mu": jax.numpy.ones(3)}}
            position = Position(step, dataclasses.asdict(config), "digest")
            checkpoints.save(position, state, {"params": unpadded, "opt_state": state["opt_state"]})
    return logical


@pytest.mark.parametrize("family", ["gpt", "qwen"])
def test_a_run_from_random_parameters_is_written(family):
    """Its arrays padded for a mesh, its longest sequence and vocabulary those of its data."""
    fields = dict(family="qwen", num_kv_heads=2, qk_norm=True) if family == "qwen" else {}
    model = ModelConfig(3, 24, 6, head_dim=4, intermediate_size=50, vocab_size=130, **fields)
    parameters = saved_run("run", model, shards=4, steps=(3, 6))
    run("run", "hf")
    config = huggingface_config.read_config(json.loads(Path("hf/config.json").read_text()))
    assert (config.max_positions, config.vocab_size, config.intermediate_size) == (24, 130, 50)
    assert_same_tensors(load_file("hf/model.safetensors"), dict(huggingface.to_tensors(config, parameters)))
    run("run", "three", "--step=3", "--dtype=bfloat16")
    assert json.loads(Path("three/config.json").read_text())["torch_dtype"] == "bfloat16"
    older = load_file("three/model.safetensors")
    assert {t.dtype.name for t in older.values()} == {"bfloat16"}
    run("run/checkpoints/3", "other")
    want = {name: t.astype(ml_dtypes.bfloat16) for name, t in load_file("other/model.safetensors").items()}
    assert_same_tensors(older, want)


def test_a_run_that_began_with_a_model_keeps_its_names(capsys):
    copied("qwen2-tied-tiny", "hf")
    tensors = load_file("hf/model.safetensors")
    save_file({name: t.astype(ml_dtypes.bfloat16) for name, t in tensors.items()}, "hf/model.safetensors")
    run("hf", "ours")
    model = dataclasses.replace(read_config(Path("ours")).model, max_positions=24)
    data = DataConfig(sequence_length=24, tokenizer="ours")
    parameters = saved_run("run", model, shards=2, init_from="ours", data=data)
    shutil.copy("ours/huggingface.json", "run")
    run("run", "back")
    names = ["config.json", *CARRIED]
    assert sorted(os.listdir("back")) == sorted([*names, "model.safetensors"])
    assert filecmp.cmpfiles("back", "hf", names, shallow=False) == (names, [], [])
    want = {k: t.astype(ml_dtypes.bfloat16) for k, t in huggingface.to_tensors(model, parameters)}
    assert_same_tensors(load_file("back/model.safetensors"), want)
    # The copy in the run is what counts; without it the folder that the run began with.
    Path("run/huggingface.json").unlink()
    run("run", "back2")
    assert_same_folder("back2", "back")
    capsys.readouterr()
    saved_run("changed", dataclasses.replace(model, rope_theta=5e3), shards=2, init_from="ours")
    run("changed", "back3")
    assert "another than that of ours/huggingface.json in rope_theta: config.json is written anew" in (
        capsys.readouterr().out
    )
    assert huggingface_config.read_config(json.loads(Path("back3/config.json").read_text())).rope_theta == 5e3
    shutil.rmtree("ours")
    run("run", "back4")
    assert "ours, which the run began with, is not there: config.json is written anew" in capsys.readouterr().out


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


def test_check_compares_logits(capsys, monkeypatch):
    copied("qwen3-tiny", "hf")
    run("hf", "ours", "--check")
    assert "largest difference of the logits of IN and OUT: 0 (largest logit 2.9" in capsys.readouterr().out
    run("ours", "back", "--check", "--dtype=bfloat16")
    assert "largest difference of the logits of IN and OUT: 0.0" in capsys.readouterr().out
    read = same_logits._huggingface_parameters

    def slightly_different(*arguments):
        parameters = read(*arguments)
        parameters["layers"]["attention"]["q_norm"]["scale"][2, 5] *= 1.01
        return parameters

    monkeypatch.setattr(same_logits, "_huggingface_parameters", slightly_different)
    assert refusal(capsys, "hf", "x", "--check").startswith("OUT is not what IN is: largest difference of the logits")
    assert refusal(capsys, "ours", "x", "--check").startswith("OUT is not what IN is: largest difference of the logits")


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


@pytest.mark.parametrize("shape", [(7,), (5, 6), (3, 4, 2, 5)])
def test_checksums_of_regions_sum_up(shape):
    rng = np.random.default_rng(0)
    for dtype in (np.float32, ml_dtypes.bfloat16, np.uint8):
        x = (100 * rng.normal(size=shape)).astype(dtype)
        cut = tuple(size // 2 for size in shape)
        total = 0
        for corner in np.ndindex(*(2,) * x.ndim):
            region = tuple(slice(c, None) if side else slice(0, c) for side, c in zip(corner, cut, strict=True))
            total += region_checksum(x[region], [s.start for s in region], shape)
        assert total % 2**32 == int(checksums([x])[0])


def test_blocks_are_chunks_of_the_file():
    """Layers together if they are small, parts of a matrix if it is large; each region once."""
    config = ModelConfig(
        6, 24, 6, family="qwen", num_kv_heads=2, qkv_bias=True, vocab_size=100, max_positions=8, intermediate_size=40
    ).resolved()
    naming = huggingface.default_naming(config)
    shapes = huggingface.leaf_shapes(config)
    for block_bytes in (100, 1000, 10_000, 10**6):
        leaves = streaming.plan(huggingface.pieces(config, naming), shapes, block_bytes)
        assert [leaf.path for leaf in leaves] == list(shapes)
        for leaf in leaves:
            count = np.zeros(leaf.shape, int)
            chunk = leaf.blocks[0].shape
            for block in leaf.blocks:
                count[block.region] += 1
                assert all(start % size == 0 for start, size in zip(block.start, chunk, strict=True))
                rows = max(np.prod(piece.shape[1:], dtype=int) for piece in block.pieces)
                assert 4 * np.prod(block.shape) <= max(block_bytes, 4 * rows)
            assert (count == 1).all()


def test_sizes_and_shards():
    assert [parse_size(text) for text in ("5GB", "1.5 kib", "7B")] == [5 * 10**9, 1536, 7]
    layout = shard({name: TensorInfo("BF16", (5,)) for name in "abcde"}, 25)
    assert [list(file) for file in layout.files.values()] == [["a", "b"], ["c", "d"], ["e"]]
    assert list(shard({"a": TensorInfo("F32", (100,))}, 25).files) == ["model.safetensors"]


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


@pytest.mark.parametrize("name", [*NAMES, "trained"])
def test_transformers_computes_the_same_logits(name):
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    if name == "trained":
        saved_run("ours", ModelConfig(3, 24, 6, intermediate_size=50, vocab_size=130), shards=4)
    else:
        copied(name, "hf")
        run("hf", "ours")
    run("ours", "back", "--check")  # compares them, to 1e-3 of the largest
