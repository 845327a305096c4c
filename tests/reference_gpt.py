"""GPT-2 on one device in plain jnp, written from the published architecture; imports nothing of taco_jax.

Parameters are the nested dict of the model under test (that is the contract), layers stacked along the first axis.
"""

import jax
import jax.numpy as jnp


def _norm(x, p):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + 1e-5) * p["scale"] + p["bias"]


def _gelu(x):
    return 0.5 * x * (1 + jnp.tanh(jnp.sqrt(2 / jnp.pi) * (x + 0.044715 * x**3)))


def _layer(x, p):
    n = _norm(x, p["attention_norm"])
    qkv = jnp.einsum("bsh,hknd->kbnsd", n, p["attention"]["qkv"]["kernel"])
    qkv = qkv + p["attention"]["qkv"]["bias"][:, None, :, None, :]
    q, k, v = qkv
    s = q.shape[-2]
    scores = q @ k.swapaxes(-1, -2) / jnp.sqrt(q.shape[-1]).astype(x.dtype)
    scores = jnp.where(jnp.arange(s)[:, None] >= jnp.arange(s)[None, :], scores, -1e30)
    heads = jax.nn.softmax(scores, axis=-1) @ v
    out = p["attention"]["out"]
    x = x + jnp.einsum("bnsd,ndh->bsh", heads, out["kernel"]) + out["bias"]
    n = _norm(x, p["mlp_norm"])
    up, down = p["mlp"]["up"], p["mlp"]["down"]
    return x + _gelu(n @ up["kernel"] + up["bias"]) @ down["kernel"] + down["bias"]


def logits(parameters, tokens, vocab_size):
    """tokens[B, S] -> [B, S, vocab_size] in the dtype of the parameters."""
    table = parameters["embedding"]["embedding"]
    x = table[tokens] + parameters["positions"]["embedding"][: tokens.shape[1]]
    x, _ = jax.lax.scan(lambda x, layer: (_layer(x, layer), None), x, parameters["layers"])
    x = _norm(x, parameters["norm"])
    head = parameters["head"]["kernel"] if "head" in parameters else table
    return x @ head[:vocab_size].T


def loss_sum(parameters, batch, vocab_size):
    """Sum over tokens of mask * nats, and the sum of the mask."""
    log_p = jax.nn.log_softmax(logits(parameters, batch["tokens"], vocab_size), axis=-1)
    nats = -jnp.take_along_axis(log_p, batch["targets"][..., None], axis=-1)[..., 0]
    return (nats * batch["mask"]).sum(), batch["mask"].sum()


def loss(parameters, batch, vocab_size):
    """Token-weighted mean over the whole batch."""
    total, tokens = loss_sum(parameters, batch, vocab_size)
    return total / tokens
