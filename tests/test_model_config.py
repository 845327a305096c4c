import dataclasses

import pytest

from taco_jax.models.config import ModelConfig, padding_note, stored_sizes
from taco_jax.models.families import abstract_parameters, parameter_count
from taco_jax.models.presets import PRESETS

COUNTS = {
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "gpt3-6.7b": 6_658_404_352,
    "gpt3-13b": 12_853_386_240,
    "qwen-7b": 7_721_324_544,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
}
"""Elements of the published weights; of GPT-3, which has none, the architecture's with GPT-2's biases and tables."""
SIZES = {"num_layers": 1, "hidden_size": 32, "num_heads": 4, "vocab_size": 10, "max_positions": 8}


def counted_by_hand(c: ModelConfig) -> int:
    """Parameters written out for both families, from the papers' layer formulas."""
    c = c.resolved()
    h, d, f = c.hidden_size, c.head_dim, c.intermediate_size
    if c.family == "gpt":
        layer = (h * 3 * h + 3 * h) + (h * h + h) + (h * f + f) + (f * h + h) + 4 * h
        return c.num_layers * layer + 2 * h + c.vocab_size * h + c.max_positions * h
    heads = (c.num_heads + 2 * c.num_kv_heads) * d
    layer = h * heads + heads * c.qkv_bias + c.num_heads * d * h + 3 * h * f + 2 * h + 2 * d * c.qk_norm
    return c.num_layers * layer + h + c.vocab_size * h * (1 if c.tie_embeddings else 2)


@pytest.mark.parametrize("name", COUNTS)
def test_presets_have_the_published_number_of_parameters(name):
    config = PRESETS[name]()
    assert counted_by_hand(config) == COUNTS[name]
    assert parameter_count(config) == COUNTS[name]


def test_every_preset_is_counted_or_tiny():
    assert set(PRESETS) - set(COUNTS) == {"gpt2-tiny", "qwen2-tiny", "qwen2-tied-tiny", "qwen3-tiny"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 5}, r"hidden_size=32 is no multiple of num_heads=5 \(usable num_heads: 1, 2, 4, 8, 16, 32; or"),
        ({"num_layers": 0}, "num_layers must be 1 or more, got 0"),
        ({"vocab_size": -1}, "vocab_size must be 0 or more, got -1"),
        ({"norm_epsilon": float("nan")}, "norm_epsilon must be 0 or more and finite, got nan"),
        ({"family": "llama"}, "family must be one of gpt, qwen, got 'llama'"),
        ({"num_kv_heads": 2}, "family gpt has as many key heads as query heads, got num_kv_heads=2"),
        ({"qk_norm": True}, "family gpt has no qk_norm"),
        ({"family": "qwen", "num_kv_heads": 3}, r"num_heads=4 is no multiple of num_kv_heads=3 .*: 1, 2, 4\)"),
        ({"family": "qwen", "head_dim": 5}, "rotary positions need an even head_dim, got 5"),
    ],
)
def test_config_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{**SIZES, **changes})


@pytest.mark.parametrize("name", ["vocab_size", "max_positions"])
def test_a_model_needs_its_tables(name):
    with pytest.raises(ValueError, match=f"{name} is not known"):
        abstract_parameters(ModelConfig(**{**SIZES, name: 0}))


def test_zeros_are_written_out():
    config = ModelConfig(**SIZES).resolved()
    assert (config.num_kv_heads, config.head_dim, config.intermediate_size) == (4, 8, 128)
    assert dataclasses.replace(config, head_dim=16).resolved().head_dim == 16  # M9
    assert config.resolved() == config


def test_heads_units_and_ids_are_padded_to_the_devices():
    """N14, M4: 14 heads with 2 key heads (Qwen2.5-0.5B), 25 heads (GPT-2 XL), 50,257 ids."""
    qwen, gpt = PRESETS["qwen2.5-0.5b"]().resolved(), PRESETS["gpt2-1.5b"]().resolved()
    assert dataclasses.astuple(stored_sizes(qwen, 4)) == (16, 2, 4864, 151_936)
    assert dataclasses.astuple(stored_sizes(qwen, 3)) == (15, 2, 4866, 152_064)
    assert dataclasses.astuple(stored_sizes(gpt, 2)) == (26, 26, 6400, 50_304)
    assert dataclasses.astuple(stored_sizes(gpt, 0)) == (25, 25, 6400, 50_257)
    assert padding_note(qwen, 4) == "tp=4: 14 heads padded to 16, 2 key heads held by every device"
    assert padding_note(qwen, 3) == (
        "tp=3: 14 heads padded to 15, 4864 units of the MLP padded to 4866, 2 key heads held by every device"
    )
    assert padding_note(qwen, 2) == padding_note(gpt, 5) == ""
