"""Fidelity of the codecs: its distributions, what it captures of a model, its figures against the oracle, its page."""

import copy
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from experiments import fidelity, step
from experiments import fidelity_data as data
from experiments.data import TrainingData, load_corpus, with_model_sizes
from experiments.rounding import all_reduce_snr_db, round_trip_snr_db
from experiments.sites import MESSAGES
from experiments.train import place
from taco_jax.models.decoder import LAYER_SITES
from taco_jax.models.families import graph_of, nnx
from taco_jax.sharding.mesh import make_mesh, parse_mesh
from taco_jax.sharding.tensor_parallel import SingleDevice

pytestmark = pytest.mark.usefixtures("quickly_compiled")
FEW = ("e4m3_block128", "int8_block128_hadamard")
SMALL = ("--codecs", *FEW, "--rows", "64", "--recipe", "tiny", "--steps", "0")


def power(x, axis=None):
    return np.mean(np.square(x, dtype=np.float64), axis=axis)


def test_distributions_are_what_they_say():
    found = {d.name: d for d in data.distributions(256, seed=3)}
    gaussian = found["gaussian"].values
    assert gaussian.shape == (256, 1024) and power(gaussian) == pytest.approx(1.0, rel=0.01)
    outliers = sorted(np.random.default_rng(0).choice(1024, 8, replace=False))
    assert sorted(found["outliers"].outliers) == outliers
    factor = found["outliers"].values / gaussian
    np.testing.assert_allclose(factor, np.where(np.isin(np.arange(1024), outliers), 50.0, 1.0) * np.ones((256, 1)))
    logs = [np.log(found[f"tokens_sigma{sigma}"].values / gaussian) for sigma in (1, 2)]
    np.testing.assert_allclose(logs[0], logs[0][:, :1] * np.ones(1024), atol=1e-4)
    np.testing.assert_allclose(logs[1], 2.0 * logs[0], atol=1e-4)
    assert abs(logs[0][:, 0].mean()) < 0.2 and logs[0][:, 0].std() == pytest.approx(1.0, abs=0.15)
    again = {d.name: d for d in data.distributions(256, seed=3)}
    assert all(np.array_equal(again[name].values, d.values) for name, d in found.items())
    assert not np.array_equal(next(data.distributions(256, seed=4)).values, gaussian)


def test_parts_cancel_as_far_as_they_say():
    parts = data.cancelling_parts(8, 1 << 14, seed=1)
    # The missing mean takes an eighth of a part's power.
    assert power(parts) == pytest.approx(7 / 8, rel=0.02)
    assert power(parts.sum(0, dtype=np.float64)) == pytest.approx(0.09, rel=0.03)
    assert power(data.gaussian_parts(8, 1 << 14, seed=1).sum(0)) == pytest.approx(8.0, rel=0.03)


def test_the_lowest_rows_are_a_percentile_of_rows_that_say_something():
    x = np.ones((201, 4))
    error = np.full((201, 1), 1e-3)
    error[:3] = [[0.1], [0.3], [0.01]]
    x[200] = 0.0
    assert fidelity.lowest_rows_db(x, x + error * (x != 0)) == pytest.approx(20.0)
    assert fidelity.lowest_rows_db(x, x) is None and fidelity.snr_db(x, x) is None
    assert fidelity.snr_db(x[:1], x[:1] * 0.9) == pytest.approx(20.0)


