"""Hosts in network namespaces: rates, counters, isolation, and what is left afterwards."""

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from experiments import cluster, netns
from experiments.config import ConfigError
from experiments.netns import Counters, Links, bits_per_second, read_counters, unsupported_reason

ROOT = Path(__file__).parent.parent
RECEIVE = """
import socket, time
connection, _ = socket.create_server(("", 5000)).accept()
size, start = len(connection.recv(1)), time.monotonic()
while data := connection.recv(1 << 20):
    size += len(data)
print(size, time.monotonic() - start)
"""
SEND = """
import socket, sys, time
for _ in range(100):
    try:
        connection = socket.create_connection(("10.77.0.1", 5000))
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
end = time.monotonic() + 1
while time.monotonic() < end:
    connection.sendall(bytes(1 << 16))
"""
# One line in, one exchange with all other hosts, one line out: seconds, segments sent, segments sent again.
EXCHANGE = """
import os, socket, sys, threading, time
hosts, me = int(os.environ["JAX_NUM_PROCESSES"]), int(os.environ["JAX_PROCESS_ID"])
server, connections = socket.create_server(("", 5000)), []
for other in range(me):
    while True:
        try:
            connections.append(socket.create_connection((f"10.77.0.{other + 1}", 5000)))
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
connections += [server.accept()[0] for _ in range(me + 1, hosts)]
def segments():
    with open("/proc/self/net/snmp") as lines:
        names, values = (line.split() for line in lines if line.startswith("Tcp:"))
    tcp = dict(zip(names, values))
    return int(tcp["OutSegs"]), int(tcp["RetransSegs"])
for line in sys.stdin:
    size, before, start = int(line), segments(), time.monotonic()
    senders = [threading.Thread(target=c.sendall, args=(bytes(size),)) for c in connections]
    for sender in senders:
        sender.start()
    for c in connections:
        left = size
        while left:
            left -= len(c.recv(min(left, 1 << 18)))
    for sender in senders:
        sender.join()
    seconds = time.monotonic() - start
    print(seconds, *(now - then for now, then in zip(segments(), before)), flush=True)
"""


@pytest.fixture
def rights():
    if reason := unsupported_reason():
        pytest.skip(reason)


