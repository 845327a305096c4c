"""What the models have in common: a token table, L layers, a final norm and a head, for one device or its part of them.

The module tree holds the global parameters, layers stacked [L, ...]. Merged with a device's shards it computes that
device's part: sizes come from the parameters, communication from the object `comm`.

Shapes: B batch, S sequence, T positions in the cache, H hidden, V vocabulary, L layers.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from taco_jax.models.config import ModelConfig, stored_sizes
from taco_jax.models.layers import Cache, Embedding, cross_entropy, normal

SITES = ("attention", "mlp", "embedding", "head")
"""Where a model communicates."""
LAYER_SITES = ("attention", "mlp")
"""Those of them that every layer has."""


class Head(nnx.Module):
    """Output matrix of its own, for a model whose head does not read the token table."""

    def __init__(self, config: ModelConfig, *, shards: int, rngs: nnx.Rngs):
        stored = (stored_sizes(config, shards).vocab, config.hidden_size)
        self.kernel = normal(rngs, (config.vocab_size, config.hidden_size), config.kernel_std, stored=stored)


class Decoder(nnx.Module):
    """Base of the models; the four parts are separate methods because different devices of a pipeline run them.

    Args:
        config: resolved architecture.
        layer: module of one layer, `layer(config, shards=..., rngs=...)`.
        norm: module of the final norm.
        num_positions: rows of a table of positions, 0 for none.
        shards: devices that will share a layer; see `stored_sizes`.
        dtype: compute dtype; parameters are float32.
        rngs: source of the first parameters.
    """

    layers: Any
    norm: Any

    def __init__(
        self,
        config: ModelConfig,
        layer: Callable[..., nnx.Module],
        norm: Callable[..., nnx.Module],
        *,
        num_positions: int,
        shards: int,
        dtype: str,
        rngs: nnx.Rngs,
    ):
        self.config, self.dtype = config, dtype
        hidden, std, rows = config.hidden_size, config.embedding_std, stored_sizes(config, shards).vocab
        self.embedding = Embedding(config.vocab_size, hidden, stored=rows, std=std, rngs=rngs)
        self.positions = Embedding(num_positions, hidden, std=std, rngs=rngs) if num_positions else None
        self.layers = nnx.vmap(lambda r: layer(config, shards=shards, rngs=r))(rngs.split(config.num_layers))
        self.norm = norm(hidden, epsilon=config.norm_epsilon)
        self.head = None if config.tie_embeddings else Head(config, shards=shards, rngs=rngs)

    def embed(self, tokens: jax.Array, comm, start: jax.Array | int = 0) -> jax.Array:
        """Return the first hidden states [..., S, H] of `tokens` int32[..., S] at the positions start .. start + S."""
        dtype = jnp.dtype(self.dtype)
        first_row = comm.index() * self.embedding.embedding.shape[0]
        x = comm.leave(self.embedding.lookup(tokens, first_row, dtype), "embedding")
        if self.positions is None:
            return x
        rows = lax.dynamic_slice_in_dim(self.positions.embedding[...], start, tokens.shape[-1])
        return x + rows.astype(dtype)

    def run_layers(
        self,
        x: jax.Array,
        comm: Any,
        *,
        start: jax.Array | int = 0,
        cache: Cache | None = None,
        remat_policy: Any = None,
        remat: bool = True,
    ) -> Any:
        """Map x[B, S, H] through the layers held here.

        Args:
            x: hidden states of the positions start .. start + S.
            comm: communication, a pytree whose leaves (if it has any) are stacked over layers like the parameters.
            start: position of the first; what is before it is read from the cache.
            cache: of `new_cache`; None for a sequence that begins here.
            remat_policy: what `jax.checkpoint` keeps of a layer beside its input.
            remat: whether a layer is recomputed in the backward pass.

        Returns:
            [B, S, H], and with a cache the pair of that and the cache with these positions added.
        """
        graph, state = nnx.split(self.layers)

        def layer(x, inputs):
            parameters, comm, cache = inputs
            return nnx.merge(graph, parameters)(x, comm, start, cache)

        if remat:
            layer = jax.checkpoint(layer, policy=remat_policy, prevent_cse=False)
        x, cache = lax.scan(layer, x, (nnx.to_pure_dict(state), comm, cache))
        return x if cache is None else (x, cache)

    def new_cache(self, batch: int, length: int, comm) -> Cache:
        """Return room for `length` positions of this device's layers and heads, [L, B, T, K, D] twice."""
        layers = jax.tree.leaves(nnx.to_pure_dict(nnx.split(self.layers)[1]))[0].shape[0]
        heads = self.layers.attention.num_cached_heads(comm)
        shape = (layers, batch, length, heads, self.config.head_dim)
        return jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype)

    def logits(self, x: jax.Array, comm) -> jax.Array:
        """Return f32[..., V], this device's columns of the logits, of the last hidden states x[..., H]."""
        weight = self.embedding.embedding if self.head is None else self.head.kernel
        x = comm.enter(self.norm(x), "head")
        return jnp.einsum("...h,vh->...v", x, weight[...].astype(x.dtype), preferred_element_type=jnp.float32)

    def loss(self, x: jax.Array, targets: jax.Array, comm) -> jax.Array:
        """Return the cross-entropy f32[...] in nats of `targets` given the last hidden states x[..., H]."""
        return cross_entropy(self.logits(x, comm), targets, self.config.vocab_size, comm)


class Block(nnx.Module):
    """Pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    attention: Callable[..., Any]
    mlp: Callable[..., Any]

    def __init__(
        self,
        config: ModelConfig,
        *,
        norm: Callable[..., nnx.Module],
        attention: Callable[..., Any],
        mlp: Callable[..., Any],
        shards: int,
        rngs: nnx.Rngs,
    ):
        self.attention_norm = norm(config.hidden_size, epsilon=config.norm_epsilon)
        self.attention = attention(config, shards=shards, rngs=rngs)
        self.mlp_norm = norm(config.hidden_size, epsilon=config.norm_epsilon)
        self.mlp = mlp(config, shards=shards, rngs=rngs)

    def __call__(self, x: jax.Array, comm, start: jax.Array | int, cache: Cache | None) -> tuple:
        """Map x[B, S, H] to [B, S, H], and a cache to one with these positions."""
        y, cache = self.attention(self.attention_norm(x), comm, start, cache)
        x = x + y
        return x + self.mlp(self.mlp_norm(x), comm), cache
