"""See that all processes of a job are there before JAX connects them: JAX ends a process with a dump if one is missing.

Process 0 listens at the coordinator's address, each other one says who it is and waits for the answer. Then the port is
JAX's.
"""

import contextlib
import os
import socket
import time

from experiments.config import ConfigError

_GO = "go"
_RETRY_SECONDS = 0.1
# Who connects and says nothing is no process of the job.
_STRANGER_SECONDS = 2.0


def wait_for_all(address: str, count: int, index: int, timeout: float) -> None:
    """Return when all processes have come.

    Args:
        address: host:port of process 0.
        count: how many there are.
        index: number of this one, 0 first.
        timeout: seconds to wait.

    Raises:
        ConfigError: on every process that has come, if others have not, or their numbers do not fit.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout
    if index == 0:
        _receive(int(port), count, deadline, timeout)
    else:
        _report((host.strip("[]"), int(port)), count, index, deadline, timeout)


def _receive(port: int, count: int, deadline: float, timeout: float) -> None:
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(socket.create_server(("", port), family=family, dualstack_ipv6=dual))
        except OSError as error:
            raise ConfigError(f"process 0 cannot listen at port {port}: {os.strerror(error.errno or 0)}") from None
        there: dict[int, socket.socket] = {}
        answering: list[socket.socket] = []
        problem = ""
        while len(there) < count - 1 and not problem:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection = stack.enter_context(server.accept()[0])
            except TimeoutError:
                missing = ", ".join(str(i) for i in range(1, count) if i not in there)
                problem = f"of {count} processes, number {missing} did not come within {timeout:g} s"
                break
            try:
                index, told = map(int, _read_line(connection, _STRANGER_SECONDS).split())
            except (OSError, ValueError):
                connection.close()
                continue
            if told != count:
                problem = f"process {index} was told of {told} processes, process 0 of {count}"
            elif index in there and _is_open(there[index]):
                problem = f"two processes say that they are number {index} of {count}"
            there[index] = connection
            answering.append(connection)
        for connection in answering:
            with contextlib.suppress(OSError):
                connection.sendall(f"{problem or _GO}\n".encode())
        if problem:
            raise ConfigError(problem)


def _report(address: tuple[str, int], count: int, index: int, deadline: float, timeout: float) -> None:
    reason = "nobody answers"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(address, timeout=left) as connection:
                connection.sendall(f"{index} {count}\n".encode())
                # Process 0 may have begun to wait later.
                answer = _read_line(connection, timeout + _STRANGER_SECONDS)
        except OSError as error:
            answer, reason = "", error.strerror or str(error)
        if answer == _GO:
            return
        if answer:
            raise ConfigError(answer)
        time.sleep(_RETRY_SECONDS)
    raise ConfigError(
        f"process {index} of {count} did not find process 0 at {address[0]}:{address[1]} within {timeout:g} s: {reason}"
    )


def _read_line(connection: socket.socket, seconds: float) -> str:
    connection.settimeout(seconds)
    with connection.makefile(encoding="utf-8", errors="replace") as lines:
        return lines.readline(300).strip()


def _is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
