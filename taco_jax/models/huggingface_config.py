"""The config.json of a Hugging Face model, for GPT-2 and the Qwens, and what it means here."""

from collections.abc import Iterator, Mapping
from typing import Any

from taco_jax.models.config import ModelConfig

MODEL_TYPES = ("gpt2", "qwen2", "qwen3", "qwen")
"""What is read; "qwen" is the first Qwen, whose model came with its files."""
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")
_DEFAULT_THETA = 10000.0

# Values of the fields that change what a model computes; None stands for a field that is null or not there.
_ACCEPTED: dict[str, dict[str, tuple]] = {
    "gpt2": {
        "activation_function": (None, *_TANH_GELU),
        "scale_attn_weights": (None, True),
        "scale_attn_by_inverse_layer_idx": (None, False),
        "add_cross_attention": (None, False),
        "pruned_heads": (None, {}),
    },
    "qwen2": {"hidden_act": (None, "silu"), "use_sliding_window": (None, False)},
    "qwen3": {"hidden_act": (None, "silu"), "use_sliding_window": (None, False), "attention_bias": (None, False)},
    "qwen": {"no_bias": (None, True), "rotary_pct": (None, 1.0), "scale_attn_weights": (None, True)},
}


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """Return the model that a config.json describes.

    Dropout is left out, and of the first Qwen what happens beyond seq_length, which becomes max_positions.

    Args:
        config: the contents of config.json.

    Raises:
        ValueError: for a model, or a value of a field, that we do not compute; or a field that is missing.
    """
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ValueError(f"config.json: model_type is {model_type!r}; there are {', '.join(MODEL_TYPES)}")
    for problem in _problems(model_type, config):
        raise ValueError(f"config.json of a {model_type}: {problem}")
    if model_type == "gpt2":
        return _read_gpt2(config).resolved()
    return (_read_first_qwen(config) if model_type == "qwen" else _read_qwen(model_type, config)).resolved()


def write_config(config: ModelConfig, *, dtype: str) -> dict[str, Any]:
    """Return the contents of a config.json for a model.

    Args:
        config: the model.
        dtype: of the tensors beside it, "float32", "bfloat16" or "float16".

    Raises:
        ValueError: for a model that none of Hugging Face's is.
    """
    model_type = model_type_of(config)
    common = {
        "model_type": model_type,
        "initializer_range": 0.02,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }
    if model_type == "gpt2":
        return {
            "architectures": ["GPT2LMHeadModel"],
            **common,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": config.norm_epsilon,
            "n_embd": config.hidden_size,
            "n_head": config.num_heads,
            "n_inner": None if config.intermediate_size == 4 * config.hidden_size else config.intermediate_size,
            "n_layer": config.num_layers,
            "n_positions": config.max_positions,
            # Without these a reader assumes token 50256.
            "bos_token_id": None,
            "eos_token_id": None,
        }
    has_own_head_dim = config.num_heads * config.head_dim != config.hidden_size
    return {
        "architectures": [f"{model_type.capitalize()}ForCausalLM"],
        **common,
        **({"attention_bias": False} if model_type == "qwen3" else {}),
        # Readers derive qwen2's from the other sizes, and take 128 for qwen3's.
        **({"head_dim": config.head_dim} if model_type == "qwen3" or has_own_head_dim else {}),
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_positions,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.norm_epsilon,
        # Writers before version 5 of their library know this spelling only, and later ones read it too.
        "rope_theta": config.rope_theta,
        "use_sliding_window": False,
    }


def model_type_of(config: ModelConfig) -> str:
    """Return "gpt2", "qwen2" or "qwen3".

    Raises:
        ValueError: for a model that none of theirs is.
    """
    if config.family == "gpt":
        if config.num_heads * config.head_dim != config.hidden_size:
            raise ValueError(
                f"gpt2 has head_dim = hidden_size / num_heads; this model has head_dim {config.head_dim}, hidden_size "
                f"{config.hidden_size}, num_heads {config.num_heads}"
            )
        return "gpt2"
    if config.qkv_bias == config.qk_norm:
        raise ValueError(
            "qwen2 has qkv_bias and no qk_norm, qwen3 the reverse; this model has "
            f"qkv_bias={config.qkv_bias} and qk_norm={config.qk_norm}"
        )
    return "qwen3" if config.qk_norm else "qwen2"