@pytest.mark.parametrize("name", ["e4m3_tensor", "int8_block128_hadamard"])
def test_figures_are_those_of_the_oracle(name):
    """And, of Gaussian values, those that integrating the rounding error gives."""
    codec = fidelity.CODECS[name]
    for sent in data.distributions(64, seed=5):
        alpha = 2.0 ** np.round(1.0 - 0.5 * np.log2(power(sent.values)))
        expected = oracles.snr_db(sent.values, oracles.round_trip(sent.values, codec, alpha))
        assert fidelity.snr_db(sent.values, fidelity.round_trip(sent.values, codec)) == pytest.approx(
            expected, abs=0.05
        )
        if sent.name == "gaussian":
            assert expected == pytest.approx(round_trip_snr_db(codec), abs=0.2)
    parts = data.gaussian_parts(4, 1 << 14, seed=5)
    alphas = [2.0 ** np.round(1.0 - 0.5 * np.log2(power(x))) for x in (parts, parts.sum(0))]
    total = parts.astype(np.float64).sum(0)
    expected = oracles.snr_db(total, oracles.all_reduce(parts, codec, alphas))
    assert fidelity.snr_db(total, fidelity.all_reduce(parts, codec)) == pytest.approx(expected, abs=0.05)
    assert expected == pytest.approx(all_reduce_snr_db(codec, 4), abs=0.3)


@pytest.fixture(scope="module")
def recorded():
    """The messages of a batch on four devices, and what made them."""
    config = dataclasses.replace(data.training("tiny", seed=0), dtype="float32")
    corpus = load_corpus(config.data)
    config = with_model_sizes(config, corpus)
    program = step.build(config, make_mesh(parse_mesh("tp4")))
    parameters = program.init(0)["params"]
    batch = TrainingData(corpus, config.data, 0)[0]
    return program, parameters, batch, data.recorder(program)(parameters, place(batch, program.batch_sharding))


def test_captured_messages_are_those_of_the_model(recorded):
    """Parts of the embedding are the table's rows; summed cotangents are gradients of the biases before the sites."""
    program, parameters, batch, found = recorded
    assert {site: tuple(ways) for site, ways in found.items()} == {s: tuple(sorted(w)) for s, w in MESSAGES.items()}
    message = (4, *batch["tokens"].shape, program.model_config.hidden_size)
    for site, ways in found.items():
        for parts in ways.values():
            layers = (program.model_config.num_layers,) if site in LAYER_SITES else ()
            assert parts.shape == (message[0], *layers, *message[1:])
            # Bytes have ids below 256: two of four devices hold no row that is read.
            sending = np.count_nonzero(power(parts, tuple(range(1, parts.ndim))))
            assert sending == (2 if site == "embedding" else 4)
    parameters = jax.tree.map(np.asarray, parameters)
    table = parameters["embedding"]["embedding"]
    np.testing.assert_array_equal(found["embedding"]["forward"].sum(0), table[batch["tokens"]])

    model = graph_of(program.model_config, shards=4, dtype="float32")

    @jax.jit
    @jax.grad
    def gradients(parameters):
        decoder, comm = nnx.merge(model, parameters), SingleDevice()
        x = decoder.run_layers(decoder.embed(batch["tokens"], comm), comm, remat=False)
        return jnp.mean(decoder.loss(x, batch["targets"], comm))

    expected = gradients(parameters)
    layers = expected["layers"]
    norms = {"attention": layers["attention_norm"], "mlp": layers["mlp_norm"], "head": expected["norm"]}
    for site, norm in norms.items():
        summed = found[site]["backward"].sum((0, -3, -2))
        error = np.linalg.norm(summed - norm["bias"]) / np.linalg.norm(norm["bias"])
        assert error <= 1e-5, (site, error)


