import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from taco_jax.models import huggingface
from taco_jax.models.config import ModelConfig
from taco_jax.models.families import abstract_parameters
from taco_jax.models.huggingface import Naming, from_tensors, match_names, to_tensors
from taco_jax.models.huggingface_config import read_config, write_config
from taco_jax.models.presets import PRESETS

GOLDEN = Path(__file__).parent / "golden"
NAMES = ("gpt2-tiny", "qwen2-tiny", "qwen2-tied-tiny", "qwen3-tiny")
FIRST_QWEN = {
    "architectures": ["QWenLMHeadModel"],
    "attn_dropout_prob": 0.0,
    "hidden_size": 24,
    "intermediate_size": 80,
    "kv_channels": 6,
    "layer_norm_epsilon": 1e-06,
    "max_position_embeddings": 64,
    "model_type": "qwen",
    "no_bias": True,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "rotary_emb_base": 10000,
    "rotary_pct": 1.0,
    "scale_attn_weights": True,
    "seq_length": 32,
    "tie_word_embeddings": False,
    "use_dynamic_ntk": True,
    "vocab_size": 50,
}


def golden(name):
    return json.loads((GOLDEN / name / "config.json").read_text()), load_file(GOLDEN / name / "model.safetensors")


def shapes(tensors):
    return {name: tensor.shape for name, tensor in tensors.items()}


def leaves(tree, prefix=""):
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def random_tensors(config, naming):
    rng = np.random.default_rng(3)
    wanted = huggingface.tensor_shapes(config, naming)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in wanted.items()}


def assert_same(found, want):
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert found[name].tobytes() == tensor.tobytes(), name


@pytest.mark.parametrize("name", NAMES)
def test_tensors_come_back_with_the_same_names_and_bytes(name):
    raw, tensors = golden(name)
    config = read_config(raw)
    naming, dropped = match_names(raw["model_type"], config, shapes(tensors))
    assert dropped == () and naming == huggingface.default_naming(config)
    tree = from_tensors(config, tensors.__getitem__, naming)
    want = {path: (leaf.shape, leaf.dtype) for path, leaf in leaves(abstract_parameters(config, shards=0))}
    assert {path: (leaf.shape, leaf.dtype) for path, leaf in leaves(tree)} == want
    assert_same(dict(to_tensors(config, tree)), tensors)


@pytest.mark.parametrize("name", NAMES)
def test_padding_of_a_mesh_is_left_out(name):
    raw, tensors = golden(name)
    config = read_config(raw)
    tree = from_tensors(config, tensors.__getitem__)
    padded: dict = {}
    for path, shape in leaves(abstract_parameters(config, shards=3)):
        leaf = dict(leaves(tree))[path]
        full = np.full(shape.shape, 7, np.float32)
        full[tuple(map(slice, leaf.shape))] = leaf
        *parents, last = path.split("/")
        branch = padded
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[last] = full
    assert_same(dict(to_tensors(config, padded)), tensors)


def test_elements_of_gpt2_stand_where_its_definition_says():
    """Matrices [in, out]; the columns of c_attn are queries, keys and values, heads one after the other."""
    raw, t = golden("gpt2-tiny")
    tree = from_tensors(read_config(raw), t.__getitem__)
    for layer, part, n, d, h in ((0, 0, 0, 0, 0), (1, 1, 3, 5, 7), (2, 2, 1, 11, 40), (3, 0, 2, 4, 47)):
        column = part * 48 + n * 12 + d
        attention, prefix = tree["layers"]["attention"], f"transformer.h.{layer}.attn"
        assert attention["qkv"]["kernel"][layer, h, part, n, d] == t[f"{prefix}.c_attn.weight"][h, column]
        assert attention["qkv"]["bias"][layer, part, n, d] == t[f"{prefix}.c_attn.bias"][column]
        assert attention["out"]["kernel"][layer, n, d, h] == t[f"{prefix}.c_proj.weight"][n * 12 + d, h]
        mlp = f"transformer.h.{layer}.mlp"
        assert tree["layers"]["mlp"]["up"]["kernel"][layer, h, column] == t[f"{mlp}.c_fc.weight"][h, column]
        assert tree["layers"]["mlp"]["down"]["kernel"][layer, column, h] == t[f"{mlp}.c_proj.weight"][column, h]
    assert np.array_equal(tree["positions"]["embedding"], t["transformer.wpe.weight"])