def start(*words: str, **options) -> subprocess.Popen:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "experiments.cluster", *words]
    return subprocess.Popen(argv, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def left(pid: int) -> list[str]:
    """Return namespaces of an owner, and processes in them."""
    names = [name for name in os.listdir("/run/netns") if name.startswith(f"taco-{pid}-")]
    for name in list(names):
        names += subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
    return names


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_rates_are_read_in_decimal_units():
    assert [bits_per_second(rate) for rate in ("250kbit", "100mbit", "2.5gbit")] == [2.5e5, 1e8, 2.5e9]
    assert bits_per_second("none") == math.inf


@pytest.mark.parametrize("rate", ["", "5", "fast", "0mbit", "-1mbit", "100MB", "1e3mbit", "9999gbit", "nan"])
def test_other_rates_are_a_mistake(rate):
    with pytest.raises(ConfigError, match="a rate is"):
        bits_per_second(rate)


def test_counters_subtract_and_leave_out_the_headers():
    carried = Counters(10_000, 7, 3_000, 5) - Counters(1_000, 4, 1_000, 1)
    assert carried == Counters(9_000, 3, 2_000, 4)
    assert (carried.payload_sent, carried.payload_received) == (9_000 - 3 * 66, 2_000 - 4 * 66)


def test_counters_of_the_own_namespace_grow_by_what_is_sent():
    before = read_counters("lo")
    with socket.socket(type=socket.SOCK_DGRAM) as sender:
        sender.sendto(bytes(20_000), ("127.0.0.1", 9))
    assert (read_counters("lo") - before).sent_bytes >= 20_000
    with pytest.raises(ValueError, match="no interface 'none0'"):
        read_counters("none0")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--hosts=0", "--", "true"], "1 to 200 hosts, got 0"),
        (["--rate=5", "--", "true"], "got '5'"),
        (["--timeout=0", "--", "true"], "above 0, got 0.0"),
        (["--hosts=2"], "no command"),
        (["--", "no-such-program"], "no program 'no-such-program'"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(words, reason, capsys):
    assert cluster.main(words) == 2
    err = capsys.readouterr().err
    assert reason in err and err.count("\n") == 1


def test_missing_tools_are_named_in_one_line(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert cluster.main(["--", sys.executable]) == 2
    err = capsys.readouterr().err
    assert "needs ip, tc" in err and err.count("\n") == 1


def test_a_dead_owner_is_told_from_another_process_with_its_number():
    process = subprocess.Popen(["sleep", "30"])
    born = netns._start_time(process.pid)
    assert born and born == netns._start_time(process.pid)
    process.kill()
    process.wait()
    assert netns._start_time(process.pid) != born


@pytest.mark.network
def test_links_have_their_rate_and_count_their_bytes(rights):
    with Links(2, "25mbit") as links:
        for rate in ("100mbit", "400mbit", "1gbit"):
            begin = time.monotonic()
            links.set_rate(rate)
            assert time.monotonic() - begin < 0.1
            before = links.counters(1), links.counters(0)
            receiver = links.popen(0, [sys.executable, "-c", RECEIVE], stdout=subprocess.PIPE, text=True)
            sender = links.popen(1, [sys.executable, "-c", SEND])
            size, seconds = receiver.communicate(timeout=20)[0].split()
            assert sender.wait(10) == 0
            # 1448 bytes of payload in 1514 on the wire.
            speed = int(size) * 8 / float(seconds) * 1514 / 1448
            assert speed == pytest.approx(bits_per_second(rate), rel=0.05), rate
            sent, received = links.counters(1) - before[0], links.counters(0) - before[1]
            assert sent.payload_sent == pytest.approx(int(size), rel=0.01)
            assert received.payload_received == pytest.approx(int(size), rel=0.01)
    assert left(os.getpid()) == []


@pytest.mark.network
def test_exchanges_of_messages_keep_slow_links_busy(rights):
    hosts, size = 4, 256 << 10
    with Links(hosts, "1gbit") as links, contextlib.ExitStack() as stack:
        options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        argv = [sys.executable, "-c", EXCHANGE]
        processes = [stack.enter_context(links.popen(host, argv, **options)) for host in range(hosts)]

        def exchange() -> np.ndarray:
            for process in processes:
                process.stdin.write(f"{size}\n")
                process.stdin.flush()
            return np.array([process.stdout.readline().split() for process in processes], float)

        exchange()
        for rate in ("30mbit", "100mbit"):
            # Connections stay open, and need an exchange or two to learn of the new rate.
            links.set_rate(rate)
            for _ in range(2):
                exchange()
            found = np.stack([exchange() for _ in range(6)])
            seconds, sent, again = found.transpose(2, 0, 1)
            # 1448 bytes of payload in 1514 on the wire.
            ideal = (hosts - 1) * size * 1514 / 1448 * 8 / bits_per_second(rate)
            assert np.median(seconds.max(1)) < 1.15 * ideal, rate
            assert again.sum() < 0.02 * sent.sum(), rate


@pytest.mark.network
def test_hosts_reach_each_other_and_nothing_else(rights):
    with socket.create_server(("127.0.0.1", 0)) as server, Links(2, "none") as links:
        port = server.getsockname()[1]
        text = (
            "import os, socket\n"
            f"print(socket.socket().connect_ex(('127.0.0.1', {port})) != 0)\n"
            "print(socket.gethostbyname(socket.gethostname()), sorted(n for _, n in socket.if_nameindex()))\n"
            "print(*(os.environ['JAX_' + n] for n in ('COORDINATOR_ADDRESS', 'NUM_PROCESSES', 'PROCESS_ID')))\n"
        )
        argv = [sys.executable, "-c", text]
        output = links.popen(1, argv, stdout=subprocess.PIPE, text=True).communicate(timeout=20)[0]
    closed, name, variables = output.splitlines()
    assert closed == "True"
    assert name.startswith("10.77.0.2 ") and "'net0'" in name
    assert variables.startswith("10.77.0.1:") and variables.endswith(" 2 1")


@pytest.mark.network
def test_an_exception_leaves_nothing(rights):
    with pytest.raises(ZeroDivisionError), Links(2, "none") as links:
        process = links.popen(0, ["sh", "-c", "trap '' TERM; sleep 100"])
        raise ZeroDivisionError
    assert process.wait(5) == -signal.SIGKILL
    assert left(os.getpid()) == []


@pytest.mark.network
def test_output_is_prefixed_and_the_first_failure_ends_all(rights):
    script = "echo I am $JAX_PROCESS_ID; echo oh >&2; if [ $JAX_PROCESS_ID = 1 ]; then sleep 0.3; exit 7; fi; sleep 99"
    process = start("--hosts=3", "--rate=1gbit", "--", "sh", "-c", script)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 7
    assert {f"[host {i}] I am {i}" for i in range(3)} <= set(out.splitlines())
    assert "[host 2] oh" in err.splitlines() and "host 1 ended with 7" in err
    assert "3 hosts, links of 1gbit" in out
    assert left(process.pid) == []


@pytest.mark.network
def test_a_hanging_command_is_ended_by_the_timeout(rights):
    process = start("--timeout=0.01", "--", "sleep", "100")
    _, err = process.communicate(timeout=20)
    assert process.returncode == 124
    assert "ended after the 0.01 minutes of --timeout" in err
    assert left(process.pid) == []


@pytest.mark.network
def test_sigterm_reaches_the_commands_and_leaves_nothing(rights):
    script = "trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    process = start("--", "sh", "-c", script)
    lines = [process.stdout.readline(), process.stdout.readline()]
    assert sorted(lines) == ["[host 0] ready\n", "[host 1] ready\n"]
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 0 and out.count("saved") == 2
    assert left(process.pid) == []


@pytest.mark.network
def test_what_a_killed_parent_left_is_swept_at_the_next_start(rights):
    process = start("--hosts=1", "--", "sh", "-c", "echo $$; sleep 100")
    command = int(process.stdout.readline().split()[-1])
    process.kill()
    process.wait(5)
    assert left(process.pid)
    with Links(1, "none"):
        assert left(process.pid) == [] and not alive(command)
    process.stdout.close()
    process.stderr.close()