def test_one_device_holds_the_sum_of_four_devices_parts(recorded):
    program, parameters, batch, found = recorded
    one = step.build(program.config, make_mesh(parse_mesh("tp1")))
    alone = data.recorder(one)(jax.tree.map(np.asarray, parameters), place(batch, one.batch_sharding))
    for site, ways in found.items():
        for way, parts in ways.items():
            assert oracles.snr_db(alone[site][way][0], parts.sum(0)) >= 90, (site, way)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Exit code, figures and plot of the command, small."""
    folder = tmp_path_factory.mktemp("fidelity")
    code = fidelity.main([*SMALL, f"--out={folder / 'out'}", f"--json={folder / 'figures.json'}"])
    return code, json.loads((folder / "figures.json").read_text()), folder / "out" / "fidelity.png"


def test_the_page_has_every_figure(page):
    code, found, plot = page
    assert [c["what"] for c in found["checks"] if not c["passed"]] == [] and code == 0
    assert plot.read_bytes().startswith(b"\x89PNG") and plot.stat().st_size > 20_000
    assert found.keys() == {
        "seed", "rows", "recipe", "steps", "jax", "roundtrip", "allreduce", "ablation", "captured", "checks"
    }  # fmt: skip
    assert (found["seed"], found["rows"], found["jax"]) == (0, 64, jax.__version__)
    assert {(r["codec"], r["distribution"]) for r in found["roundtrip"]} == {
        (codec, d.name) for codec in FEW for d in data.distributions(64, 0)
    }
    cases = {("gaussian", 2), ("gaussian", 4), ("gaussian", 8), ("cancelling", 8)}
    assert {(r["codec"], r["distribution"], r["ranks"]) for r in found["allreduce"]} == {
        (codec, *case) for codec in FEW for case in cases
    }
    places = {(site, way, layer) for site, ways in MESSAGES.items() for way in ways for layer in range(2)}
    places = {place for place in places if place[0] in LAYER_SITES or place[2] == 0}
    assert {(r["codec"], r["site"], r["direction"], r["layer"], r["step"]) for r in found["captured"]} == {
        (codec, *place, 0) for codec in FEW for place in places
    }
    for row in (*found["roundtrip"], *found["allreduce"], *found["captured"]):
        assert row["bytes_per_element"] == 1.0 + 2 / 128
        assert row["preset"] == {"e4m3_block128": "fp8", "int8_block128_hadamard": "int8"}[row["codec"]]
    for row in found["captured"]:
        # 8-bit floating point keeps the same of everything; integers lose where a block has outliers.
        low, high = {"e4m3_block128": (31, 33), "int8_block128_hadamard": (38, 46)}[row["codec"]]
        assert low <= row["roundtrip_snr_db"] <= high
        assert row["roundtrip_row_p1_db"] <= row["roundtrip_snr_db"] and row["sum_over_part"] > 0
    assert found["ablation"] == {"equal_codes": pytest.approx(1.0, abs=1e-4), "codes": 1 << 20}
    # Two Gaussian round trips, two of outliers, two codecs' four sums, and the codes without alpha.
    assert len(found["checks"]) == 2 + 2 + 2 * 4 + 1


def test_a_figure_that_is_off_is_named(page, tmp_path, monkeypatch, capsys):
    found = copy.deepcopy(page[1])
    found["roundtrip"][0]["snr_db"] -= 0.5
    monkeypatch.setattr(fidelity, "measure", lambda options: found)
    assert fidelity.main([*SMALL, f"--out={tmp_path}"]) == 1
    output = capsys.readouterr()
    assert output.err.count("\n") == 1 and output.err.startswith("round trip of e4m3_block128, gaussian (dB): 31.")
    for word in (*FEW, "fp8", "1.016", "attention backward", "cancelling", "without alpha", "fidelity.png"):
        assert word in output.out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--codecs", "int9"], "there is no 'int9'"),
        (["--rows", "8"], "--rows must be 64 to 16,384, got 8"),
        (["--recipe", "large"], "--recipe must be small or tiny, got 'large'"),
        (["--steps", "2000"], "--steps must be 0 to 1,000, got 2000"),
        (["--seed=-1"], "--seed must be 0 or more, got -1"),
        (["--out=/dev/null/figures"], "cannot write /dev/null/figures"),
        (["--rowz", "64"], "there is no option --rowz"),
    ],
)
def test_a_mistake_is_one_line(argv, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert fidelity.main(argv) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_what_is_missing_is_said_first(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(fidelity.importlib.util, "find_spec", lambda name: None)
    assert fidelity.main([f"--out={tmp_path / 'out'}"]) == 2
    assert "pip install taco_jax[plot]" in capsys.readouterr().err and not (tmp_path / "out").exists()