@pytest.mark.parametrize("name", ["qwen2-tiny", "qwen3-tiny"])
def test_elements_of_qwen_stand_where_its_definition_says(name):
    """Matrices [out, in], out being heads one after the other, or the units of the MLP."""
    raw, t = golden(name)
    config = read_config(raw)
    width = config.head_dim
    layers = from_tensors(config, t.__getitem__)["layers"]
    for layer, n, d, h, f in ((0, 0, 0, 0, 0), (1, 1, 5, 7, 11), (2, 0, 11, 40, 87), (3, 1, 4, 47, 50)):
        prefix, row = f"model.layers.{layer}", n * width + d
        attention = layers["attention"]
        assert attention["q"]["kernel"][layer, h, n, d] == t[f"{prefix}.self_attn.q_proj.weight"][row, h]
        for part, kind in enumerate("kv"):
            assert (
                attention["kv"]["kernel"][layer, h, part, n, d] == t[f"{prefix}.self_attn.{kind}_proj.weight"][row, h]
            )
            if config.qkv_bias:
                assert attention["kv"]["bias"][layer, part, n, d] == t[f"{prefix}.self_attn.{kind}_proj.bias"][row]
        assert attention["out"]["kernel"][layer, n, d, h] == t[f"{prefix}.self_attn.o_proj.weight"][h, row]
        for part, kind in enumerate(("gate", "up")):
            assert layers["mlp"]["gate_up"]["kernel"][layer, h, part, f] == t[f"{prefix}.mlp.{kind}_proj.weight"][f, h]
        assert layers["mlp"]["down"]["kernel"][layer, f, h] == t[f"{prefix}.mlp.down_proj.weight"][h, f]


def test_pieces_split_into_rows():
    for name in NAMES:
        raw, tensors = golden(name)
        config = read_config(raw)
        tree = dict(leaves(from_tensors(config, tensors.__getitem__)))
        for piece in huggingface.pieces(config, huggingface.default_naming(config)):
            parts = list(piece.split(200))
            rows = [tensors[part.tensor][part.rows] for part in parts]
            assert np.array_equal(np.concatenate(rows), tensors[piece.tensor][piece.rows])
            for part, values in zip(parts, rows, strict=True):
                assert values.size <= 200 or part.shape[0] == 1
                assert np.array_equal(tree[part.path][part.region], part.to_leaf(values))
                assert np.array_equal(part.to_rows(tree[part.path][part.region]), values)


def test_first_qwen_is_the_second_under_other_names():
    config = read_config(FIRST_QWEN)
    assert (config.intermediate_size, config.head_dim, config.max_positions, config.qkv_bias) == (40, 6, 32, True)
    first, second = Naming("qwen", "transformer."), Naming("qwen2", "model.")
    tensors = random_tensors(config, first)
    assert tensors["transformer.h.2.attn.c_attn.weight"].shape == (72, 24)
    assert tensors["transformer.h.2.attn.c_attn.bias"].shape == (72,)
    assert match_names("qwen", config, shapes(tensors)) == (first, ())
    renamed = {
        "model.embed_tokens.weight": tensors["transformer.wte.weight"],
        "model.norm.weight": tensors["transformer.ln_f.weight"],
        "lm_head.weight": tensors["lm_head.weight"],
    }
    for layer in range(3):
        old, new = f"transformer.h.{layer}", f"model.layers.{layer}"
        for kind in ("weight", "bias"):
            parts = np.split(tensors[f"{old}.attn.c_attn.{kind}"], 3)
            renamed |= {f"{new}.self_attn.{p}_proj.{kind}": part for p, part in zip("qkv", parts, strict=True)}
        for a, b in (
            ("attn.c_proj", "self_attn.o_proj"),
            ("mlp.w1", "mlp.up_proj"),  # out = c_proj(w1(x) silu(w2(x)))
            ("mlp.w2", "mlp.gate_proj"),
            ("mlp.c_proj", "mlp.down_proj"),
            ("ln_1", "input_layernorm"),
            ("ln_2", "post_attention_layernorm"),
        ):
            renamed[f"{new}.{b}.weight"] = tensors[f"{old}.{a}.weight"]
    tree = from_tensors(config, tensors.__getitem__, first)
    assert_same(dict(to_tensors(config, tree, second)), renamed)
    assert_same(dict(leaves(from_tensors(config, renamed.__getitem__, second))), dict(leaves(tree)))
    assert_same(dict(to_tensors(config, tree, first)), tensors)


