"""Several processes that train together: joined before JAX starts, each with its share of the devices; the mesh."""

import dataclasses
import math
import signal
import sys

import jax

from experiments.config import ConfigError, TrainConfig, validate
from taco_jax.sharding.mesh import emulate_devices, format_mesh, make_mesh, parse_mesh, resolve_sizes


@dataclasses.dataclass(frozen=True)
class Processes:
    """Which of how many processes this one is.

    Attributes:
        coordinator: host:port of process 0; empty for a single process.
        count: number of processes.
        index: this one's number, 0 first.
        timeout: seconds to wait for the others.
    """

    coordinator: str = ""
    count: int = 1
    index: int = 0
    timeout: int = 300


def join(processes: Processes, mesh: str) -> None:
    """Wait for the other processes, and emulate this one's share of the devices if it runs on a CPU.

    Raises:
        ConfigError: if the numbers do not fit, or the others do not come in time.
    """
    if not processes.coordinator:
        if processes != Processes():
            raise ConfigError("--num-processes and --process-id need --coordinator=HOST:PORT")
        return
    if not 0 <= processes.index < processes.count:
        raise ConfigError(f"--process-id must be from 0 to {processes.count - 1}, got {processes.index}")
    devices = math.prod(parse_mesh(mesh).values())
    if devices > 0 and devices % processes.count:
        raise ConfigError(f"--num-processes={processes.count} does not divide the {devices} devices of mesh {mesh}")
    print(
        f"process {processes.index} of {processes.count} waits for coordinator {processes.coordinator}, "
        f"at most {processes.timeout} s",
        file=sys.stderr,
        flush=True,
    )
    if devices > 0:
        emulate_devices(devices // processes.count)
    try:
        jax.distributed.initialize(
            processes.coordinator, processes.count, processes.index, initialization_timeout=processes.timeout
        )
    except RuntimeError as error:
        reason = str(error).split("\n")[0]
        raise ConfigError(f"process {processes.index} could not join {processes.coordinator}: {reason}") from None
    # JAX's coordination service has taken SIGTERM and only remembers it.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


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
