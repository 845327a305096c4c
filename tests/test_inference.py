"""generate and evaluate on a run of the trainer, each mesh against another and against plain NumPy."""

import dataclasses
import json
import math
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments import evaluate, generate
from experiments.checkpoint import Checkpoints, Position
from experiments.config import CheckpointConfig, TrainConfig
from experiments.inference import load_model

PROMPT = "In the beginning God"


@pytest.fixture(scope="module")
def without_scales(uninterrupted, tmp_path_factory):
    """The parameters of the run alone, as a converted model has them."""
    folder = tmp_path_factory.mktemp("parameters")
    model = load_model(uninterrupted)
    saved = json.loads((uninterrupted / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(saved))
    with Checkpoints(folder / "checkpoints", CheckpointConfig()) as checkpoints:
        unpadded = {"params": model.program.unpadded_state["params"]}
        checkpoints.save(Position(0, saved, ""), {"params": model.state["params"]}, unpadded)
    return folder


def run(command, capsys, *argv):
    code = command.main([str(word) for word in argv])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured


def test_the_text_is_the_same_on_every_mesh(uninterrupted, capsys, compiled_once):
    options = (f"--prompt={PROMPT}", "--num-tokens=24", "--temperature=0", "--dtype=float32")
    one = run(generate, capsys, uninterrupted, *options)
    assert one.out.startswith(PROMPT) and len(one.out) > len(PROMPT) + 8
    assert "longer than the model's 32 positions" in one.err
    assert "step 6: gpt of 2 layers on dp1,pp1,tp1" in one.err and "ms per token (median of" in one.err
    assert run(generate, capsys, uninterrupted, *options, "--mesh=tp8").out == one.out
    ids = ",".join(map(str, PROMPT.encode()))
    numbered = run(generate, capsys, uninterrupted, f"--prompt-ids={ids}", *options[1:], "--mesh=pp2,tp2").out
    assert bytes(map(int, numbered.split(","))).decode(errors="replace") == one.out.removesuffix("\n")


def test_compressed_messages_are_counted(uninterrupted, without_scales, capsys, compiled_once):
    options = (f"--prompt={PROMPT}", "--num-tokens=3", "--mesh=tp2")
    found = run(generate, capsys, uninterrupted, *options, "--compression=taco", "--min-bytes=0")
    sent = re.findall(r"(\w+) of (\d+) positions sends ([\d,]+) bytes over tp, ([\d,]+) in bf16$", found.err, re.M)
    sizes = [[int(number.replace(",", "")) for number in numbers] for _, *numbers in sent]
    # Five sums of [positions, 64], two hops of half a message each, padded to 2 x 128. The draw adds a bit.
    for (positions, compressed, in_bf16), message in zip(sizes, (1536, 256), strict=True):
        assert positions == {1536: 23, 256: 1}[message]
        assert 5 * message <= compressed <= 5 * message + 16
        assert 5 * 2 * positions * 64 <= in_bf16 <= 5 * 2 * positions * 64 + 16
    found = run(generate, capsys, without_scales, *options, "--compression=int8", "--min-bytes=2000")
    assert "decode of 1 positions" in found.err and "all exact" in found.err
    found = run(generate, capsys, uninterrupted, *options[:2], "--compression=int8")
    assert "nothing is compressed: tp is 1" in found.err


@pytest.mark.parametrize("command", [generate, evaluate])
def test_compression_that_is_not_on_the_wire_is_a_failure(command, uninterrupted, capsys, compiled_once):
    options = ["--prompt=a"] if command is generate else ["--max-tokens=100"]
    argv = [str(uninterrupted), "--mesh=tp2", "--compression=int8", "--min-bytes=9999999", *options]
    assert command.main(argv) == 4
    assert (
        "--compression=int8 is not on the wire: every message is below --min-bytes=9999999" in capsys.readouterr().err
    )


def mean_loss(model, ids: np.ndarray, length: int) -> float:
    """Nats per token, window by window, from logits in float64."""
    total = 0.0
    for start in range(0, len(ids) - 1, length):
        window = ids[start : start + length + 1].astype(np.int32)
        logits = np.asarray(model.program.logits(model.state, window[None, :-1]), np.float64)[0]
        logits -= logits.max(-1, keepdims=True)
        total -= (logits - np.log(np.exp(logits).sum(-1, keepdims=True)))[np.arange(len(window) - 1), window[1:]].sum()
    return total / (len(ids) - 1)


def test_loss_of_a_file_counts_every_token_once(uninterrupted, capsys, tmp_path, compiled_once):
    """T1: 203 tokens in windows of 16, the last one of 10 and some rows empty."""
    text = ("The quick brown fox jumps over the lazy dog. " * 9)[:203]
    (tmp_path / "text.txt").write_text(text)
    model = load_model(uninterrupted, dtype="float32")
    want = mean_loss(model, np.frombuffer(text.encode(), np.uint8), 16)
    for mesh, batch_size in (("dp1", 3), ("dp2,pp2,tp2", 5)):
        found = run(
            evaluate, capsys, uninterrupted, f"--data={tmp_path}/text.txt", f"--mesh={mesh}", "--dtype=float32",
            "--sequence-length=16", f"--batch-size={batch_size}", f"--json={tmp_path}/figures.json",
        )  # fmt: skip
        figures = json.loads((tmp_path / "figures.json").read_text())
        assert figures["tokens"] == 202
        assert figures["loss"] == pytest.approx(want, rel=1e-5)
        assert figures["perplexity"] == pytest.approx(math.exp(want), rel=1e-4)
        assert figures["bits_per_byte"] == pytest.approx(want * 202 / math.log(2) / 203, rel=1e-5)
        assert f"loss {want:.4f} nats/byte, perplexity {math.exp(want):.3f}, 202 bytes of" in found.out


def test_windows_predict_every_id_but_the_first_once():
    ids = np.arange(24)
    batches = list(evaluate.windows(ids, 4, 2))
    assert [batch["tokens"].shape for batch in batches] == [(2, 4)] * 3
    mask = np.concatenate([batch["mask"].reshape(-1) for batch in batches]).astype(bool)
    tokens, targets = (np.concatenate([b[k].reshape(-1) for b in batches])[mask] for k in ("tokens", "targets"))
    np.testing.assert_array_equal(tokens, ids[:-1])
    np.testing.assert_array_equal(targets, ids[1:])


def test_a_compressed_evaluation_is_near_the_exact_one(uninterrupted, capsys, compiled_once):
    losses = []
    for options in (["--mesh=tp1"], ["--mesh=tp2", "--compression=taco", "--min-bytes=0"]):
        found = run(evaluate, capsys, uninterrupted, "--max-tokens=2000", *options)
        losses.append(float(found.out.split()[1]))
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=5e-3)


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ([], ["--prompt"]),
        (["--prompt=a", "--prompt-ids=1"], ["--prompt", "or as --prompt-ids"]),
        (["--prompt-ids=1,x"], ["numbers with commas, got '1,x'"]),
        (["--prompt-ids=1,300"], ["the ids 0 to 255, the prompt has 300"]),
        (["--prompt=a", "--num-tokens=0"], ["--num-tokens must be 1 or more, got 0"]),
        (["--prompt=a", "--temperature=-1"], ["--temperature must be 0 or more"]),
        (["--prompt=a", "--top-p=0"], ["--top-p must be above 0"]),
        (["--prompt=a", "--compression=int9"], ["--compression must be one of", "'int9'; did you mean int8?"]),
        (["--prompt=a", "--mesh=tp0"], ["tp must be 1 or more"]),
        (["--prompt=a", "--mesh=pp4"], ["pp=4 does not divide model.num_layers=2 (usable pp: 1, 2)"]),
        (["--prompt=a", "--step=5"], ["no checkpoint of step 5", "there are: 3, 6"]),
        (["--prompt=a", "--min-bytes=-1"], ["--min-bytes must be 0 or more, got -1"]),
        (["--prompt=a", "--tokenizer=/nowhere/x.json"], ["/nowhere/x.json"]),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, list) else None,
)
def test_a_mistake_is_one_line(uninterrupted, capsys, argv, parts):
    assert generate.main([str(uninterrupted), *argv]) == 2
    message = capsys.readouterr().err
    assert message.startswith("python -m experiments.generate: error: ") and message.count("\n") == 1
    for part in parts:
        assert part in message


def test_adaptive_scales_come_from_training(without_scales, capsys):
    argv = [str(without_scales), "--mesh=tp2", "--compression=taco", "--prompt=a"]
    assert generate.main(argv) == 2
    error = capsys.readouterr().err
    assert "--compression=taco needs the scales of a run trained with it" in error
    assert "(usable: taco_block, paper, fp8, int8, int6, int4, bf16, none)" in error


@pytest.mark.parametrize("command", [generate, evaluate])
def test_a_folder_without_a_model_is_a_mistake(command, tmp_path, capsys):
    options = ["--prompt=a"] if command is generate else []
    for folder in (tmp_path, Path("nowhere")):
        assert command.main([str(folder), *options]) == 2
        assert f"{folder} is no folder of a run or of experiments.convert" in capsys.readouterr().err


def test_a_checkpoint_of_a_run_can_be_named(uninterrupted):
    assert (load_model(uninterrupted).step, load_model(uninterrupted / "checkpoints" / "3").step) == (6, 3)
    state = load_model(uninterrupted, mesh="dp2,tp2").state
    first = load_model(uninterrupted).state
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), first["params"], state["params"]))
    assert dataclasses.asdict(TrainConfig()).keys() == json.loads((uninterrupted / "config.json").read_text()).keys()
