"""Processes on hosts behind links of known speed that serve one command at a time; both ends of the conversation.

The starter (`Workers`) writes a JSON object a line to every process and reads one from each, all processes at the same
command:

    {"compiling": NAME}  from the process while it starts, any number of times
    {"ready": ...}       when it can serve
    command -> answer    until stdin ends

A worker is a module whose `main` builds its mesh with `joined_mesh`, announces itself with `answer` and reads
`commands`.
"""

import contextlib
import functools
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh

from experiments.netns import Counters, Links, read_counters
from experiments.processes import devices_of, find, join
from experiments.traffic import Collective, wire_factor
from taco_jax.sharding.mesh import AXES, parse_mesh

_OF_THE_FIRST_STAGE = ("embedding",)


class WorkerFailed(RuntimeError):
    """A process on a host ended or did not answer."""


class Workers:
    """The processes on the hosts of a mesh, which answer alike; a context manager.

    Args:
        module: what each runs, with the mesh and `arguments` as its command line.
        mesh: as `--mesh`; dp lies within a host.
        arguments: what else the module takes.
        folder: of the logs.
    """

    def __init__(self, module: str, mesh: str, arguments: Sequence[str], folder: Path):
        self.mesh, self.folder = mesh, folder
        self.hosts = hosts_of(mesh)
        self.links = Links(self.hosts, "none")
        self.ready: list[Any] = []
        """What each process said when it could serve."""
        self._argv = [sys.executable, "-m", module, mesh, *arguments]
        self._processes: list[subprocess.Popen] = []
        self._logs: list[Path] = []
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> "Workers":
        started = time.monotonic()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.links)
            for host in range(self.hosts):
                self._start(host, stack)
            while "ready" not in (answers := self._answers())[0]:
                say(f"{self.mesh}: compiling {answers[0]['compiling']} on {self.hosts} hosts")
            self._cleanup = stack.pop_all()
        self.ready = [answer["ready"] for answer in answers]
        say(f"{self.mesh}: ready after {time.monotonic() - started:.0f} s")
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def _start(self, host: int, stack: contextlib.ExitStack) -> None:
        """Start the process of a host, to be killed when the stack unwinds."""
        path = self.folder / f"{self.mesh.replace(',', '-')}-host{host}.log"
        log = stack.enter_context(path.open("w"))
        process = self.links.popen(
            host, self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
        stack.enter_context(process)
        stack.callback(process.kill)
        self._logs.append(path)
        self._processes.append(process)

    def ask(self, **command: Any) -> list[dict[str, Any]]:
        """Send one command to every process and return their answers."""
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(command) + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                pass  # its answer is missing too
        return self._answers()

    def _answers(self) -> list[dict[str, Any]]:
        return [self._answer(host, process) for host, process in enumerate(self._processes)]

    def _answer(self, host: int, process: subprocess.Popen) -> dict[str, Any]:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):  # gloo prints lines of its own
                return json.loads(line)
        log = self._logs[host]
        last = log.read_text().strip().splitlines() or ["no message"]
        raise WorkerFailed(f"the process on host {host} ended with code {process.wait()}: {last[-1]} (see {log})")


def hosts_of(mesh: str) -> int:
    """Return how many hosts a mesh takes: dp lies within a host."""
    sizes = parse_mesh(mesh)
    return sizes["pp"] * sizes["tp"]


def say(text: str) -> None:
    """Tell the user how far it is."""
    print(text, file=sys.stderr, flush=True)


def joined_mesh(mesh: str) -> Mesh:
    """Return the mesh over all processes, this one having joined the others.

    dp lies on the devices of one process, tp, the fastest, and pp over the processes: the reverse of what one would
    train with, because here the axis whose messages are compressed shall cross the link.
    """
    join(find(), devices_of(mesh))
    sizes = parse_mesh(mesh)
    devices = np.array(jax.devices()).reshape(sizes["pp"], sizes["tp"], sizes["dp"]).transpose(2, 0, 1)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def answer(message: dict[str, Any]) -> None:
    """Send a line to the starter."""
    print(json.dumps(message), flush=True)


def commands() -> Iterator[dict[str, Any]]:
    """Yield the commands that come in, until the starter ends."""
    for line in sys.stdin:
        yield json.loads(line)


together = functools.partial(multihost_utils.sync_global_devices, "together")
"""Wait for the other processes."""


@contextlib.contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Yield a dict that has "sent" and "payload" afterwards: bytes that this host's interface sent meanwhile."""
    found: dict[str, int] = {}
    # Behind a message that all have read nothing waits to be sent, so that the counters are of this work alone.
    together()
    before: Counters = read_counters()
    yield found
    together()
    sent = read_counters() - before
    found |= {"sent": sent.sent_bytes, "payload": sent.payload_sent}


def bytes_over_links(collectives: Iterable[Collective], mesh: Mesh) -> dict[int, float]:
    """Return process -> bytes per step that its devices send to other processes, by the standard algorithms.

    A device of an all-to-all sends its n-th part to each other one; all-gather and all-reduce go around a ring. Only
    the first stage of a pipeline sends what stands in its conditional.
    """
    process = [device.process_index for device in mesh.devices.flat]
    stage = np.indices(mesh.devices.shape)[mesh.axis_names.index("pp")].ravel()
    sent = dict.fromkeys(process, Fraction(0))
    for c in collectives:
        size = c.count * c.payload_bytes
        for group in c.groups:
            if c.site in _OF_THE_FIRST_STAGE and stage[group[0]] > 0:
                continue
            n = len(group)
            if c.op == "collective-permute":
                source, target = group
                sent[process[source]] += size * (process[source] != process[target])
                continue
            for i, member in enumerate(group):
                if c.op == "all-to-all":
                    others = sum(process[other] != process[member] for other in group)
                    sent[process[member]] += size * others / n
                elif process[group[(i + 1) % n]] != process[member]:
                    sent[process[member]] += size * wire_factor(c.op, n)
    return {p: float(size) for p, size in sent.items()}