def rope_theta(config: Mapping[str, Any]) -> float:
    """Return the base of the rotary angles: at the top level, or inside rope_parameters where newer writers put it.

    Raises:
        ValueError: if both are there and differ.
    """
    inside = (config.get("rope_parameters") or {}).get("rope_theta")
    found = {float(theta) for theta in (config.get("rope_theta"), inside) if theta is not None}
    if len(found) > 1:
        raise ValueError(f"config.json: rope_theta is {config['rope_theta']}, in rope_parameters {inside}")
    return found.pop() if found else _DEFAULT_THETA


def _problems(model_type: str, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what changes the results and is not computed here."""
    for name, values in _ACCEPTED[model_type].items():
        if config.get(name) not in values:
            usable = " or ".join(repr(value) for value in values if value is not None)
            yield f"{name} is {config[name]!r}; we compute {usable}"
    if config.get("quantization_config"):
        yield "quantization_config is set; only float32, float16 and bfloat16 weights are read"
    for field in ("rope_scaling", "rope_parameters"):
        rope = config.get(field) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            yield f"{field} is of type {kind!r}; we compute 'default'"
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            yield f"partial_rotary_factor is {rope['partial_rotary_factor']}; we compute 1.0"
    if other := sorted(set(config.get("layer_types") or ()) - {"full_attention"}):
        yield f"layer_types contains {other[0]!r}; we compute 'full_attention'"


def _required(config: Mapping[str, Any], name: str) -> Any:
    if config.get(name) is None:
        raise ValueError(f"config.json of a {config['model_type']} has no field {name}")
    return config[name]


def _read_gpt2(config: Mapping[str, Any]) -> ModelConfig:
    hidden_size = _required(config, "n_embd")
    return ModelConfig(
        family="gpt",
        num_layers=_required(config, "n_layer"),
        hidden_size=hidden_size,
        num_heads=_required(config, "n_head"),
        intermediate_size=config.get("n_inner") or 4 * hidden_size,
        vocab_size=_required(config, "vocab_size"),
        max_positions=_required(config, "n_positions"),
        tie_embeddings=config.get("tie_word_embeddings", True),
        norm_epsilon=config.get("layer_norm_epsilon", 1e-5),
    )


def _read_qwen(model_type: str, config: Mapping[str, Any]) -> ModelConfig:
    heads = _required(config, "num_attention_heads")
    return ModelConfig(
        family="qwen",
        num_layers=_required(config, "num_hidden_layers"),
        hidden_size=_required(config, "hidden_size"),
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        # Where qwen3's is not said, Hugging Face takes 128 whatever the other sizes.
        head_dim=config.get("head_dim") or (128 if model_type == "qwen3" else 0),
        intermediate_size=_required(config, "intermediate_size"),
        vocab_size=_required(config, "vocab_size"),
        max_positions=_required(config, "max_position_embeddings"),
        tie_embeddings=config.get("tie_word_embeddings", False),
        qkv_bias=model_type == "qwen2",
        qk_norm=model_type == "qwen3",
        rope_theta=rope_theta(config),
        norm_epsilon=config.get("rms_norm_eps", 1e-6),
    )


def _read_first_qwen(config: Mapping[str, Any]) -> ModelConfig:
    hidden_size, heads = _required(config, "hidden_size"), _required(config, "num_attention_heads")
    head_dim = config.get("kv_channels") or hidden_size // heads
    if heads * head_dim != hidden_size:
        raise ValueError(
            f"config.json of a qwen: kv_channels {head_dim} x num_attention_heads {heads} is not hidden_size "
            f"{hidden_size}"
        )
    width = _required(config, "intermediate_size")
    if width % 2:
        raise ValueError(f"config.json of a qwen: intermediate_size {width} is not even; it counts two matrices")
    return ModelConfig(
        family="qwen",
        num_layers=_required(config, "num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        intermediate_size=width // 2,
        vocab_size=_required(config, "vocab_size"),
        max_positions=config.get("seq_length") or _required(config, "max_position_embeddings"),
        tie_embeddings=config.get("tie_word_embeddings", False),
        qkv_bias=True,
        qk_norm=False,
        rope_theta=float(config.get("rotary_emb_base", _DEFAULT_THETA)),
        norm_epsilon=config.get("layer_norm_epsilon", 1e-6),
    )
