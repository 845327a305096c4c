"""The FLOPs of a step against XLA's count of a compiled gradient and against a walk over its jaxpr."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from experiments.flops import PEAK_FLOPS, Throughput, format_flops, peak_flops, training_flops_per_token
from taco_jax.models.config import ModelConfig
from taco_jax.models.families import graph_of, init_parameters
from taco_jax.sharding.tensor_parallel import SingleDevice

BATCH, SEQUENCE = 2, 256
SHAPE = (BATCH, SEQUENCE)


def gradient(config: ModelConfig):
    """Return the traced gradient of the mean loss of one batch, nothing recomputed."""
    parameters = jax.eval_shape(functools.partial(init_parameters, config), 0)
    comm = SingleDevice()

    def loss(parameters, tokens, targets):
        model = nnx.merge(graph_of(config), parameters)
        x = model.run_layers(model.embed(tokens, comm), comm, remat=False)
        return jnp.mean(model.loss(x, targets, comm))

    ids = jax.ShapeDtypeStruct(SHAPE, jnp.int32)
    return jax.jit(jax.grad(loss)).trace(parameters, ids, ids)


def config(num_layers: int, **changes) -> ModelConfig:
    return ModelConfig(
        num_layers=num_layers, hidden_size=512, num_heads=8, vocab_size=1024, max_positions=SEQUENCE, **changes
    )


def dot_flops(jaxpr) -> int:
    """Return 2 x output x contracted over the matrix products of a jaxpr, times the lengths of its scans."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2 * equation.outvars[0].aval.size * math.prod(left[i] for i in contracted)
        times = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        inner = [value for value in equation.params.values() if hasattr(value, "eqns") or hasattr(value, "jaxpr")]
        total += times * sum(dot_flops(getattr(value, "jaxpr", value)) for value in inner)
    return total


def test_flops_of_one_layer_are_those_that_xla_counts():
    # XLA counts the body of a loop once, so there is one layer; it also counts what is no matrix product: 3 %.
    model = config(num_layers=1, intermediate_size=1536)
    counted = gradient(model).lower().cost_analysis()["flops"]
    assert counted == pytest.approx(BATCH * SEQUENCE * training_flops_per_token(model, SEQUENCE), rel=0.03)


def test_flops_of_several_layers_are_those_of_the_matrix_products():
    model = config(num_layers=3, intermediate_size=1536, tie_embeddings=False)
    expected = BATCH * SEQUENCE * training_flops_per_token(model, SEQUENCE)
    assert dot_flops(gradient(model).jaxpr.jaxpr) == expected


def test_flops_of_grouped_heads_and_swiglu_are_those_of_the_matrix_products():
    model = config(num_layers=2, family="qwen", num_kv_heads=2, head_dim=96, intermediate_size=1408, qk_norm=True)
    expected = BATCH * SEQUENCE * training_flops_per_token(model, SEQUENCE)
    assert dot_flops(gradient(model).jaxpr.jaxpr) == expected


def test_flops_of_gpt3_are_those_of_its_paper():
    # Brown et al. 2020, table D.1: 3.14e23 FLOPs for 300e9 tokens, which leaves out the attention's own products.
    gpt3 = ModelConfig(num_layers=96, hidden_size=12288, num_heads=96, vocab_size=50257, max_positions=2048)
    assert 300e9 * training_flops_per_token(gpt3, 0) == pytest.approx(3.14e23, rel=0.01)


@pytest.mark.parametrize(
    ("device_kind", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA B200", 2250e12),
        ("TPU v4", 275e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5p", 459e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H1000", None),
        ("TPU v4 lite", None),
        ("cpu", None),
    ],
)
def test_peak_of_a_device(device_kind, peak):
    assert peak_flops(device_kind) == peak


def test_every_known_device_finds_its_own_peak():
    assert {name: peak_flops(name) for name in PEAK_FLOPS} == PEAK_FLOPS


def test_throughput_is_per_device_and_has_an_mfu_only_with_a_peak():
    metrics = Throughput(flops_per_step=8e12, num_devices=4, peak=10e12).metrics(seconds=0.5)
    assert metrics == pytest.approx({"tflops_per_device": 4.0, "mfu": 0.4})
    assert Throughput(8e12, 4).metrics(0.5).keys() == {"tflops_per_device"}


@pytest.mark.parametrize(
    ("tflops", "text"),
    [(413.4, "413 TFLOP/s"), (1234.0, "1234 TFLOP/s"), (0.9996, "1 TFLOP/s"), (0.0213, "21.3 GFLOP/s"),
     (8.52e-5, "85.2 MFLOP/s"), (3e-8, "30 kFLOP/s")],
)  # fmt: skip
def test_flops_are_written_with_three_digits(tflops, text):
    assert format_flops(tflops) == text
