"""A transformer that XLA partitions: `jax.jit` with the shardings of its parameters, on dp2,tp4."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import loop
import taco_jax

HIDDEN, HEADS, SIZE, WIDE, LAYERS = 64, 4, 16, 256, 2
mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
columns, rows = P(None, None, "tp"), P(None, "tp")
shapes = {
    "query": ((LAYERS, HIDDEN, HEADS, SIZE), columns),
    "key": ((LAYERS, HIDDEN, HEADS, SIZE), columns),
    "value": ((LAYERS, HIDDEN, HEADS, SIZE), columns),
    "out": ((LAYERS, HEADS, SIZE, HIDDEN), rows),
    "up": ((LAYERS, HIDDEN, WIDE), columns),
    "down": ((LAYERS, WIDE, HIDDEN), rows),
    "embed": ((256, HIDDEN), P()),
    "positions": ((loop.LENGTH, HIDDEN), P()),
}
optimizer = optax.adam(5e-3)
split = {"mesh": mesh, "batch_spec": P("dp")}


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)


def layer(x, p):
    h = norm(x)
    query, key, value = taco_jax.column_parallel(h, (p["query"], p["key"], p["value"]), name="attention", **split)
    y = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    x = x + taco_jax.row_parallel(y, p["out"], name="attention", **split)
    h = jax.nn.gelu(taco_jax.column_parallel(norm(x), p["up"], name="mlp", **split))
    return x + taco_jax.row_parallel(h, p["down"], name="mlp", **split), None


def loss(params, tokens):
    tokens = jax.lax.with_sharding_constraint(tokens, NamedSharding(mesh, P("dp")))
    x = params["embed"][tokens[:, :-1]] + params["positions"]
    x, _ = jax.lax.scan(layer, x, {name: p for name, p in params.items() if name not in ("embed", "positions")})
    logits = norm(x) @ params["embed"].T
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))


@jax.jit
def step(state, tokens):
    value, grads = jax.value_and_grad(loss)(state["params"], tokens)
    updates, opt = optimizer.update(grads, state["opt"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value


def setup():
    rng, params = np.random.default_rng(0), {}
    for name, (shape, spec) in shapes.items():
        params[name] = jax.device_put(0.1 * rng.standard_normal(shape, np.float32), NamedSharding(mesh, spec))
    return step, {"params": params, "opt": optimizer.init(params)}


if __name__ == "__main__":
    loop.train(*setup())
