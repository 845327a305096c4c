"""Plain functions on a pytree under `jax.shard_map`: an MLP that reads the last eight bytes, on dp2,tp4."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import loop

CONTEXT, HIDDEN, WIDE, LAYERS = 8, 64, 256, 2
mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
specs = {"embed": P(), "up": P(None, None, "tp"), "down": P(None, "tp"), "head": P()}
optimizer = optax.adam(1e-2)


def norm(x):
    return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)


@functools.partial(jax.shard_map, mesh=mesh, in_specs=(specs, P("dp")), out_specs=P())
def loss(params, tokens):
    x = sum(jnp.roll(params["embed"][k][tokens[:, :-1]], k, axis=1) for k in range(CONTEXT))
    for up, down in zip(params["up"], params["down"], strict=True):
        h = norm(x)
        x = x + lax.psum(jax.nn.gelu(h @ up) @ down, "tp")
    logits = norm(x) @ params["head"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return lax.pmean(jnp.mean(losses[:, CONTEXT:]), "dp")


@jax.jit
def step(state, tokens):
    value, grads = jax.value_and_grad(loss)(state["params"], tokens)
    updates, opt = optimizer.update(grads, state["opt"])
    return dict(params=optax.apply_updates(state["params"], updates), opt=opt), value


def setup():
    normal = np.random.default_rng(0).standard_normal
    params = {
        "embed": normal((CONTEXT, 256, HIDDEN), np.float32) / 4,
        "up": normal((LAYERS, HIDDEN, WIDE), np.float32) / HIDDEN**0.5,
        "down": normal((LAYERS, WIDE, HIDDEN), np.float32) / WIDE**0.5,
        "head": normal((HIDDEN, 256), np.float32) / HIDDEN**0.5,
    }
    params = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in params.items()}
    state = dict(params=params, opt=optimizer.init(params))
    return step, state


if __name__ == "__main__":
    loop.train(*setup())
