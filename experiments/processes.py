"""Several processes that train together: found, joined before JAX starts, checked against each other; the mesh.

Who takes part comes from the flags, from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, or from Slurm
(`srun`) and Open MPI (`mpirun`), the first that says so.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

# The detection that jax.distributed.initialize does, which would come too late: devices are emulated before.
from jax._src.clusters import OmpiCluster, SlurmCluster
from jax.experimental import multihost_utils

from experiments.config import ConfigError, TrainConfig, validate
from experiments.rendezvous import wait_for_all
from taco_jax.sharding.mesh import emulate_devices, format_mesh, make_mesh, parse_mesh, resolve_sizes

JOIN_SECONDS = 300
"""How long to wait for the others at the start."""
HEARTBEAT_SECONDS = 100
"""Silence after which a process counts as dead."""
_VARIABLES = {"coordinator": "JAX_COORDINATOR_ADDRESS", "count": "JAX_NUM_PROCESSES", "index": "JAX_PROCESS_ID"}
_FLAGS = {"coordinator": "--coordinator", "count": "--num-processes", "index": "--process-id"}
# A network file system may take a while to show what another host has made.
_SHARED_SECONDS = 10


@dataclasses.dataclass(frozen=True)
class Processes:
    """Which of how many processes this one is.

    Attributes:
        coordinator: host:port of process 0; empty for a single process.
        count: number of processes.
        index: this one's number, 0 first.
        source: where the numbers come from.
        join_timeout: seconds to wait for the others.
        heartbeat_timeout: seconds of silence after which a process counts as dead and the others end.
    """

    coordinator: str = ""
    count: int = 1
    index: int = 0
    source: str = ""
    join_timeout: int = JOIN_SECONDS
    heartbeat_timeout: int = HEARTBEAT_SECONDS


def find(
    coordinator: str = "",
    count: int | None = None,
    index: int | None = None,
    environ: Mapping[str, str] = os.environ,
    join_timeout: int = JOIN_SECONDS,
    heartbeat_timeout: int = HEARTBEAT_SECONDS,
) -> Processes:
    """Return who takes part, from flags, variables or a launcher; `count` 1 means this process alone.

    Raises:
        ConfigError: if something is missing, or the numbers do not go together.
    """
    for flag, seconds in (("--join-timeout", join_timeout), ("--heartbeat-timeout", heartbeat_timeout)):
        if seconds < 1:
            raise ConfigError(f"{flag} must be at least 1 second, got {seconds}")
    flags = {"coordinator": coordinator or None, "count": count, "index": index}
    variables = {key: _variable(environ, key) for key in _VARIABLES}
    launcher = {} if count == 1 else _launcher()
    sources: list[Mapping[str, str | int | None]] = [flags, variables, launcher]
    found = {key: next((s[key] for s in sources if s.get(key) is not None), None) for key in _FLAGS}
    if found["count"] is not None and int(found["count"]) < 1:
        raise ConfigError(f"--num-processes must be 1 or more, got {found['count']}")
    if set(found.values()) == {None} or found["count"] == 1 and not found["index"]:
        return Processes()
    if missing := [f"{_FLAGS[key]} (or {_VARIABLES[key]})" for key, value in found.items() if value is None]:
        given = [_FLAGS[key] for key, value in found.items() if value is not None]
        raise ConfigError(f"{' and '.join(given)} can only go with {' and '.join(missing)}")
    address, count, index = str(found["coordinator"]), int(str(found["count"])), int(str(found["index"]))
    if not 0 <= index < count:
        raise ConfigError(f"--process-id must be from 0 to {count - 1}, got {index}")
    if not address.rpartition(":")[0] or not address.rpartition(":")[2].isdigit():
        raise ConfigError(f"--coordinator must be HOST:PORT, got {address!r}")
    of_count = next(i for i, values in enumerate(sources) if values.get("count") is not None)
    source = ("flags", "JAX_* variables", str(launcher.get("source")))[of_count]
    return Processes(address, count, index, source, join_timeout, heartbeat_timeout)


def join(processes: Processes, devices: int) -> None:
    """Wait for the other processes, and emulate this one's share of the devices if it runs on a CPU.

    Args:
        processes: who takes part; returns at once if that is this process alone.
        devices: how many all have together; less than 1 leaves it to what is there.

    Raises:
        ConfigError: if the numbers do not fit, or the others do not come in time.
    """
    if not processes.coordinator:
        return
    if devices > 0 and devices % processes.count:
        raise ConfigError(f"--num-processes={processes.count} does not divide the {devices} devices of the mesh")
    print(
        f"process {processes.index} of {processes.count} (from {processes.source}) waits for coordinator "
        f"{processes.coordinator}, at most {processes.join_timeout} s",
        file=sys.stderr,
        flush=True,
    )
    if devices > 0:
        emulate_devices(devices // processes.count)
    wait_for_all(processes.coordinator, processes.count, processes.index, processes.join_timeout)
    try:
        jax.distributed.initialize(
            processes.coordinator,
            processes.count,
            processes.index,
            initialization_timeout=processes.join_timeout,
            heartbeat_timeout_seconds=processes.heartbeat_timeout,
            shutdown_timeout_seconds=processes.heartbeat_timeout,
        )
    except RuntimeError as error:
        reason = str(error).split("\n")[0]
        raise ConfigError(
            f"process {processes.index} of {processes.count} could not join {processes.coordinator} within "
            f"{processes.join_timeout} s: {reason}"
        ) from None
    # JAX's coordination service has taken SIGTERM and only remembers it.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def agreed() -> Iterator[None]:
    """Run what may fail in one process and not in another, such as reading files; then all go on, or none.

    Raises:
        ConfigError: if another process failed there.
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
        raise
    finally:
        failed = _gathered(problem is not None)
    if failed.any():
        raise ConfigError(f"process {int(np.argmax(failed))} cannot start; its own message says why")


