import dataclasses
import json
import shutil
import subprocess
import sys
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.checkpoint import CheckpointError, Checkpoints, Position
from experiments.checksum import checksums
from experiments.config import CheckpointConfig, ConfigError, TrainConfig
from taco_jax.sharding.mesh import make_mesh, parse_mesh

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam())


def new_state(scales: bool = True):
    parameters = {"kernel": jnp.arange(64.0).reshape(4, 16), "bias": jnp.ones(3)}
    moments = OPTIMIZER.update(parameters, OPTIMIZER.init(parameters))[1]
    return {"params": parameters, "opt_state": moments, "scales": {"mlp": jnp.full((4, 2), 0.5)} if scales else {}}


def shardings(state, mesh: str):
    """Kernels over pp and tp, the rest replicated."""
    devices = make_mesh(parse_mesh(mesh))
    return jax.tree.map(lambda x: NamedSharding(devices, P("pp", "tp") if x.shape == (4, 16) else P()), state)


def abstract(state, mesh: str):
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings(state, mesh))


def position(step: int) -> Position:
    return Position(step, dataclasses.asdict(TrainConfig()), "digest")


def write(folder, *steps: int, keep: int = 3, mesh: str = "dp2,pp2,tp2"):
    """Save the state of each step, every value of which is the first one's plus the step."""
    first = new_state()
    with Checkpoints(folder, CheckpointConfig(keep=keep)) as checkpoints:
        for step in steps:
            state = jax.tree.map(lambda x, step=step: x + step, first)
            checkpoints.save(position(step), jax.device_put(state, shardings(state, mesh)))
    return first


@pytest.mark.parametrize("mesh", ["tp2", "dp1", "dp4,pp2"])
def test_a_checkpoint_moves_to_another_mesh(tmp_path, mesh):  # K1
    first = write(tmp_path / "c", 2, mesh="dp4,pp2")
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        target = abstract(first, mesh)
        state, found = checkpoints.restore(target)
    assert found == position(2)
    chex.assert_trees_all_equal(state, jax.tree.map(lambda x: x + 2, first))
    chex.assert_trees_all_equal_structs(state, first)
    assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, target)


def test_a_saved_state_may_be_donated(tmp_path):
    state = jax.device_put(new_state(), shardings(new_state(), "dp2,pp2,tp2"))
    advance = jax.jit(lambda state: jax.tree.map(lambda x: x * 2 + 1, state), donate_argnums=0)
    wanted = jax.tree.map(np.array, state)
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        checkpoints.save(position(1), state)
        for _ in range(3):
            state = advance(state)
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        restored, _ = checkpoints.restore(abstract(wanted, "dp1"))
    chex.assert_trees_all_equal(restored, wanted)


def test_the_last_ones_are_kept(tmp_path):
    write(tmp_path / "c", 1, 2, 3, 4, keep=2)
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["3", "4"]


def test_an_empty_folder_has_nothing_to_restore(tmp_path):
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        assert checkpoints.latest() is None
        assert checkpoints.restore(abstract(new_state(), "dp1")) is None


def test_no_scales_are_a_state_too(tmp_path):
    state = new_state(scales=False)
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        checkpoints.save(position(1), state)
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        restored, _ = checkpoints.restore(abstract(state, "tp2"))
    chex.assert_trees_all_equal(restored, state)


def test_a_kill_in_the_middle_of_saving_leaves_the_one_before(tmp_path):  # K3
    folder = tmp_path / "c"
    first = write(folder, 1, 2)
    # Orbax writes under such a name and renames at the end.
    (folder / "2").rename(folder / "2.orbax-checkpoint-tmp")
    with Checkpoints(folder, CheckpointConfig()) as checkpoints:
        state, found = checkpoints.restore(abstract(first, "dp1"))
        assert found.step == 1
        checkpoints.save(position(2), jax.tree.map(lambda x: x + 9, state))
    with Checkpoints(folder, CheckpointConfig()) as checkpoints:
        state, found = checkpoints.restore(abstract(first, "dp1"))
    assert found.step == 2
    chex.assert_trees_all_equal(state, jax.tree.map(lambda x: (x + 1) + 9, first))


