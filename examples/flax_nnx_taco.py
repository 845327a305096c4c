"""A Flax NNX transformer under `jax.shard_map`, on dp2,tp4: each device holds its columns and rows of the kernels."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import loop
import taco_jax

HIDDEN, HEADS, SIZE, WIDE, LAYERS = 64, 4, 16, 256, 2
mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
optimizer = optax.adam(5e-3)


def linear(inputs: int, outputs: int, spec: P, rngs: nnx.Rngs) -> nnx.Linear:
    init = nnx.with_partitioning(nnx.initializers.normal(0.1), spec)
    return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=init, rngs=rngs)


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        columns, rows = P(None, "tp"), P("tp")
        self.query, self.key, self.value = (linear(HIDDEN, HEADS * SIZE, columns, rngs) for _ in range(3))
        self.out = linear(HEADS * SIZE, HIDDEN, rows, rngs)
        self.up, self.down = linear(HIDDEN, WIDE, columns, rngs), linear(WIDE, HIDDEN, rows, rngs)
        self.norms = nnx.List(nnx.RMSNorm(HIDDEN, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        h = taco_jax.pvary(self.norms[0](x), "tp", name="attention")
        query, key, value = (f(h).reshape(*h.shape[:2], -1, SIZE) for f in (self.query, self.key, self.value))
        y = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + taco_jax.psum(self.out(y.reshape(*h.shape[:2], -1)), "tp", name="attention")
        h = taco_jax.pvary(self.norms[1](x), "tp", name="mlp")
        return x + taco_jax.psum(self.down(jax.nn.gelu(self.up(h))), "tp", name="mlp")


class Transformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(256, HIDDEN, rngs=rngs)
        self.positions = nnx.Embed(loop.LENGTH, HIDDEN, rngs=rngs)
        self.layers = nnx.List(Layer(rngs) for _ in range(LAYERS))
        self.norm = nnx.RMSNorm(HIDDEN, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(self.norm(x))


def setup():
    with jax.set_mesh(mesh):
        graph, params = nnx.split(Transformer(nnx.Rngs(0)))
    specs = nnx.get_partition_spec(params)

    def loss(params, tokens):
        logits = nnx.merge(graph, params)(tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return lax.pmean(jnp.mean(losses), "dp")

    loss = jax.shard_map(loss, mesh=mesh, in_specs=(specs, P("dp")), out_specs=P())

    @jax.jit
    def step(state, tokens):
        value, grads = jax.value_and_grad(loss)(state["params"], tokens)
        updates, opt = optimizer.update(grads, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    return step, {"params": params, "opt": optimizer.init(params)}


if __name__ == "__main__":
    loop.train(*setup())
