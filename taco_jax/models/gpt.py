"""GPT-2 in Flax NNX, for one device or for the part of it that one device of a mesh holds.

The module tree holds the global parameters, layers stacked [L, ...]. Merged with a device's shards it computes that
device's part: sizes come from the parameters, communication from the object `comm`.

Shapes: B batch, S sequence, H hidden, N heads, D head, F intermediate, V vocabulary, L layers.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from taco_jax.models.config import GPTConfig
from taco_jax.models.layers import Embedding, LayerNorm, Linear, causal_attention, cross_entropy, normal

SITES = ("attention", "mlp", "embedding", "head")
"""Where a GPT communicates."""
LAYER_SITES = ("attention", "mlp")
"""Those of them that every layer has."""


class Attention(nnx.Module):
    """Causal self-attention; heads are shared among the devices."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        heads = (config.num_heads, config.head_dim)
        self.qkv = Linear((config.hidden_size,), (3, *heads), std=config.kernel_std, rngs=rngs)
        self.out = Linear(heads, (config.hidden_size,), std=config.kernel_std, rngs=rngs)

    def __call__(self, x: jax.Array, comm) -> jax.Array:
        """Map x[B, S, H] to [B, S, H]."""
        q, k, v = jnp.moveaxis(self.qkv(comm.enter(x, "attention")), 2, 0)
        y = self.out.partial(causal_attention(q, k, v))
        return self.out.add_bias(comm.leave(y, "attention"))


class MLP(nnx.Module):
    """Two matrices with a tanh-approximated GELU between them."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.up = Linear((config.hidden_size,), (config.intermediate_size,), std=config.kernel_std, rngs=rngs)
        self.down = Linear((config.intermediate_size,), (config.hidden_size,), std=config.kernel_std, rngs=rngs)

    def __call__(self, x: jax.Array, comm) -> jax.Array:
        """Map x[B, S, H] to [B, S, H]."""
        y = self.down.partial(jax.nn.gelu(self.up(comm.enter(x, "mlp")), approximate=True))
        return self.down.add_bias(comm.leave(y, "mlp"))


class Layer(nnx.Module):
    """Pre-norm transformer block."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.attention_norm = LayerNorm(config.hidden_size, epsilon=config.norm_epsilon)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = LayerNorm(config.hidden_size, epsilon=config.norm_epsilon)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x: jax.Array, comm) -> jax.Array:
        """Map x[B, S, H] to [B, S, H]."""
        x = x + self.attention(self.attention_norm(x), comm)
        return x + self.mlp(self.mlp_norm(x), comm)


class Head(nnx.Module):
    """Output matrix of its own, for a model whose head does not read the token table."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        kernel = normal(rngs, (config.vocab_size, config.hidden_size), config.kernel_std)[...]
        self.kernel = nnx.Param(jnp.pad(kernel, ((0, config.padded_vocab_size - config.vocab_size), (0, 0))))


class GPT(nnx.Module):
    """GPT-2: token and position tables, L pre-norm layers, a final norm and a head.

    The four parts are separate methods because different devices of a pipeline run them.
    """

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = Embedding(
            config.vocab_size, config.hidden_size, padded=config.padded_vocab_size, std=config.embedding_std, rngs=rngs
        )
        self.positions = Embedding(config.max_positions, config.hidden_size, std=config.embedding_std, rngs=rngs)
        self.layers = nnx.vmap(lambda r: Layer(config, rngs=r))(rngs.split(config.num_layers))
        self.norm = LayerNorm(config.hidden_size, epsilon=config.norm_epsilon)
        self.head = None if config.tie_embeddings else Head(config, rngs=rngs)

    def embed(self, tokens: jax.Array, comm) -> jax.Array:
        """Return the first hidden states [..., S, H] of `tokens` int32[..., S]."""
        dtype = jnp.dtype(self.config.dtype)
        first_row = comm.index() * self.embedding.embedding.shape[0]
        x = comm.leave(self.embedding.lookup(tokens, first_row, dtype), "embedding")
        return x + self.positions.embedding[: tokens.shape[-1]].astype(dtype)

    def run_layers(self, x: jax.Array, comm: Any, *, remat_policy: Any = None, remat: bool = True) -> jax.Array:
        """Map x[B, S, H] through the layers held here.

        Args:
            x: hidden states.
            comm: communication, a pytree whose leaves (if it has any) are stacked over layers like the parameters.
            remat_policy: what `jax.checkpoint` keeps of a layer beside its input.
            remat: whether a layer is recomputed in the backward pass.
        """
        graph, state = nnx.split(self.layers)

        def layer(x, inputs):
            parameters, comm = inputs
            return nnx.merge(graph, parameters)(x, comm), None

        if remat:
            layer = jax.checkpoint(layer, policy=remat_policy, prevent_cse=False)
        return jax.lax.scan(layer, x, (nnx.to_pure_dict(state), comm))[0]

    def logits(self, x: jax.Array, comm) -> jax.Array:
        """Return f32[..., V], this device's columns of the logits, of the last hidden states x[..., H]."""
        weight = self.embedding.embedding if self.head is None else self.head.kernel
        x = comm.enter(self.norm(x), "head")
        return jnp.einsum("...h,vh->...v", x, weight[...].astype(x.dtype), preferred_element_type=jnp.float32)

    def loss(self, x: jax.Array, targets: jax.Array, comm) -> jax.Array:
        """Return the cross-entropy f32[...] in nats of `targets` given the last hidden states x[..., H]."""
        return cross_entropy(self.logits(x, comm), targets, self.config.vocab_size, comm)


@functools.lru_cache
def graph_of(config: GPTConfig) -> nnx.GraphDef:
    """Return the structure that `nnx.merge` turns a dict of parameters or shards into a `GPT` with."""
    return nnx.split(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))))[0]


def init_parameters(config: GPTConfig, seed: jax.Array | int) -> dict:
    """Return the nested dict of float32 parameters for a seed; under `jax.jit` it may be sharded in any way."""
    return nnx.to_pure_dict(nnx.split(GPT(config, rngs=nnx.Rngs(jax.random.key(seed))))[1])
