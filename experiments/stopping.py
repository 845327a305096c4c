"""Ways in which a run ends before its last step, all of them with the state saved: signals and `--exit-after`."""

import signal
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that end a run after the step under way; batch systems announce the end of a job with the last two."""
TIME_IS_UP = 75
"""Exit code of `--exit-after` (sysexits.h: a temporary failure, run it again)."""


class Stop:
    """Say when a run shall end early; a context manager.

    The first signal is remembered, a second one acts at once. Among several processes, the step after which they end is
    the same: each tells the others what it knows with every step, and all learn it one step later.

    Args:
        deadline: `time.monotonic()` at which the time is up; None: never.
    """

    def __init__(self, deadline: float | None = None):
        self._deadline = deadline
        self._signal = 0
        self._previous: dict[int, Any] = {}
        self._agreement = _Agreement() if jax.process_count() > 1 else None

    def __enter__(self) -> "Stop":
        # Python lets only the main thread handle signals.
        if threading.current_thread() is threading.main_thread():
            self._previous = {n: signal.signal(n, self._receive) for n in SIGNALS}
        return self

    def __exit__(self, *exception) -> None:
        self._restore()

    def code(self) -> int:
        """Return the exit code to end with after this step, or 0 to go on; to be called once a step."""
        code = 128 + self._signal if self._signal else TIME_IS_UP if self._time_is_up() else 0
        return self._agreement.largest(code) if self._agreement else code

    def _time_is_up(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _receive(self, number: int, frame: Any) -> None:
        self._signal = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def describe(code: int) -> str:
    """Return why a run ended early, for the log."""
    return "the time of --exit-after is up" if code == TIME_IS_UP else f"stopped by signal {code - 128}"


class _Agreement:
    """The largest of all processes' numbers, one call late: nobody waits for a message of this step."""

    def __init__(self) -> None:
        mesh = Mesh(np.array(jax.devices()), ("all",))
        self._sharding = NamedSharding(mesh, P("all"))
        self._maximum = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, P()))
        self._under_way: jax.Array | None = None

    def largest(self, number: int) -> int:
        own = np.full(jax.local_device_count(), number, np.int32)
        numbers = jax.make_array_from_process_local_data(self._sharding, own)
        before, self._under_way = self._under_way, self._maximum(numbers)
        return 0 if before is None else int(before)
