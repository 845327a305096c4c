"""A Flax Linen transformer under `jax.shard_map`, on dp2,tp4: each device applies its part of every layer."""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import loop

HIDDEN, HEADS, SIZE, WIDE, LAYERS = 64, 4, 16, 256, 2
mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
columns, rows = P(None, "tp"), P("tp")
split = {"query": columns, "key": columns, "value": columns, "out": rows, "up": columns, "down": rows}
optimizer = optax.adam(5e-3)


def dense(features: int, name: str) -> nn.Dense:
    return nn.Dense(features, use_bias=False, kernel_init=nn.initializers.normal(0.1), name=name)


class Layer(nn.Module):
    """Linen checks shapes, so a layer is told over how many devices its features are split."""

    devices: int

    @nn.compact
    def __call__(self, x):
        heads, wide = HEADS // self.devices, WIDE // self.devices
        h = nn.RMSNorm()(x)
        qkv = (dense(heads * SIZE, name)(h).reshape(*h.shape[:2], heads, SIZE) for name in ("query", "key", "value"))
        y = jax.nn.dot_product_attention(*qkv, is_causal=True)
        x = x + lax.psum(dense(HIDDEN, "out")(y.reshape(*h.shape[:2], heads * SIZE)), "tp")
        h = nn.RMSNorm()(x)
        return x + lax.psum(dense(HIDDEN, "down")(nn.gelu(dense(wide, "up")(h))), "tp")


class Transformer(nn.Module):
    devices: int

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(256, HIDDEN)
        x = embed(tokens) + nn.Embed(loop.LENGTH, HIDDEN)(jnp.arange(tokens.shape[1]))
        for _ in range(LAYERS):
            x = Layer(self.devices)(x)
        return embed.attend(nn.RMSNorm()(x))


def loss(params, tokens):
    logits = Transformer(mesh.shape["tp"]).apply(params, tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return lax.pmean(jnp.mean(losses), "dp")


def setup():
    single = jax.make_mesh((1, 1), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:1])
    whole = jax.jit(jax.shard_map(Transformer(1).init, mesh=single, in_specs=P(), out_specs=P()))
    params = whole(jax.random.key(0), loop.batch(0)[:, :-1])
    specs = jax.tree.map_with_path(lambda path, _: split.get(path[-2].key, P()), params)
    mapped = jax.shard_map(loss, mesh=mesh, in_specs=(specs, P("dp")), out_specs=P())

    @jax.jit
    def step(state, tokens):
        value, grads = jax.value_and_grad(mapped)(state["params"], tokens)
        updates, opt = optimizer.update(grads, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    params = jax.device_put(params, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
    return step, {"params": params, "opt": optimizer.init(params)}


if __name__ == "__main__":
    loop.train(*setup())
