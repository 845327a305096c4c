import dataclasses
import json

import pytest

from experiments.checkpoint import Position, check_same_run
from experiments.cli import apply_settings, build_config, config_json, parse_arguments
from experiments.config import ConfigError, TrainConfig, flatten, validate
from experiments.data import load_corpus, with_model_sizes
from experiments.recipes import RECIPES
from taco_jax.models.presets import qwen3_tiny


def read(*argv: str) -> TrainConfig:
    config = build_config(parse_arguments(argv))
    validate(config)
    return config


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_are_valid_and_named(recipe):
    config = read(f"--recipe={recipe}")
    assert config.recipe == recipe
    # A continued run must follow the curve of an uninterrupted one.
    assert config.optimizer.decay_steps > 0


def test_flags_and_settings_override_the_recipe():
    config = read(
        "--recipe=tiny",
        "--mesh=dp2,tp2",
        "--steps=9",
        "--compression=none",
        "--seed=3",
        "--data=some.txt",
        "--set",
        "optimizer.learning_rate=1e-4",
        "--set=parallel.remat=false",
        "--set",
        "model.num_layers=3",
        "--set=dtype=float32",
        "--profile=2:9",
        "--peak-flops=989e12",
    )
    assert (config.mesh, config.steps, config.compression, config.seed) == ("dp2,tp2", 9, "none", 3)
    assert (config.optimizer.learning_rate, config.parallel.remat, config.model.num_layers) == (1e-4, False, 3)
    assert (config.data.path, config.dtype) == ("some.txt", "float32")
    assert (config.log.profile, config.log.peak_flops) == ("2:9", 989e12)


def test_config_json_holds_every_field():
    config = read("--recipe=small")
    assert flatten(json.loads(config_json(config))) == flatten(config)


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--mesh=dp3,pp5,tp7"], ["pp=5", "usable pp: 1, 2, 4", "dp=3", "usable: 60, 72"]),
        (["--mesh=tp0"], ["tp must be 1 or more", "got 0"]),
        (["--mesh=dp4pp4"], ["cannot read 'dp4pp4'", "dp4,pp4,tp8"]),
        (["--mesh=dp4,dp4"], ["names dp twice"]),
        (["--mesh=pp3", "--set", "model.num_layers=10"], ["pp=3", "model.num_layers=10", "usable pp: 1, 2, 5, 10"]),
        (["--mesh=pp4", "--set", "model.num_layers=30"], ["usable pp: 1, 2, 3, 5, 6, 10, 15, 30"]),
        (
            ["--set=model.num_heads=7"],
            ["model: hidden_size=128 is no multiple of num_heads=7 (usable num_heads: 1, 2, 4"],
        ),
        (["--mesh=dp2", "--set=data.batch_size=12"], ["data.batch_size=12", "nearest usable: 8, 16"]),
        (["--compression=tacco"], ["'tacco'", "did you mean taco?"]),
        (["--set=dtype=float64"], ["dtype must be one of bfloat16", "'float64'"]),
        (["--set=communication.implementation=trion"], ["did you mean triton?"]),
        (["--steps=0"], ["steps must be at least 1, got 0"]),
        (["--seed=-1"], ["seed must be from 0"]),
        (["--set=model.vocab_size=-1"], ["model: vocab_size must be 0 or more, got -1"]),
        (["--set=optimizer.learning_rate=nan"], ["learning_rate must be above 0 and finite, got nan"]),
        (["--set=data.validation_fraction=1"], ["validation_fraction must be between 0 and 1"]),
        (
            ["--set", "optimizer.learningrate=3"],
            ["no field 'optimizer.learningrate'; did you mean optimizer.learning_rate?"],
        ),
        (["--set", "model.num_layers=four"], ["model.num_layers needs a whole number, got 'four'"]),
        (["--set", "optimizer.b2=x"], ["optimizer.b2 needs a number, got 'x'"]),
        (["--set", "parallel.remat=no"], ["parallel.remat needs true or false, got 'no'"]),
        (["--set", "optimizer.b2"], ["write section.field=value"]),
        (["--set", "steps=3"], ["use --steps=3"]),
        (["--set=eval_every=1", "--set=eval_every=2"], ["eval_every is given twice"]),
        (["--steps=many"], ["--steps", "needs a whole number, got 'many'"]),
        (["--steps"], ["--steps"]),
        (["--stps=3"], ["no option --stps", "did you mean --steps?"]),
        (["stray"], ["stray"]),
        (["--profile=10"], ["--profile must be FIRST:STOP", "'10'"]),
        (["--steps=9", "--profile=8:11"], ["--profile=8:11 traces up to step 10, but the run has 9 steps"]),
        (["--peak-flops=989"], ["--peak-flops must be one device's FLOP/s, such as 989e12, got 989"]),
        (["--peak-flops=fast"], ["--peak-flops", "needs a number, got 'fast'"]),
        (["--set=log.peak_flops=1e12"], ["use --peak-flops=1e12"]),
        (["--set=log.replica_hash_every=-1"], ["log.replica_hash_every must be at least 0, got -1"]),
        (["--recipe=big"], ["'big'", "main, small, tiny"]),
        (["--model=qwen3-tini"], ["no model is called 'qwen3-tini'", "did you mean qwen3-tiny?"]),
        (["--set=model.qk_norm=true"], ["model: family gpt has no qk_norm"]),
        (
            ["--model=gpt2-124m", "--set=data.sequence_length=2048"],
            ["data.sequence_length=2048 is longer than model.max_positions=1024"],
        ),
        (["--init-from=nowhere"], ["nowhere is no folder of a run or of experiments.convert"]),
    ],
    ids=lambda value: " ".join(value) if value and value[0].startswith("--") else None,
)
def test_a_mistake_is_one_line_that_says_what_would_work(argv, parts):
    with pytest.raises(ConfigError) as caught:
        read(*argv)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_fewer_microbatches_than_stages_are_fine():
    validate(read("--mesh=pp4", "--set=parallel.num_microbatches=2"))


