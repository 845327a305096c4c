"""Run a command on several hosts of one machine: `python -m experiments.cluster --hosts=4 --rate=100mbit -- COMMAND`.

Each host is a network namespace with a link of the given speed. COMMAND runs once per host, with
JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID set; its lines come out with the host's number before
them. Signals go on to the commands; the first that fails ends the others and gives the exit code (128 + signal if one
killed it, 124 at the timeout).
"""

import contextlib
import dataclasses
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import IO, TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from experiments.cli import parse_command_line
from experiments.config import ConfigError
from experiments.netns import Counters, Links, bits_per_second

PROGRAM = "python -m experiments.cluster"
TIMED_OUT = 124
# Others may have noticed the failure and be about to say so; a trainer that was told to stop saves first.
GRACE_SECONDS = 5.0
SAVING_SECONDS = 120.0
_POLL_SECONDS = 0.02
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Run a command on several hosts of one machine, each with a link of known speed; -- stands before the command."""

    hosts: int = 2
    """How many."""
    rate: str = "100mbit"
    """Speed of each link in each direction, such as 25mbit or 2.5gbit; none leaves the links as fast as they are."""
    timeout: float = 60.0
    """Minutes after which the commands are ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the program's own) and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    split = words.index("--") if "--" in words else len(words)
    command = words[split + 1 :]
    try:
        arguments = parse_command_line(Arguments, PROGRAM, words[:split])
        if not 0 < arguments.timeout < math.inf:
            raise ConfigError(f"--timeout must be a number of minutes above 0, got {arguments.timeout}")
        links = Links(arguments.hosts, arguments.rate)
        if not command:
            raise ConfigError(f"no command: {PROGRAM} --hosts=4 --rate=100mbit -- COMMAND")
        if shutil.which(command[0]) is None:
            raise ConfigError(f"no program {command[0]!r}")
        return _run(links, command, 60 * arguments.timeout)
    except ConfigError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2


def _run(links: Links, command: Sequence[str], seconds: float) -> int:
    """Run the command on every host, print what the links carried, and return the exit code."""
    relays: list[threading.Thread] = []
    with _received_signals() as received:
        with links:
            start = time.monotonic()
            processes = []
            for host in range(links.hosts):
                process = links.popen(
                    host, command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
                )
                processes.append(process)
                for pipe, stream in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                    relays.append(threading.Thread(target=_relay, args=(host, pipe, stream), daemon=True))
                    relays[-1].start()
            code = _wait(processes, start + seconds, received)
            elapsed = time.monotonic() - start
            counters = [links.counters(host) for host in range(links.hosts)]
        # Leaving has ended every process that could still hold a pipe.
        for process in processes:
            process.wait()
        for relay in relays:
            relay.join()
    if code == TIMED_OUT and elapsed >= seconds:
        print(f"{PROGRAM}: ended after the {seconds / 60:g} minutes of --timeout", file=sys.stderr)
    with contextlib.suppress(BrokenPipeError):
        _print_table(links, counters, elapsed)
    return code


def _wait(processes: Sequence[subprocess.Popen], deadline: float, received: list[int]) -> int:
    """Wait until all have ended, or shall be killed; return the exit code of the first that failed."""
    code = forwarded = 0
    while running := [process for process in processes if process.poll() is None]:
        now = time.monotonic()
        failed = [process.returncode for process in processes if process.returncode]
        if len(received) > forwarded:
            _signal(running, received[-1])
            forwarded = len(received)
            # Whoever asks three times does not want to wait.
            deadline = min(deadline, now + (SAVING_SECONDS if forwarded < 3 else 0.0))
        elif not code and now >= deadline:
            code = TIMED_OUT if not forwarded else 128 + received[-1]
        elif not code and failed:
            code = _exit_code(failed[0])
            host = next(host for host, process in enumerate(processes) if process.returncode)
            print(f"{PROGRAM}: host {host} ended with {code}, the others are told to stop", file=sys.stderr)
        elif code:
            time.sleep(_POLL_SECONDS)
            if now >= deadline:
                break
            continue
        else:
            time.sleep(_POLL_SECONDS)
            continue
        if code:
            _signal(running, signal.SIGTERM)
            deadline = now + GRACE_SECONDS
    return code or next((_exit_code(process.returncode) for process in processes if process.returncode), 0)


def _exit_code(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode


def _signal(processes: Sequence[subprocess.Popen], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)


@contextlib.contextmanager
def _received_signals() -> Iterator[list[int]]:
    """Collect the signals that would end this program."""
    received: list[int] = []
    before = {number: signal.signal(number, lambda n, _: received.append(n)) for number in _SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _relay(host: int, pipe: IO[bytes], stream: TextIO) -> None:
    """Copy lines with the host's number before them; go on reading when nobody listens, or the command would wait."""
    prefix, listening = f"[host {host}] ", True
    with pipe:
        for line in pipe:
            text = line.decode(errors="replace").rstrip("\r\n")
            with contextlib.suppress(ValueError):
                try:
                    if listening:
                        # One call, so that lines of several hosts do not mix.
                        stream.write(f"{prefix}{text}\n")
                        stream.flush()
                except BrokenPipeError:
                    listening = False


def _print_table(links: Links, counters: Sequence[Counters], seconds: float) -> None:
    """Print what each host's interface carried, and the share of the time that the link needed for it."""
    table = Table(box=box.SIMPLE_HEAD, title=f"{links.hosts} hosts, links of {links.rate}, {seconds:.1f} s")
    for column in ("host", "MB sent", "packets", "link busy", "MB received", "packets", "link busy"):
        table.add_column(column, justify="right")
    capacity = bits_per_second(links.rate) / 8 * seconds
    for host, carried in enumerate(counters):
        cells = [str(host)]
        ways = (carried.sent_bytes, carried.sent_packets), (carried.received_bytes, carried.received_packets)
        for size, packets in ways:
            busy = "-" if math.isinf(capacity) else f"{size / capacity:.1%}"
            cells += [f"{size / 1e6:,.2f}", f"{packets:,}", busy]
        table.add_row(*cells)
    Console(width=100).print(table)


if __name__ == "__main__":
    raise SystemExit(main())
