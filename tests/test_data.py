import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.config import ConfigError, DataConfig
from experiments.data import TrainingData, load_corpus, validation_batches
from experiments.train import place
from taco_jax.sharding.mesh import make_mesh, parse_mesh


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(i % 251 for i in range(1000)))
    return DataConfig(path=str(path), sequence_length=16, batch_size=4, validation_fraction=0.25)


def test_the_shipped_text_is_split_by_position():
    corpus = load_corpus(DataConfig())
    assert b"In the beginning God created" in corpus.train[:40].tobytes()
    assert len(corpus.train) == 4_084_646 and len(corpus.validation) == 214_981
    assert "4,084,646" in corpus.describe()


def test_a_file_is_read_as_bytes(config):
    corpus = load_corpus(config)
    assert (len(corpus.train), len(corpus.validation)) == (750, 250)
    assert corpus.validation[0] == 750 % 251


def test_targets_are_the_next_tokens(config):
    data = TrainingData(load_corpus(config), config, seed=0)
    batch = data[0]
    assert {name: (array.shape, array.dtype) for name, array in batch.items()} == {
        "tokens": ((4, 16), np.int32),
        "targets": ((4, 16), np.int32),
        "mask": ((4, 16), np.float32),
    }
    np.testing.assert_array_equal(batch["targets"], (batch["tokens"] + 1) % 251)
    assert (batch["mask"] == 1).all()


def test_batch_k_depends_on_seed_and_k_alone(config):  # T5
    corpus = load_corpus(config)
    in_order = TrainingData(corpus, config, seed=7)
    seen = [in_order[step] for step in range(30)]
    resumed = TrainingData(corpus, config, seed=7)
    np.testing.assert_array_equal(resumed[25]["tokens"], seen[25]["tokens"])
    np.testing.assert_array_equal(resumed[3]["tokens"], seen[3]["tokens"])
    assert (TrainingData(corpus, config, seed=8)[3]["tokens"] != seen[3]["tokens"]).any()


def test_an_epoch_holds_every_window_once_and_the_next_has_another_order(config):
    corpus = load_corpus(config)
    data = TrainingData(corpus, config, seed=0)
    windows = (len(corpus.train) - 1) // 16
    first = np.concatenate([data[step]["tokens"][:, 0] for step in range(2 * windows // 4 + 1)])
    expected = sorted(16 * i % 251 for i in range(windows))
    assert sorted(first[:windows]) == expected
    assert sorted(first[windows : 2 * windows]) == expected
    assert (first[:windows] != first[windows : 2 * windows]).any()


@pytest.mark.parametrize("mesh", ["dp2,pp2,tp2", "dp4"])
def test_every_mesh_sees_the_same_tokens(config, mesh):  # T5
    batch = TrainingData(load_corpus(config), config, seed=0)[5]
    placed = place(batch, NamedSharding(make_mesh(parse_mesh(mesh)), P("dp", None)))
    for name, rows in batch.items():
        np.testing.assert_array_equal(placed[name], rows)
    assert placed["tokens"].addressable_shards[0].data.shape[0] < 4


def test_validation_batches_are_fixed_and_counted_once(config):
    batches = validation_batches(load_corpus(config), config, count=100)
    windows = (250 - 1) // 16
    assert [batch["tokens"].shape for batch in batches] == [(4, 16)] * 4
    assert sum(batch["mask"].sum() for batch in batches) == 16 * windows
    again = validation_batches(load_corpus(config), config, count=100)
    np.testing.assert_array_equal(batches[1]["tokens"], again[1]["tokens"])


def test_few_validation_batches_spread_over_the_text(config):
    (batch,) = validation_batches(load_corpus(config), config, count=1)
    starts = (batch["tokens"][:, 0] - 750 % 251) % 251
    assert starts[0] == 0 and starts[-1] == 16 * 14 and (np.diff(starts) > 16).all()


def test_a_file_that_is_too_short_is_a_mistake_with_numbers(tmp_path):
    path = tmp_path / "short.txt"
    path.write_bytes(b"x" * 60)
    with pytest.raises(ConfigError, match=r"60 bytes split into 45 for training and 15 .* each needs 17"):
        load_corpus(DataConfig(path=str(path), sequence_length=16, validation_fraction=0.25))


def test_the_shortest_usable_file(tmp_path):
    path = tmp_path / "short.txt"
    path.write_bytes(b"x" * 68)
    config = DataConfig(path=str(path), sequence_length=16, batch_size=3, validation_fraction=0.25)
    corpus = load_corpus(config)
    assert TrainingData(corpus, config, seed=0)[9]["tokens"].shape == (3, 16)
    assert validation_batches(corpus, config, count=2)[0]["mask"].sum() == 16


def test_an_unreadable_file_is_a_mistake(tmp_path):
    for path in (tmp_path, tmp_path / "missing.txt"):
        with pytest.raises(ConfigError, match=f"cannot read --data={path}: "):
            load_corpus(DataConfig(path=str(path)))
