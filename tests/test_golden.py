"""The models against what Hugging Face's own code computed of the same weights in float64."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from taco_jax.models.families import graph_of
from taco_jax.models.huggingface import from_tensors, to_tensors
from taco_jax.models.huggingface_config import read_config
from taco_jax.sharding.tensor_parallel import SingleDevice

GOLDEN = Path(__file__).parent / "golden"

pytestmark = pytest.mark.usefixtures("quickly_compiled")


@pytest.mark.parametrize("name", ["gpt2-tiny", "qwen2-tiny", "qwen2-tied-tiny", "qwen3-tiny"])
def test_logits_loss_and_every_gradient(name):
    """Float32 errs by 3e-6, of a logit and relative to a tensor's largest derivative; an exact GELU by 7e-4."""
    config = read_config(json.loads((GOLDEN / name / "config.json").read_text()))
    tensors, expected = (load_file(GOLDEN / name / f"{file}.safetensors") for file in ("model", "expected"))
    tokens = expected["input_ids"].astype(np.int32)

    def loss(parameters):
        model, comm = nnx.merge(graph_of(config, shards=0, dtype="float32"), parameters), SingleDevice()
        x = model.run_layers(model.embed(tokens, comm), comm)
        return jnp.mean(model.loss(x[:, :-1], tokens[:, 1:], comm)), model.logits(x, comm)

    parameters = from_tensors(config, tensors.__getitem__)
    with jax.default_matmul_precision("highest"):
        (value, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(parameters)
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(value, expected["loss"][0], rtol=1e-6)
    found = dict(to_tensors(config, gradients))
    assert {f"grad/{tensor}" for tensor in found} == {key for key in expected if key.startswith("grad/")}
    for tensor, gradient in found.items():
        want = expected[f"grad/{tensor}"]
        np.testing.assert_allclose(gradient, want, rtol=0, atol=1e-5 * np.abs(want).max(), err_msg=tensor)