def test_gpt2_of_the_hub_has_no_prefix_and_carries_constants():
    raw, tensors = golden("gpt2-tiny")
    config = read_config(raw)
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    constants = {f"h.{layer}.attn.bias": np.ones((1, 1, 32, 32), np.float32) for layer in range(4)}
    constants["h.0.attn.masked_bias"] = np.float32(-1e4)
    naming, dropped = match_names("gpt2", config, shapes(bare | constants))
    assert naming.prefix == "" and set(dropped) == set(constants)
    tree = from_tensors(config, bare.__getitem__, naming)
    assert_same(dict(leaves(tree)), dict(leaves(from_tensors(config, tensors.__getitem__))))
    assert_same(dict(to_tensors(config, tree, naming)), bare)


def test_a_head_beside_a_tied_table_is_the_table():
    raw, tensors = golden("qwen3-tiny")
    config = read_config(raw)
    twice = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    naming, _ = match_names("qwen3", config, shapes(twice))
    assert_same(dict(to_tensors(config, from_tensors(config, twice.__getitem__, naming), naming)), twice)
    twice["lm_head.weight"] = twice["lm_head.weight"] + np.float32(1e-6)
    with pytest.raises(ValueError, match=r"lm_head.weight differs from the token table.*tie_word_embeddings"):
        from_tensors(config, twice.__getitem__, naming)


def test_missing_and_unexpected_tensors():
    raw, tensors = golden("qwen2-tiny")
    config = read_config(raw)
    lacking = {name: t for name, t in tensors.items() if not name.endswith("k_proj.bias")}
    with pytest.raises(
        ValueError,
        match=r"4 of 51 tensors of this qwen2 are missing: model.layers.0.self_attn.k_proj.bias,.* and 1 more",
    ):
        match_names("qwen2", config, shapes(lacking))
    with pytest.raises(
        ValueError, match=r"^1 tensors are no part of this qwen2: model.layers.0.self_attn.o_proj.bias$"
    ):
        match_names("qwen2", config, shapes(tensors) | {"model.layers.0.self_attn.o_proj.bias": (48,)})
    with pytest.raises(ValueError, match=r"model.norm.weight is \[49\], not \[48\]"):
        match_names("qwen2", config, shapes(tensors) | {"model.norm.weight": (49,)})
    # A Qwen2's tensors are not a Qwen3's.
    with pytest.raises(ValueError, match=r"missing: .*q_norm.weight.*; 12 tensors are no part of this qwen3: .*bias"):
        match_names("qwen3", read_config(golden("qwen3-tiny")[0] | {"vocab_size": 102}), shapes(tensors))


def test_rope_theta_is_read_in_both_places():
    raw, _ = golden("qwen2-tiny")
    inside = read_config(raw)
    assert inside.rope_theta == 1e6
    hub = {name: value for name, value in raw.items() if name not in ("rope_parameters", "layer_types")}
    assert read_config(hub | {"rope_theta": 1e6, "rope_scaling": None, "torch_dtype": "bfloat16"}) == inside
    assert read_config(hub).rope_theta == 1e4
    with pytest.raises(ValueError, match="rope_theta is 5000.0, in rope_parameters 1000000.0"):
        read_config(raw | {"rope_theta": 5000.0})