# Threads of a failed read complain on standard error after the read has been given up, so another process reads.
READ_DAMAGED = """
import json, logging, pathlib, random, shutil, sys
import jax, numpy as np
from experiments.checkpoint import CheckpointError, Checkpoints, Position
from experiments.checksum import checksums
from experiments.config import CheckpointConfig
from experiments.metrics import start_logging

start_logging()
logging.getLogger("experiments").setLevel("WARNING")
root = pathlib.Path(sys.argv[1])
device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
state = {"x": np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32), "n": np.int32(3)}
target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), state)

with Checkpoints(root / "whole", CheckpointConfig()) as checkpoints:
    for step in 1, 2:
        checkpoints.save(Position(step, {}, ""), jax.device_put({**state, "n": np.int32(step)}, device))

random.seed(0)
files = sorted(p.relative_to(root / "whole/2") for p in (root / "whole/2").rglob("*") if p.is_file())
for damage in "flip", "flip", "truncate", "empty":
    for file in files:
        folder = root / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(root / "whole", folder)
        content = bytearray((folder / "2" / file).read_bytes())
        if damage == "flip" and content:
            content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        content = {"flip": content, "truncate": content[: len(content) // 2], "empty": b""}[damage]
        (folder / "2" / file).write_bytes(content)
        with Checkpoints(folder, CheckpointConfig()) as checkpoints:
            checkpoints.latest()
            restored, position = checkpoints.restore(target)
        equal = (np.asarray(restored["x"]) == state["x"]).all() and restored["n"] == position.step
        print("result " + json.dumps([damage, str(file), position.step, bool(equal)]))
"""


