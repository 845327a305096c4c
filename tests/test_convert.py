"""Conversions by the program itself, of files as they lie on the disk."""

import dataclasses
import filecmp
import json
import os
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from conversions import (
    CARRIED,
    assert_same_folder,
    assert_same_tensors,
    copied,
    refusal,
    rewrite,
    run,
    saved_run,
)
from safetensors.numpy import load_file, save_file

from experiments import same_logits, streaming
from experiments.checkpoint import Checkpoints
from experiments.checksum import checksums, region_checksum
from experiments.config import CheckpointConfig, DataConfig
from experiments.saved import read_config
from experiments.tensor_files import TensorInfo, parse_size, shard
from taco_jax.models import huggingface, huggingface_config
from taco_jax.models.config import ModelConfig
from taco_jax.models.families import abstract_parameters

NAMES = ("gpt2-tiny", "qwen2-tiny", "qwen2-tied-tiny", "qwen3-tiny")

pytestmark = pytest.mark.usefixtures("quickly_compiled")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


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
    masks = {f"h.{layer}.attn.bias": np.tril(np.ones((1, 1, 32, 32), bool)) for layer in range(4)}
    masks["h.0.attn.masked_bias"] = np.array(-1e4, np.float32)
    save_file(tensors | masks, "hf/model.safetensors")
    run("hf", "ours")
    assert "left out 5 constants that are no parameters, such as h." in capsys.readouterr().out
    run("ours", "back")
    assert_same_tensors(load_file("back/model.safetensors"), tensors)
    tensors["lm_head.weight"] = tensors["wte.weight"] + np.float32(1e-6)
    save_file(tensors, "hf/model.safetensors")
    capsys.readouterr()
    assert "hf: lm_head.weight differs from the token table" in refusal(capsys, "hf", "other")


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