def test_head_dim_is_the_configs():
    published = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "initializer_range": 0.02,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    config = read_config(published)
    assert config == PRESETS["qwen3-0.6b"]().resolved()
    assert huggingface.leaf_shapes(config)["layers/attention/out/kernel"] == (28, 16, 128, 1024)
    assert read_config({**published, "head_dim": None}).head_dim == 128


@pytest.mark.parametrize("name", PRESETS)
def test_a_written_config_is_read_as_the_same_model(name):
    config = dataclasses.replace(PRESETS[name](), vocab_size=300, max_positions=64).resolved()
    written = json.loads(json.dumps(write_config(config, dtype="bfloat16")))
    stds = {"embedding_std": config.embedding_std, "kernel_std": config.kernel_std}
    assert dataclasses.replace(read_config(written), **stds) == config
    assert written["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gpt2-tiny", {"activation_function": "gelu"}, "activation_function is 'gelu'; we compute 'gelu_new'"),
        ("gpt2-tiny", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ("gpt2-tiny", {"scale_attn_weights": False}, "scale_attn_weights is False"),
        ("gpt2-tiny", {"add_cross_attention": True}, "add_cross_attention is True"),
        ("gpt2-tiny", {"n_head": 5}, "hidden_size=48 is no multiple of num_heads=5"),
        ("gpt2-tiny", {"n_layer": None}, "config.json of a gpt2 has no field n_layer"),
        ("qwen2-tiny", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; we compute 'silu'"),
        ("qwen2-tiny", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling is of type 'yarn'"),
        ("qwen2-tiny", {"rope_parameters": {"rope_type": "llama3"}}, "rope_parameters is of type 'llama3'"),
        ("qwen2-tiny", {"use_sliding_window": True}, "use_sliding_window is True; we compute False"),
        ("qwen2-tiny", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types contains 'sliding_att"),
        ("qwen2-tiny", {"quantization_config": {"bits": 4}}, "quantization_config is set"),
        ("qwen3-tiny", {"attention_bias": True}, "config.json of a qwen3: attention_bias is True; we compute False"),
        ("qwen3-tiny", {"model_type": "qwen3_moe"}, "model_type is 'qwen3_moe'; there are gpt2, qwen2, qwen3, qwen"),
        ("qwen3-tiny", {"model_type": None}, "model_type is None"),
    ],
)
def test_what_we_do_not_compute_is_refused(name, changes, message):
    raw, _ = golden(name)
    with pytest.raises(ValueError, match=message) as error:
        read_config(raw | changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"no_bias": False}, "no_bias is False"),
        ({"rotary_pct": 0.5}, "rotary_pct is 0.5"),
        ({"kv_channels": 8}, "kv_channels 8 x num_attention_heads 4 is not hidden_size 24"),
        ({"intermediate_size": 81}, "intermediate_size 81 is not even"),
    ],
)
def test_what_we_do_not_compute_of_the_first_qwen_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        read_config(FIRST_QWEN | changes)


def test_numerics_dropout_and_a_width_of_its_own_are_accepted():
    raw, _ = golden("gpt2-tiny")
    changes = {"reorder_and_upcast_attn": True, "resid_pdrop": 0.1, "attn_pdrop": 0.1, "n_inner": 100, "n_ctx": 32}
    config = read_config(raw | changes)
    assert config.intermediate_size == 100
    assert write_config(config, dtype="float32")["n_inner"] == 100


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ModelConfig(2, 32, 4, head_dim=16), "gpt2 has head_dim = hidden_size / num_heads"),
        (ModelConfig(2, 32, 4, family="qwen"), "this model has qkv_bias=False and qk_norm=False"),
        (ModelConfig(2, 32, 4, family="qwen", qkv_bias=True, qk_norm=True), "qkv_bias=True and qk_norm=True"),
    ],
)
def test_models_that_hugging_face_does_not_have(config, message):
    config = dataclasses.replace(config, vocab_size=10, max_positions=8).resolved()
    with pytest.raises(ValueError, match=message):
        write_config(config, dtype="float32")
    with pytest.raises(ValueError, match=message):
        list(to_tensors(config, {}))
