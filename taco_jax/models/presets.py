"""Published architectures by name, and tiny ones of each kind.

Sources: GPT-2, the configurations that OpenAI published with the weights; GPT-3, table 2.1 of arXiv 2005.14165; Qwen,
the config.json of each model. Parameter counts are tested against those of the published weights.
"""

import functools
from collections.abc import Callable

from taco_jax.models.config import ModelConfig


def _gpt(num_layers: int, hidden_size: int, num_heads: int, max_positions: int = 1024) -> ModelConfig:
    return ModelConfig(num_layers, hidden_size, num_heads, vocab_size=50_257, max_positions=max_positions)


def gpt2_124m() -> ModelConfig:
    """Return GPT-2 small."""
    return _gpt(12, 768, 12)


def gpt2_355m() -> ModelConfig:
    """Return GPT-2 medium."""
    return _gpt(24, 1024, 16)


def gpt2_774m() -> ModelConfig:
    """Return GPT-2 large."""
    return _gpt(36, 1280, 20)


def gpt2_1_5b() -> ModelConfig:
    """Return GPT-2 XL; its 25 heads are padded on most meshes."""
    return _gpt(48, 1600, 25)


def gpt3_6_7b() -> ModelConfig:
    """Return GPT-3 6.7B."""
    return _gpt(32, 4096, 32, 2048)


def gpt3_13b() -> ModelConfig:
    """Return GPT-3 13B, with a width of 40 heads of 128: the paper's 5140 is no multiple of its heads."""
    return _gpt(40, 5120, 40, 2048)


def qwen_7b() -> ModelConfig:
    """Return Qwen-7B, the first generation."""
    return ModelConfig(
        32,
        4096,
        32,
        family="qwen",
        intermediate_size=11_008,
        vocab_size=151_936,
        max_positions=8192,
        tie_embeddings=False,
        qkv_bias=True,
        norm_epsilon=1e-6,
    )


def _qwen2(
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    intermediate_size: int,
    *,
    vocab_size: int = 152_064,
    max_positions: int = 131_072,
    tie_embeddings: bool = False,
    norm_epsilon: float = 1e-6,
) -> ModelConfig:
    return ModelConfig(
        num_layers,
        hidden_size,
        num_heads,
        family="qwen",
        num_kv_heads=num_kv_heads,
        intermediate_size=intermediate_size,
        vocab_size=vocab_size,
        max_positions=max_positions,
        tie_embeddings=tie_embeddings,
        qkv_bias=True,
        rope_theta=1e6,
        norm_epsilon=norm_epsilon,
    )


_qwen2_small = functools.partial(_qwen2, vocab_size=151_936, max_positions=32_768, tie_embeddings=True)


def qwen2_5_0_5b() -> ModelConfig:
    """Return Qwen2.5-0.5B; its 14 heads are padded on most meshes."""
    return _qwen2_small(24, 896, 14, 2, 4864)


def qwen2_5_1_5b() -> ModelConfig:
    """Return Qwen2.5-1.5B."""
    return _qwen2(28, 1536, 12, 2, 8960, vocab_size=151_936, tie_embeddings=True)


def qwen2_5_3b() -> ModelConfig:
    """Return Qwen2.5-3B."""
    return _qwen2_small(36, 2048, 16, 2, 11_008)


def qwen2_5_7b() -> ModelConfig:
    """Return Qwen2.5-7B."""
    return _qwen2(28, 3584, 28, 4, 18_944)


def qwen2_5_14b() -> ModelConfig:
    """Return Qwen2.5-14B."""
    return _qwen2(48, 5120, 40, 8, 13_824, norm_epsilon=1e-5)


def qwen2_5_32b() -> ModelConfig:
    """Return Qwen2.5-32B."""
    return _qwen2(64, 5120, 40, 8, 27_648, norm_epsilon=1e-5)


def qwen2_5_72b() -> ModelConfig:
    """Return Qwen2.5-72B."""
    return _qwen2(80, 8192, 64, 8, 29_568, norm_epsilon=1e-5)