def test_the_rest_of_the_devices_is_not_a_mistake():
    validate(read("--mesh=dp-1,tp2"))


def position_of(config: TrainConfig, digest: str = "a") -> Position:
    return Position(3, json.loads(json.dumps(dataclasses.asdict(config))), digest)


def test_what_a_resumed_run_may_change(tmp_path):
    config = read("--recipe=tiny")
    other = apply_settings(
        dataclasses.replace(config, mesh="dp2,pp2,tp2", steps=99),
        [
            "eval_every=7",
            "parallel.remat=false",
            "checkpoint.every=1",
            "communication.chunks=2",
            "data.tokenizer=bytes",
            "log.tensorboard=true",
        ],
    )
    check_same_run(position_of(config), other, "a", tmp_path)


@pytest.mark.parametrize(
    "setting",
    ["model.num_layers=4", "model.vocab_size=300", "data.sequence_length=64", "optimizer.b2=0.9", "dtype=float32"],
)
def test_what_a_resumed_run_must_not_change(tmp_path, setting):  # K8
    config = read("--recipe=tiny")
    with pytest.raises(ConfigError, match=setting.split("=")[0]):
        check_same_run(position_of(config), apply_settings(config, [setting]), "a", tmp_path)


def test_a_resumed_run_must_not_change_compression_or_text(tmp_path):
    config = read("--recipe=tiny")
    changed = dataclasses.replace(config, compression="fp8", seed=4)
    with pytest.raises(ConfigError, match="compression is taco, not fp8; seed is 0, not 4; data has other contents"):
        check_same_run(position_of(config), changed, "b", tmp_path)


def test_a_run_from_before_the_vocabulary_was_the_tokenizer_s_goes_on(tmp_path):
    config = read("--recipe=tiny")
    digest = "262804ea6774be16b1e593db24f9465f0417ea0148bba2fb5a3022c26ca1e56d"
    position = position_of(apply_settings(config, ["model.vocab_size=256", "model.max_positions=32"]), digest)
    del position.config["data"]["tokenizer"], position.config["data"]["text_field"]
    corpus = load_corpus(config.data)
    check_same_run(position, with_model_sizes(config, corpus), corpus.digest, tmp_path)


def test_a_field_that_is_younger_than_the_checkpoint_had_its_default(tmp_path):
    config = read("--recipe=tiny")
    position = position_of(config)
    del position.config["dtype"]
    check_same_run(position, config, "a", tmp_path)


def test_a_model_by_name_is_the_starting_point_of_the_settings():
    config = read("--model=qwen3-tiny", "--recipe=tiny", "--set=model.num_kv_heads=4", "--set=model.hidden_size=96")
    model = dataclasses.replace(qwen3_tiny(), num_kv_heads=4, hidden_size=96)
    assert (config.model, config.data) == (model, read("--recipe=tiny").data)


def test_a_published_model_has_the_large_recipe_unless_another_is_named():
    config = read("--model=qwen-7b", "--mesh=dp8,pp4,tp8")
    assert (config.recipe, config.data.sequence_length, config.data.batch_size) == ("large", 2048, 256)
    assert read("--model=gpt2-355m").data.sequence_length == 1024
    assert read("--model=qwen3-tiny").recipe == "main"
    assert read("--model=gpt2-124m", "--recipe=small").data == read("--recipe=small").data


def test_a_run_from_another_takes_its_model_and_tokenizer(tmp_path):
    (tmp_path / "checkpoints" / "7").mkdir(parents=True)
    saved = apply_settings(read("--model=qwen2-tiny"), ["data.tokenizer=gpt2", "model.num_layers=3"])
    (tmp_path / "config.json").write_text(config_json(saved))
    for source in (tmp_path, tmp_path / "checkpoints" / "7"):
        config = read(f"--init-from={source}", "--recipe=tiny", "--set=model.rope_theta=5")
        assert config.model == dataclasses.replace(saved.model, rope_theta=5.0)
        assert config.data == dataclasses.replace(read("--recipe=tiny").data, tokenizer="gpt2")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert read(f"--init-from={tmp_path}").data.tokenizer == str(tmp_path)
    assert read(f"--init-from={tmp_path}", "--model=gpt2-tiny").model == read("--model=gpt2-tiny").model
    (tmp_path / "config.json").write_text('{"layers": 3}')
    with pytest.raises(ConfigError, match="config.json is not the configuration of a run: .*layers"):
        read(f"--init-from={tmp_path}")
