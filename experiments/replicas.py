"""Compare the replicas of a state: devices that hold the same part of an array must hold the same bits.

Compressed collectives decode the same bytes on every rank, so replicated parameters stay equal bit for bit; a device
that computes wrongly, or a collective that does not give everyone the same, breaks that and shows nowhere else.
"""

import zlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from experiments.metrics import Hook, Progress, StepLog


class ReplicasDiffer(Exception):
    """Two devices hold different bits where they must hold the same."""


def check_replicas(tree: Any, gather: Callable[[np.ndarray], np.ndarray] = multihost_utils.process_allgather) -> None:
    """Compare the CRC-32 of all shards with the same index, for every array in turn; every process calls it.

    Each process hashes the replicated shards that it holds and sees the hashes of the others.

    Args:
        tree: global arrays.
        gather: stacks what each process gives it, [processes, ...].

    Raises:
        ReplicasDiffer: naming the first array that differs and the devices; on every process.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if not leaves:
        return
    columns = {device: i for i, device in enumerate(sorted(jax.devices(), key=lambda device: device.id))}
    hashes = np.zeros((len(leaves), len(columns)), np.uint32)
    for row, (_, array) in zip(hashes, leaves, strict=True):
        replicated = {device for devices in _holders(array) for device in devices}
        for shard in array.addressable_shards:
            if shard.device in replicated:
                row[columns[shard.device]] = zlib.crc32(np.ascontiguousarray(shard.data).view(np.uint8))
    if jax.process_count() > 1:
        # A column is nonzero in the row of its own process only.
        hashes = np.asarray(gather(hashes)).sum(axis=0, dtype=np.uint32)
    for row, (path, array) in zip(hashes, leaves, strict=True):
        for devices in _holders(array):
            found = defaultdict(list)
            for device in devices:
                found[int(row[columns[device]])].append(device)
            if len(found) > 1:
                raise ReplicasDiffer(_described(jax.tree_util.keystr(path, simple=True, separator="."), found))


def replica_check(every: int, log: StepLog) -> Hook:
    """Return the hook that compares the replicas of the state every so many steps, 0 for never; called after the log.

    Parameters first, so that they are named where moments differ too.
    """

    def hook(progress: Progress) -> None:
        if every and progress.step % every == 0:
            with log.paused():
                for part in sorted(progress.state, key=lambda name: name != "params"):
                    try:
                        check_replicas({part: progress.state[part]})
                    except ReplicasDiffer as error:
                        raise ReplicasDiffer(f"after step {progress.step}, {error}") from None

    return hook


def _holders(array: jax.Array) -> list[list[jax.Device]]:
    """Return, for each part of an array that more than one device holds, these devices in the order of their ids."""
    holders = defaultdict(list)
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        holders[tuple((s.start, s.stop) for s in index)].append(device)
    return [sorted(devices, key=lambda d: d.id) for devices in holders.values() if len(devices) > 1]


def _described(name: str, found: dict[int, list[jax.Device]]) -> str:
    # The largest group is likely right; of equal ones that with the smallest id.
    right, *others = sorted(found.values(), key=lambda devices: (-len(devices), devices[0].id))
    wrong = sorted((device for devices in others for device in devices), key=lambda device: device.id)
    return f"{name} differs between devices that must hold the same bits: {_listed(wrong)} from {_listed(right)}"


def _listed(devices: list[jax.Device]) -> str:
    process = " (process {})" if jax.process_count() > 1 else ""
    shown = ", ".join(f"{device.id}{process.format(device.process_index)}" for device in devices[:8])
    return f"device{'s' * (len(devices) > 1)} {shown}{', ...' * (len(devices) > 8)}"
