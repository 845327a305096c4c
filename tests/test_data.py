import functools
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gpt2 import gpt2_folder
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from trainer import free_port

from experiments.config import ConfigError, DataConfig
from experiments.data import TrainingData, load_corpus, validation_batches
from experiments.recipes import RECIPES
from experiments.train import place_rows
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
    data = TrainingData(load_corpus(config), config, seed=0)
    batch = data[5]
    sharding = NamedSharding(make_mesh(parse_mesh(mesh)), P("dp", None))
    placed = place_rows(functools.partial(data.rows, 5), batch["tokens"].shape, sharding)
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


NAMES = ("tokens", "targets", "mask")


@pytest.mark.parametrize(
    ("recipe", "seed", "training", "validation"),
    [
        ("main", 0, "265f2dcfc5738dfe16610cc288ffec1a49182acd60d1a4f183c0e25d9bbf2143", "f78a4b04059dae04"),
        ("small", 7, "a06a5c43edec5ba2f2d23a7f3ebb4575d9336788d6af4e1f770e4a5dfb98d19a", "23111775dbf46879"),
        ("tiny", 0, "1df417eac51a9e0da944710430f00b3320ba18b02c8188c672e813ffd236327c", "b9738c782b69996d"),
    ],
)
def test_batches_of_the_shipped_text_are_those_of_earlier_versions(recipe, seed, training, validation):
    """So that their runs resume; the digests were taken when a single text of bytes was all there was."""
    config = RECIPES[recipe]().data
    corpus = load_corpus(config)
    hashed = hashlib.sha256()
    data = TrainingData(corpus, config, seed)
    for step in (*range(8), 5000, 123456):
        for array in (data[step][name] for name in NAMES):
            hashed.update(str((array.dtype, array.shape)).encode() + array.tobytes())
    assert hashed.hexdigest() == training
    arrays = [batch[name] for batch in validation_batches(corpus, config, 8) for name in NAMES]
    assert hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest().startswith(validation)


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """Three texts in the current folder; a byte tells its text, a window of 17 bytes its place."""
    monkeypatch.chdir(tmp_path)
    for i, windows in enumerate((40, 100, 260)):
        ids = 80 * i + np.arange(16 * windows + 400) // 16 % 80
        Path("abc"[i]).write_bytes(ids.astype(np.uint8).tobytes())
    return tmp_path


def mixed(path: str, **fields) -> DataConfig:
    return DataConfig(path=path, **{"sequence_length": 16, "batch_size": 4, "validation_fraction": 0.1} | fields)