def check_same(**values: object) -> None:
    """Compare with the other processes.

    Args:
        values: what must be equal, by what it is called.

    Raises:
        ConfigError: on every process, naming what differs and where.
    """
    if jax.process_count() == 1:
        return
    digests = [int(hashlib.sha256(json.dumps(value).encode()).hexdigest()[:8], 16) for value in values.values()]
    found = _gathered(digests)
    for name, column in zip(values, found.T, strict=True):
        if (other := np.flatnonzero(column != column[0])).size:
            raise ConfigError(f"process {other[0]} has another {name} than process 0; give all the same")


def check_shared(folder: Path) -> None:
    """See that the run folder is the same one for all processes.

    Raises:
        ConfigError: on every process, if it is not.
    """
    if jax.process_count() == 1:
        return
    own = np.uint32(secrets.randbits(32) if jax.process_index() == 0 else 0)
    mark = folder / f".shared-{int(multihost_utils.broadcast_one_to_all(own)):08x}"
    if jax.process_index() == 0:
        mark.touch()
    multihost_utils.sync_global_devices("folder marked")
    deadline = time.monotonic() + _SHARED_SECONDS
    while not (there := mark.exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    seen = _gathered(there)
    if jax.process_index() == 0:
        mark.unlink()
    if not seen.all():
        raise ConfigError(
            f"--out={folder} of process {int(np.argmin(seen))} is not the folder of process 0; it must be on a file "
            "system that all hosts share"
        )


def mesh_of(config: TrainConfig) -> tuple[TrainConfig, jax.sharding.Mesh]:
    """Return the mesh of a configuration, and the configuration with its sizes filled in.

    Raises:
        ConfigError: for a mesh that the devices, or the model, do not suit.
    """
    try:
        sizes = parse_mesh(config.mesh)
        if -1 in sizes.values():
            sizes = resolve_sizes(sizes, jax.device_count())
            config = dataclasses.replace(config, mesh=format_mesh(sizes))
            validate(config)
        return config, make_mesh(sizes)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def devices_of(mesh: str) -> int:
    """Return how many devices a mesh such as "dp2,pp2,tp2" needs; negative if it takes what is there."""
    return math.prod(parse_mesh(mesh).values())


def _gathered(numbers: Any) -> np.ndarray:
    """Return u32[processes, ...]: the numbers of every process."""
    own = np.asarray(numbers, np.uint32)
    return np.asarray(multihost_utils.process_allgather(own)).reshape(jax.process_count(), *own.shape)


def _variable(environ: Mapping[str, str], key: str) -> str | int | None:
    name = _VARIABLES[key]
    text = environ.get(name, "")
    if not text or key == "coordinator":
        return text or None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name} must be a whole number, got {text!r}") from None


def _launcher() -> dict[str, str | int]:
    """Return what Slurm or Open MPI says of a job of several processes."""
    for source, cluster in (("Slurm", SlurmCluster), ("Open MPI", OmpiCluster)):
        try:
            if cluster.is_env_present() and cluster.get_process_count() > 1:
                port = os.environ.get("JAX_COORDINATOR_PORT")
                address = cluster.get_coordinator_address(timeout_secs=JOIN_SECONDS, override_coordinator_port=port)
                count, index = cluster.get_process_count(), cluster.get_process_id()
                return {"coordinator": address, "count": count, "index": index, "source": source}
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"the environment of {source} does not say who takes part: {error}") from None
    return {}
