"""Every model equals Hugging Face's transformers, which computed what is expected in float64, on every mesh."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_models import NAMES, batch_of, golden, placed, program_on, without_padding
from oracles import snr_db

from experiments.generation import Generator, Sampling
from taco_jax.models.huggingface import to_tensors

pytestmark = pytest.mark.usefixtures("quickly_compiled")

MESHES = {name: ("dp1,pp1,tp1", "dp1,pp2,tp2", "dp2,pp1,tp4") for name in NAMES}
# Five heads, one key head, three layers: one padded head of six, three of eight.
MESHES["qwen2-tied-tiny"] = ("dp1,pp1,tp2", "dp1,pp3,tp1", "dp2,pp1,tp4")
SLOW_MESHES = {
    name: ("dp1,pp4,tp1", "dp1,pp1,tp8", "dp1,pp1,tp2", "dp1,pp1,tp3", "dp1,pp2,tp4", "dp2,pp2,tp2", "dp2,pp1,tp3")
    for name in NAMES
}
SLOW_MESHES["qwen2-tied-tiny"] = (
    "dp1,pp1,tp1", "dp1,pp1,tp8", "dp1,pp1,tp3", "dp1,pp3,tp2", "dp2,pp1,tp2", "dp2,pp3,tp1", "dp1,pp1,tp6",
)  # fmt: skip
CASES = [
    *(pytest.param(name, mesh) for name in NAMES for mesh in MESHES[name]),
    *(pytest.param(name, mesh, marks=pytest.mark.slow) for name in NAMES for mesh in SLOW_MESHES[name]),
]


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_logits_loss_and_gradients(name, mesh):
    """M3, M4, M5, M14, C11: a wrong GELU moves the logits by 6.6e-4, a gradient summed twice by its own size."""
    config, _, expected = golden(name)
    program = program_on(name, mesh)
    parameters = placed(name, program)
    batch = jax.device_put(batch_of(name), program.batch_sharding)
    sums, gradients, _ = jax.jit(program.loss_and_gradients)(parameters, {}, batch)
    assert float(sums["loss"]) == pytest.approx(float(expected["loss"].item()), abs=3e-6)
    gradients, in_padding = without_padding(gradients, config)
    assert in_padding == 0
    wanted = {key.removeprefix("grad/"): value for key, value in expected.items() if key.startswith("grad/")}
    found = dict(to_tensors(config, gradients))
    assert found.keys() == wanted.keys()
    norm = np.sqrt(sum(np.vdot(g, g) for g in wanted.values()))
    for tensor, gradient in wanted.items():
        error = np.linalg.norm(found[tensor] - gradient)
        assert error <= 1e-5 * np.linalg.norm(gradient) + 1e-7 * norm, tensor
    assert float(sums["grad_norm"]) == pytest.approx(norm, rel=1e-5)
    logits = program.logits({"params": parameters, "scales": {}}, expected["input_ids"].astype(np.int32))
    assert np.abs(np.asarray(logits) - expected["logits"]).max() <= 2e-5


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_greedy_continuation(name, mesh):
    config, _, expected = golden(name)
    program = program_on(name, mesh)
    prompt, continued = np.split(expected["greedy"].reshape(-1), [5])
    generator = Generator(program, np.ones(config.vocab_size, bool), length=20, sampling=Sampling(temperature=0))
    tokens = generator.generate({"params": placed(name, program), "scales": {}}, prompt.tolist())
    assert list(itertools.islice(tokens, len(continued))) == continued.tolist()


@pytest.mark.parametrize(("compression", "low", "high"), [("taco", 20, 32), ("int8", 32, 44)])
@pytest.mark.parametrize("name", ["gpt2-tiny", "qwen3-tiny"])
def test_signal_to_noise_of_compressed_logits(name, compression, low, high, record_property):
    """Of eight compressed all-reduces and the embedding, in dB; one alone has 28 (taco) and 40 (int8)."""
    _, _, expected = golden(name)
    program = program_on(name, "dp1,pp2,tp2", compression)
    state = {"params": placed(name, program), "scales": program.init_scales()}
    if compression == "taco":
        moments = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), program.abstract_state()["opt_state"])
        moments = jax.device_put(moments, program.state_shardings["opt_state"])
        batch = jax.device_put(batch_of(name), program.batch_sharding)
        state = program.calibrate({**state, "opt_state": moments}, batch)
    found = snr_db(expected["logits"], np.asarray(program.logits(state, expected["input_ids"].astype(np.int32))))
    record_property("snr_db", found)
    print(f"logits of {name} with {compression}: {found:.1f} dB")
    assert low < found < high