def _qwen3(
    num_layers: int, hidden_size: int, num_heads: int, intermediate_size: int, *, tie_embeddings: bool = False
) -> ModelConfig:
    return ModelConfig(
        num_layers,
        hidden_size,
        num_heads,
        family="qwen",
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=intermediate_size,
        vocab_size=151_936,
        max_positions=40_960,
        tie_embeddings=tie_embeddings,
        qk_norm=True,
        rope_theta=1e6,
        norm_epsilon=1e-6,
    )


def qwen3_0_6b() -> ModelConfig:
    """Return Qwen3-0.6B, whose heads are wider together than the residual stream."""
    return _qwen3(28, 1024, 16, 3072, tie_embeddings=True)


def qwen3_1_7b() -> ModelConfig:
    """Return Qwen3-1.7B."""
    return _qwen3(28, 2048, 16, 6144, tie_embeddings=True)


def qwen3_4b() -> ModelConfig:
    """Return Qwen3-4B."""
    return _qwen3(36, 2560, 32, 9728, tie_embeddings=True)


def qwen3_8b() -> ModelConfig:
    """Return Qwen3-8B."""
    return _qwen3(36, 4096, 32, 12_288)


def qwen3_14b() -> ModelConfig:
    """Return Qwen3-14B."""
    return _qwen3(40, 5120, 40, 17_408)


def qwen3_32b() -> ModelConfig:
    """Return Qwen3-32B."""
    return _qwen3(64, 5120, 64, 25_600)


def _tiny(**fields) -> ModelConfig:
    """Return four layers of 128 for the tokenizer's vocabulary, with first values that bytes are learned from fast."""
    return ModelConfig(4, 128, 8, embedding_std=0.05, kernel_std=0.04, **fields)


def gpt2_tiny() -> ModelConfig:
    """Return the kind of GPT-2."""
    return _tiny(intermediate_size=512)


def qwen2_tiny() -> ModelConfig:
    """Return the kind of Qwen2.5-7B: biases, four query heads per key head, a head of its own."""
    return _tiny(
        family="qwen", num_kv_heads=2, intermediate_size=352, qkv_bias=True, tie_embeddings=False, norm_epsilon=1e-6
    )


def qwen2_tied_tiny() -> ModelConfig:
    """Return the kind of Qwen2.5-0.5B: biases, tied tables."""
    return _tiny(family="qwen", num_kv_heads=2, intermediate_size=352, qkv_bias=True, norm_epsilon=1e-6)


def qwen3_tiny() -> ModelConfig:
    """Return the kind of Qwen3-0.6B: normalised query and key heads, wider together than the residual stream."""
    return _tiny(
        family="qwen",
        num_kv_heads=2,
        head_dim=32,
        intermediate_size=352,
        qk_norm=True,
        rope_theta=1e6,
        norm_epsilon=1e-6,
    )


PRESETS: dict[str, Callable[[], ModelConfig]] = {
    "gpt2-124m": gpt2_124m,
    "gpt2-355m": gpt2_355m,
    "gpt2-774m": gpt2_774m,
    "gpt2-1.5b": gpt2_1_5b,
    "gpt3-6.7b": gpt3_6_7b,
    "gpt3-13b": gpt3_13b,
    "qwen-7b": qwen_7b,
    "qwen2.5-0.5b": qwen2_5_0_5b,
    "qwen2.5-1.5b": qwen2_5_1_5b,
    "qwen2.5-3b": qwen2_5_3b,
    "qwen2.5-7b": qwen2_5_7b,
    "qwen2.5-14b": qwen2_5_14b,
    "qwen2.5-32b": qwen2_5_32b,
    "qwen2.5-72b": qwen2_5_72b,
    "qwen3-0.6b": qwen3_0_6b,
    "qwen3-1.7b": qwen3_1_7b,
    "qwen3-4b": qwen3_4b,
    "qwen3-8b": qwen3_8b,
    "qwen3-14b": qwen3_14b,
    "qwen3-32b": qwen3_32b,
    "gpt2-tiny": gpt2_tiny,
    "qwen2-tiny": qwen2_tiny,
    "qwen2-tied-tiny": qwen2_tied_tiny,
    "qwen3-tiny": qwen3_tiny,
}
"""Name -> function; the tiny ones leave vocabulary and longest sequence to the trainer."""