def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_used(tmp_path):  # K4
    command = [sys.executable, "-c", READ_DAMAGED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    unreadable = f"checkpoint {tmp_path / 'damaged/2'} cannot be read, trying the one before it: "
    fell_back = []
    for line, before in zip(lines, ["", *lines], strict=False):
        if not line.startswith("result "):
            continue
        damage, file, step, equal = json.loads(line.removeprefix("result "))
        assert equal, f"{damage} of {file}: other values than were saved"
        # One line, if it cannot be read, and none otherwise.
        assert before.startswith(unreadable) == (step == 1), f"{damage} of {file}: {before}"
        fell_back += [(damage, "position" if file.startswith("position") else "state")] * (step == 1)
    assert len(lines) - len(fell_back) == sum(line.startswith("result ") for line in lines)
    assert {*fell_back} >= {(d, part) for d in ("flip", "truncate", "empty") for part in ("position", "state")}
    # Orbax checks no values: that a bit of them flipped is found by their checksum.
    assert any("x first" in line for line in lines)
    # Nothing is lost: what could not be read lies beside the others.
    assert len(list((tmp_path / "damaged-unreadable").iterdir())) == len(fell_back)


def test_no_readable_checkpoint_is_an_error(tmp_path):  # K4
    first = write(tmp_path / "c", 1, 2)
    for step in 1, 2:
        for file in (tmp_path / "c" / str(step) / "position").iterdir():
            file.write_bytes(b"")
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        assert checkpoints.latest() is None
        with pytest.raises(ConfigError, match=f"no checkpoint in {tmp_path / 'c'} can be read"):
            checkpoints.restore(abstract(first, "dp1"))
        with pytest.raises(ConfigError, match=f"checkpoint {tmp_path / 'c' / '2'} cannot be read"):
            checkpoints.restore(abstract(first, "dp1"), step=2)
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["1", "2"]


def test_an_earlier_checkpoint_can_be_gone_back_to(tmp_path):
    folder = tmp_path / "c"
    first = write(folder, 1, 2, 3)
    with Checkpoints(folder, CheckpointConfig()) as checkpoints:
        assert checkpoints.latest(2) == position(2)
        with pytest.raises(ConfigError, match=r"no checkpoint of step 7 in .*; there are: 1, 2, 3"):
            checkpoints.latest(7)
        state, found = checkpoints.restore(abstract(first, "dp1"), step=2)
        assert found == position(2)
        chex.assert_trees_all_equal(state, jax.tree.map(lambda x: x + 2, first))
        assert [p.name for p in (tmp_path / "c-after-2").iterdir()] == ["3-0"]
        checkpoints.save(position(3), state)
    assert sorted(p.name for p in folder.iterdir()) == ["1", "2", "3"]


def test_parameters_alone_are_restored_onto_another_mesh(tmp_path):
    first = write(tmp_path / "c", 1, 2)
    target = {"params": abstract(first, "tp2")["params"]}
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        restored, found = checkpoints.restore_parts(target)
        assert found.step == 2
        chex.assert_trees_all_equal(restored["params"], jax.tree.map(lambda x: x + 2, first["params"]))
        assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(lambda x: x.sharding, target)
        assert checkpoints.restore_parts(target, 1)[1].step == 1
        other = {"params": {**target["params"], "gain": target["params"]["bias"]}}
        with pytest.raises(ConfigError, match=r"params.gain is missing, the run needs float32\[3\]"):
            checkpoints.restore_parts(other)
    with Checkpoints(tmp_path / "none", CheckpointConfig()) as checkpoints:
        with pytest.raises(ConfigError, match="there is no checkpoint in"):
            checkpoints.restore_parts(target)


def test_arrays_move_to_another_padding(tmp_path):
    """Heads padded to 2 x 3 devices are the same heads padded to 8, or not at all; values in the padding are damage."""
    table = np.arange(1.0, 16.0, dtype=np.float32).reshape(5, 3)
    unpadded = {"params": {"table": jax.ShapeDtypeStruct((5, 3), jnp.float32)}}

    def stored(rows):
        return {"params": {"table": jnp.pad(table, ((0, rows - 5), (0, 0)))}}

    def target(rows, mesh="tp2"):
        sharding = NamedSharding(make_mesh(parse_mesh(mesh)), P("tp") if rows % 2 == 0 else P())
        return {"params": {"table": jax.ShapeDtypeStruct((rows, 3), jnp.float32, sharding=sharding)}}

    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        checkpoints.save(position(1), stored(6), unpadded)
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        for rows in (5, 6, 8):
            state, _ = checkpoints.restore(target(rows), unpadded=unpadded)
            chex.assert_trees_all_equal(state, stored(rows))
            parts, _ = checkpoints.restore_parts(target(rows), unpadded=unpadded)
            chex.assert_trees_all_equal(parts, stored(rows))
        with pytest.raises(ConfigError, match=r"table is float32\[5,3\], the run needs float32\[6,3\]"):
            checkpoints.restore(target(6))
        checkpoints.save(position(2), jax.tree.map(lambda x: x + 1, stored(6)), unpadded)
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        with pytest.raises(ConfigError, match="1 arrays have other bytes than were saved, params.table first"):
            checkpoints.restore_parts(target(5), 2, unpadded)


def test_every_nth_stays(tmp_path):
    with Checkpoints(tmp_path / "c", CheckpointConfig(keep=1, keep_every=2)) as checkpoints:
        for step in range(1, 6):
            checkpoints.save(position(step), new_state())
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["2", "4", "5"]


def test_a_step_is_saved_once(tmp_path, program_log):
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        checkpoints.save(position(4), new_state())
        checkpoints.save(position(4), jax.tree.map(lambda x: x + 1, new_state()))
        assert f"checkpoint {tmp_path / 'c' / '4'} exists already" in program_log.text
        state, _ = checkpoints.restore(abstract(new_state(), "dp1"))
    chex.assert_trees_all_equal(state, new_state())


def test_too_little_space_is_an_error_before_anything_is_written(tmp_path, monkeypatch):
    free = types.SimpleNamespace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    # 64 + 3 parameters, twice for the moments, the count of updates, 8 scales; four bytes each.
    message = r"takes 0.0 MiB, 0.0 MiB are free"
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        with pytest.raises(ConfigError, match=message):
            checkpoints.check_space(new_state())
        with pytest.raises(CheckpointError, match=message):
            checkpoints.save(position(1), new_state())
        free.free = 4 * (3 * 67 + 1 + 8)
        checkpoints.check_space(new_state())
        free.free -= 1
        with pytest.raises(ConfigError):
            checkpoints.check_space(new_state())
    assert list((tmp_path / "c").iterdir()) == []


@pytest.mark.parametrize("mesh", ["dp1", "dp2,pp2,tp2"])
def test_checksums_equal_the_oracle_on_every_mesh(mesh):
    rng = np.random.default_rng(0)
    tree = new_state()
    tree["params"]["kernel"] = jnp.asarray(rng.normal(size=(4, 16)).astype(np.float32))
    tree["more"] = [jnp.asarray(rng.normal(size=(3, 5)), jnp.bfloat16), jnp.arange(7, dtype=jnp.int8)]
    placed = jax.device_put(tree, shardings(tree, mesh))

    def oracle(x):
        x = np.ascontiguousarray(x)
        words = x.view(f"u{x.dtype.itemsize}").reshape(-1).astype(object)
        return sum((2 * i + 1) * int(w) for i, w in enumerate(words)) % 2**32

    assert np.asarray(checksums(placed)).tolist() == [oracle(leaf) for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": jnp.ones(3, jnp.bfloat16)}, r"1 arrays: params.bias is float32\[3\], the run needs bfloat16\[3\]"),
        ({"bias": jnp.ones(4)}, r"1 arrays: params.bias is float32\[3\], the run needs float32\[4\]"),
        ({"gain": jnp.ones(3)}, r"1 arrays: params.gain is missing, the run needs float32\[3\]"),
    ],
)
def test_nothing_is_cast_or_reshaped(tmp_path, change, message):  # K5
    first = write(tmp_path / "c", 1)
    other = first | {"params": first["params"] | change}
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        with pytest.raises(ConfigError, match=message):
            checkpoints.restore(abstract(other, "dp1"))


def test_an_error_of_the_run_is_not_hidden_by_the_end_of_saving(tmp_path):
    with pytest.raises(KeyError, match="the run's own"):
        with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
            checkpoints.save(position(1), new_state())
            raise KeyError("the run's own")
