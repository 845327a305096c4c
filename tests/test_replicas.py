"""Copies of an array must be equal bit for bit; one that is not is found and named."""  # C1

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from trainer import free_port

from experiments import train
from experiments.metrics import Progress, StepLog
from experiments.replicas import ReplicasDiffer, check_replicas, replica_check
from taco_jax.sharding.mesh import make_mesh

MESH = make_mesh({"dp": 2, "pp": 1, "tp": 4})


def array_of(values: np.ndarray, spec: P, change: dict[int, np.ndarray] | None = None) -> jax.Array:
    """Return a global array of which the devices in `change` hold something else than they should."""
    sharding = NamedSharding(MESH, spec)
    parts = [
        jax.device_put((change or {}).get(device.id, values[index]), device)
        for device, index in sharding.addressable_devices_indices_map(values.shape).items()
    ]
    return jax.make_array_from_single_device_arrays(values.shape, sharding, parts)


def last_bit_flipped(x: np.ndarray) -> np.ndarray:
    x = np.array(x)
    x.view(np.uint8).flat[0] ^= 1
    return x


VALUES = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)


def test_equal_replicas_pass():
    tree = {
        "replicated": array_of(VALUES, P()),
        "split": array_of(VALUES, P("tp")),
        "scalar": jax.device_put(jnp.float32(np.nan), NamedSharding(MESH, P())),
        "half": array_of(VALUES.astype(jnp.bfloat16), P(None, "dp")),
        "alone": array_of(VALUES, P(("dp", "tp"))),
    }
    check_replicas(tree)
    check_replicas({})


def test_one_bit_of_one_replica_is_named():
    # Device 5 is (dp 1, tp 1) and holds the same rows as device 1.
    wrong = array_of(VALUES, P("tp"), {5: last_bit_flipped(VALUES[2:4])})
    tree = {"a": array_of(VALUES, P()), "b": {"kernel": wrong}, "c": wrong}
    with pytest.raises(ReplicasDiffer) as raised:
        check_replicas(tree)
    assert str(raised.value) == "b.kernel differs between devices that must hold the same bits: device 5 from device 1"


def test_the_smaller_group_is_the_one_that_differs():
    wrong = array_of(VALUES, P(), {0: last_bit_flipped(VALUES), 6: 2 * VALUES})
    with pytest.raises(ReplicasDiffer, match="bits: devices 0, 6 from devices 1, 2, 3, 4, 5, 7$"):
        check_replicas([wrong])


def test_zeros_of_another_sign_differ():
    zeros = np.zeros((8, 6), np.float32)
    with pytest.raises(ReplicasDiffer, match="device 3 from"):
        check_replicas([array_of(zeros, P(), {3: -zeros})])


def progress(step: int, state: dict) -> Progress:
    return Progress(step, False, state, {"loss": jnp.float32(1)})


def test_the_hook_compares_when_it_is_due_and_names_parameters_first(tmp_path):
    log = StepLog(None, 0, 9)
    wrong = array_of(VALUES, P(), {4: 2 * VALUES})
    state = {"opt_state": {"mu": wrong}, "params": {"kernel": wrong}, "scales": {}}
    hook = replica_check(3, log)
    for step in (1, 2):
        log._pending = progress(step, state)
        hook(log._pending)
    with pytest.raises(ReplicasDiffer, match=r"^after step 3, params\.kernel differs"):
        hook(progress(3, state))
    replica_check(0, log)(progress(3, state))


def test_replicas_that_differ_end_the_run_with_code_5(capsys, monkeypatch, tmp_path):
    def differ(*arguments):
        raise ReplicasDiffer("after step 3, params.kernel differs")

    monkeypatch.setattr(train, "train", differ)
    assert train.main(["--recipe=tiny", f"--out={tmp_path}"]) == 5
    assert capsys.readouterr().err.count("\n") == 1


def test_hashes_of_other_processes_are_compared(monkeypatch):
    """Two processes, played by one: each sees half of the devices."""
    right, wrong = array_of(VALUES, P()), array_of(VALUES, P(), {7: 2 * VALUES})

    def as_process(index: int, array: jax.Array) -> SimpleNamespace:
        shards = [shard for shard in array.addressable_shards if shard.device.id // 4 == index]
        return SimpleNamespace(addressable_shards=shards, sharding=array.sharding, shape=array.shape)

    def check(array: jax.Array) -> None:
        seen = []
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        other = lambda mine: seen.append(mine) or np.zeros((2, *mine.shape), np.uint32)  # noqa: E731
        check_replicas([as_process(1, array)], gather=other)
        check_replicas([as_process(0, array)], gather=lambda mine: np.stack([mine, seen[0]]))

    check(right)
    with pytest.raises(ReplicasDiffer, match=r"device 7 \(process 0\) from devices 0 \(process 0\), 1"):
        check(wrong)


TWO_PROCESSES = """
import sys
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from experiments.replicas import ReplicasDiffer, check_replicas
mesh = Mesh(np.array(jax.devices()), ("dp",))
values = np.arange(6, dtype=np.float32)
def array(wrong):
    parts = [jax.device_put(values + (i in wrong and jax.process_index() == 1), d)
             for i, d in enumerate(jax.local_devices())]
    return jax.make_array_from_single_device_arrays((6,), NamedSharding(mesh, P()), parts)
check_replicas({"kernel": array([])})
try:
    check_replicas({"bias": array([]), "kernel": array([1])})
except ReplicasDiffer as error:
    print(error)
"""


def test_real_processes_find_the_same_difference():
    root = Path(__file__).parent.parent
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(root)}
    arguments = [sys.executable, "-c", TWO_PROCESSES, f"localhost:{free_port()}"]
    processes = [
        subprocess.Popen([*arguments, str(i)], env=environment, stdout=subprocess.PIPE, text=True) for i in range(2)
    ]
    try:
        # Gloo prints to standard output too.
        first, second = (process.communicate(timeout=120)[0].splitlines()[-1] for process in processes)
    finally:
        for process in processes:
            process.kill()
    assert first == second and first.startswith("kernel differs between devices that must hold the same bits: device ")
    assert re.search(
        r"device \d+ \(process 1\) from devices 0 \(process 0\), 1 \(process 0\), \d+ \(process 1\)$", first
    )
