import dataclasses
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.checkpoint import Checkpoints, Position
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
import logging, sys, pathlib, jax, jax.numpy as jnp
from experiments.checkpoint import Checkpoints, Position
from experiments.config import CheckpointConfig, ConfigError

logging.basicConfig(stream=sys.stdout, format="%(message)s", force=True)
folder = pathlib.Path(sys.argv[1])
sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
target = {"x": jax.ShapeDtypeStruct((3,), jnp.float32, sharding=sharding)}

def save(*steps):
    with Checkpoints(folder, CheckpointConfig()) as checkpoints:
        for step in steps:
            checkpoints.save(Position(step, {}, ""), {"x": jnp.full(3, float(step))})

def damage(step, truncate):
    manifest = folder / str(step) / "state" / "manifest.ocdbt"
    content = bytearray(manifest.read_bytes())
    content[len(content) // 2] ^= 1
    manifest.write_bytes(content[:50] if truncate else content)

def restore():
    with Checkpoints(folder, CheckpointConfig()) as checkpoints:
        state, position = checkpoints.restore(target)
        print("restored", position.step, state["x"])

save(1, 2)
damage(2, truncate=False)
restore()
save(2)
restore()
damage(2, truncate=True)
restore()
damage(1, truncate=True)
try:
    restore()
except ConfigError as error:
    print(error)
"""


def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_used(tmp_path):  # K4
    folder = tmp_path / "c"
    command = [sys.executable, "-c", READ_DAMAGED, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    unreadable = f"checkpoint {folder / '2'} cannot be read, trying the one before it"
    assert lines[0].startswith(unreadable)
    assert lines[1:3] == ["restored 1 [1. 1. 1.]", "restored 2 [2. 2. 2.]"]
    assert lines[3].startswith(unreadable)
    assert lines[4] == "restored 1 [1. 1. 1.]"
    assert lines[5].startswith(f"checkpoint {folder / '1'} cannot be read")
    assert lines[6].startswith(f"no checkpoint in {folder} can be read")
    # Nothing is lost: what could not be read lies beside the others.
    assert sorted(p.name for p in (tmp_path / "c-unreadable").iterdir()) == ["2-0", "2-1"]
    assert (folder / "1").exists()


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


def test_a_failed_write_is_an_error_at_the_end(tmp_path, monkeypatch):  # K2
    def full(self):
        raise OSError("No space left on device")

    monkeypatch.setattr(ocp.CheckpointManager, "wait_until_finished", full)
    with pytest.raises(OSError, match="No space left"):
        with Checkpoints(tmp_path / "c", CheckpointConfig()):
            pass