def counts(rows: np.ndarray) -> np.ndarray:
    """How many rows come from each text."""
    return np.bincount(rows[:, 0] // 80, minlength=3)


def rows_of(config: DataConfig, seed: int, steps: range) -> np.ndarray:
    data = TrainingData(load_corpus(config), config, seed)
    return np.concatenate([data[step]["tokens"] for step in steps])


@pytest.mark.parametrize(
    ("path", "weights"),
    [
        ("a:0.7,b:0.3", [0.7, 0.3, 0]),
        ("a:5,b:3,c:2", [0.5, 0.3, 0.2]),
        ("c:0.001,a:0.999", [0.999, 0, 0.001]),
        ("b,a,c", [1040 / 7600, 2000 / 7600, 4560 / 7600]),
    ],
)
def test_sources_have_their_shares_of_any_first_sequences(texts, path, weights):
    assert sum(source.weight for source in load_corpus(mixed(path)).sources) == pytest.approx(1)
    rows = rows_of(mixed(path, batch_size=50), 1, range(20))
    for n in (40, 333, 1000):
        expected = np.multiply(weights, n)
        assert (np.abs(counts(rows[:n]) - expected) <= 0.01 * expected + 1.5).all(), (counts(rows[:n]), expected)


def test_each_source_is_read_through_once_before_it_repeats(texts):
    rows = rows_of(mixed("a:1,b:1"), 3, range(100))
    a = rows[rows[:, 0] < 80]
    windows = (936 - 1) // 16
    places = sorted(range(windows))
    assert sorted(a[:windows, 0]) == places and sorted(a[windows : 2 * windows, 0]) == places
    assert (a[:windows, 0] != a[windows : 2 * windows, 0]).any()


def test_sources_of_one_length_are_shuffled_differently(texts):
    Path("d").write_bytes((80 + np.frombuffer(Path("a").read_bytes(), np.uint8)).astype(np.uint8).tobytes())
    rows = rows_of(mixed("a:1,d:1"), 3, range(20))
    a, d = rows[rows[:, 0] < 80][:, 0], rows[rows[:, 0] >= 80][:, 0] - 80
    assert len(a) == len(d) and np.mean(a == d) < 0.3


@pytest.mark.parametrize("mesh", ["dp2,pp2,tp2", "dp4"])
def test_a_mixed_batch_depends_on_seed_and_k_alone(texts, mesh):  # T5
    config = mixed("a:0.7,b:0.2,c:0.1")
    corpus = load_corpus(config)
    in_order = TrainingData(corpus, config, seed=7)
    seen = [in_order[step] for step in range(60)]
    resumed = TrainingData(load_corpus(config), config, seed=7)
    sharding = NamedSharding(make_mesh(parse_mesh(mesh)), P("dp", None))
    placed = place_rows(functools.partial(resumed.rows, 55), resumed[55]["tokens"].shape, sharding)
    for name in NAMES:
        np.testing.assert_array_equal(placed[name], seen[55][name])
    assert (TrainingData(corpus, config, seed=8)[3]["tokens"] != seen[3]["tokens"]).any()


_PROCESS = """
import sys, jax, numpy as np
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
assert (jax.local_device_count(), jax.device_count()) == (2, 4)
from jax.sharding import NamedSharding, PartitionSpec as P
from experiments.config import DataConfig
from experiments.data import TrainingData, load_corpus
from experiments.train import place_rows
from taco_jax.sharding.mesh import make_mesh, parse_mesh
config = DataConfig(path=sys.argv[3], sequence_length=16, batch_size=4, validation_fraction=0.1)
sharding = NamedSharding(make_mesh(parse_mesh("dp4")), P("dp", None))
data, read = TrainingData(load_corpus(config), config, seed=7), []

def rows(start, stop):
    read.extend(range(start, stop))
    return data.rows(55, start, stop)

tokens = place_rows(rows, (4, 16), sharding)["tokens"]
assert read == [2 * int(sys.argv[2]), 2 * int(sys.argv[2]) + 1], read
rows = {str(shard.index[0].start): np.asarray(shard.data) for shard in tokens.addressable_shards}
np.savez(f"rows{sys.argv[2]}.npz", **rows)
"""


def test_two_processes_see_the_tokens_of_one(texts):  # T5
    address = f"localhost:{free_port()}"
    path = "a:0.7,b:0.2,c:0.1"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    processes = [
        subprocess.Popen([sys.executable, "-c", _PROCESS, address, str(i), path], env=environment) for i in range(2)
    ]
    try:
        assert [process.wait(timeout=120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    rows = dict(np.load("rows0.npz")) | dict(np.load("rows1.npz"))
    assert sorted(rows) == ["0", "1", "2", "3"] and len(np.load("rows0.npz").files) == 2
    expected = TrainingData(load_corpus(mixed(path)), mixed(path), seed=7)[55]["tokens"]
    np.testing.assert_array_equal(np.concatenate([rows[name] for name in sorted(rows)]), expected)


def test_validation_windows_have_their_shares_too(texts):
    config = mixed("a:0.5,b:0.25,c:0.25")
    (batch,) = validation_batches(load_corpus(config), config, count=1)
    assert counts(batch["tokens"]).tolist() == [2, 1, 1] and batch["mask"].all()
    # As many as there are: 104, 200 and 456 bytes have 6, 12 and 28 windows.
    every = validation_batches(load_corpus(config), config, count=1000)
    rows = np.concatenate([batch["tokens"] for batch in every])
    assert counts(rows[np.concatenate([batch["mask"][:, 0] for batch in every]) > 0]).tolist() == [6, 12, 28]
    # A weight too small for one window still has it.
    config = mixed("a:0.99,b:0.005,c:0.005")
    (batch,) = validation_batches(load_corpus(config), config, count=1)
    assert counts(batch["tokens"]).tolist() == [2, 1, 1]


def test_a_mixed_corpus_is_known_by_its_texts_and_weights(texts):
    digests = [load_corpus(mixed(path)).digest for path in ("a", "a:3", "a:0.7,b:0.3", "a:7,b:3", "b:3,a:7", "a:1,b:1")]
    assert digests[0] == digests[1] == hashlib.sha256(Path("a").read_bytes()).hexdigest()
    assert digests[2] == digests[3] and len(set(digests)) == 4


def test_the_log_names_every_source_its_share_and_its_split(texts):
    lines = load_corpus(mixed("a:0.7,b:0.3")).describe().splitlines()
    assert lines == [
        "a (70.0% of the sequences): training bytes 0..935, validation bytes 936..1,039",
        "b (30.0% of the sequences): training bytes 0..1,799, validation bytes 1,800..1,999",
    ]


def test_tokens_have_a_loss_per_token_and_per_byte(texts):
    Path("x.txt").write_text("Hello world" * 100)
    bytewise = load_corpus(mixed("x.txt"))
    assert (bytewise.unit, bytewise.format_loss(2.5)) == ("nats/byte", "2.5000 nats/byte")
    corpus = load_corpus(mixed("x.txt", tokenizer=str(gpt2_folder())))
    tokens = len(corpus.train) + len(corpus.validation)
    bits = 2.5 / np.log(2) * tokens / 1100
    assert corpus.unit == "nats/token"
    assert corpus.format_loss(2.5) == f"2.5000 nats/token ({bits:.4f} bits/byte at {1100 / tokens:.3f} bytes/token)"
    assert "tokenizer " in corpus.describe() and f"training tokens 0..{len(corpus.train) - 1}" in corpus.describe()


def test_the_tokenizer_and_the_field_change_what_a_text_is(texts):
    Path("x.txt").write_text("Hello world" * 100)
    Path("x.jsonl").write_text("".join(json.dumps({"text": "Hello world " * i}) + "\n" for i in range(40)))
    for name in ("x.txt", "x.jsonl"):
        assert load_corpus(mixed(name)).digest != load_corpus(mixed(name, tokenizer=str(gpt2_folder()))).digest
