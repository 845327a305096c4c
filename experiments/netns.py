"""Hosts on one machine: network namespaces joined by a bridge, with a token bucket on each link in both directions.

The bridge lives in a namespace of its own and nothing leads out, so that the addresses are the same for every cluster
and never visible outside. The counters are the kernel's own, of the interface that the bytes really pass.
"""

import contextlib
import json
import math
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.config import ConfigError

INTERFACE = "net0"
MAX_HOSTS = 200
QUEUE_SECONDS = 0.02
_NETWORK = "10.77.0.0/24"
_PORT = 12377
_MTU = 1514
# Ethernet 14, IPv4 20, TCP with timestamps 32.
_HEADERS = 66
# The kernel's 200 ms of patience are ten queues; 50 are more than the queues of both directions are long.
_MIN_RETRANSMISSION_TIMEOUT = "50ms"
# What makes TCP keep a slow link busy whose queue is short; all of it also acts on connections that are open already
# when the rate changes. Peers are near while nothing waits, and TCP would build packets of 64 KB for them at any rate,
# as large as the whole queue of a link of 25 Mbit/s; without that they hold 1 ms of what the connection carries. Reno
# answers losses alike on every machine, whatever its default, and may be chosen in a namespace everywhere.
_TCP_SETTINGS = {"tcp_congestion_control": "reno", "tcp_tso_rtt_log": "0"}
# The bucket is refilled at least this often even on a kernel that has no fine timers.
_TICKS_PER_SECOND = 250
_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_NAMES = re.compile(r"taco-(\d+)-(\d+)-[0-9a-f]+-\w+")
_NAMESPACES = Path("/run/netns")
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
# The bind mount is seen by this command only: `ip netns exec` gives each a mount namespace of its own.
_WITH_HOSTS = 'mount --bind "$1" /etc/hosts && shift && exec "$@"'


@dataclass(frozen=True)
class Counters:
    """What an interface has carried, as the kernel counts it: Ethernet bytes and packets."""

    sent_bytes: int
    sent_packets: int
    received_bytes: int
    received_packets: int

    def __sub__(self, other: "Counters") -> "Counters":
        return Counters(
            self.sent_bytes - other.sent_bytes,
            self.sent_packets - other.sent_packets,
            self.received_bytes - other.received_bytes,
            self.received_packets - other.received_packets,
        )

    @property
    def payload_sent(self) -> int:
        """Bytes sent without the 66 of headers per packet; right for a super-packet that counts as one, too."""
        return self.sent_bytes - _HEADERS * self.sent_packets

    @property
    def payload_received(self) -> int:
        """Bytes received without the 66 of headers per packet."""
        return self.received_bytes - _HEADERS * self.received_packets


def read_counters(interface: str = INTERFACE) -> Counters:
    """Return the counters of an interface of the calling process's own namespace, in microseconds."""
    with open("/proc/self/net/dev") as lines:
        for line in lines:
            name, _, numbers = line.partition(":")
            if name.strip() == interface:
                n = [int(word) for word in numbers.split()]
                return Counters(n[8], n[9], n[0], n[1])
    raise ValueError(f"no interface {interface!r} in this network namespace")


def bits_per_second(rate: str) -> float:
    """Return the speed that a word such as "100mbit" or "2.5gbit" states; "none" is infinite.

    Raises:
        ConfigError: for anything else.
    """
    if rate == "none":
        return math.inf
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?bit)", rate)
    bits = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 1e5 <= bits <= 1e12:
        raise ConfigError(f"a rate is 100kbit to 1000gbit, such as 100mbit or 2.5gbit, or none; got {rate!r}")
    return bits


def unsupported_reason() -> str | None:
    """Return why this process cannot make network namespaces, None if it can."""
    missing = [tool for tool in ("ip", "tc", "mount", "sh") if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)}, not found in PATH (ip and tc are in the package iproute2)"
    status = Path("/proc/self/status").read_text()
    effective = int(re.search(r"^CapEff:\s*(\w+)", status, re.M)[1], 16)  # type: ignore[index]
    lacking = [name for name, bit in _CAPABILITIES.items() if not effective >> bit & 1]
    if lacking:
        return f"needs {' and '.join(lacking)}, which this process has not (run it as root)"
    return None


class Links:
    """Hosts 0 .. hosts-1 and their links, made on entering and removed on leaving; one thread at a time uses them.

    Args:
        hosts: how many.
        rate: bits per second of each link and direction, such as "100mbit"; "none" leaves the links unshaped.

    Raises:
        ConfigError: for a number of hosts or a rate that cannot be had; on entering, where rights or tools are missing.
    """

    def __init__(self, hosts: int, rate: str):
        if not 1 <= hosts <= MAX_HOSTS:
            raise ConfigError(f"1 to {MAX_HOSTS} hosts, got {hosts}")
        bits_per_second(rate)
        self.hosts, self.rate = hosts, rate
        self._name = f"taco-{os.getpid()}-{_start_time(os.getpid())}-{secrets.token_hex(3)}"
        self._switch = f"{self._name}-switch"
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> "Links":
        if reason := unsupported_reason():
            raise ConfigError(reason)
        sweep()
        with contextlib.ExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{self._name}-")))
            stack.callback(lambda: _remove([self._switch, *map(self._namespace, range(self.hosts))]))
            self._create()
            self.set_rate(self.rate)
            self._cleanup = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def address(self, host: int) -> str:
        """Return the IPv4 address of a host."""
        return f"10.77.0.{host + 1}"

    def set_rate(self, rate: str) -> None:
        """Change the speed of all links in both directions, while processes use them."""
        bits = bits_per_second(rate)
        _batch("tc", self._switch, [_shaping(f"p{host}", bits) for host in range(self.hosts)])
        for host in range(self.hosts):
            _batch("tc", self._namespace(host), [_shaping(INTERFACE, bits)])
        self.rate = rate

    def popen(self, host: int, argv: Sequence[str], **options: Any) -> subprocess.Popen:
        """Start a command on a host, in a process group of its own, with the three variables that JAX processes need.

        The machine's name resolves to the host's address there.

        Args:
            host: 0 .. hosts-1.
            argv: the command.
            **options: of subprocess.Popen; `env` is complemented.
        """
        env = dict(options.pop("env", None) or os.environ) | {
            "JAX_COORDINATOR_ADDRESS": f"{self.address(0)}:{_PORT}",
            "JAX_NUM_PROCESSES": str(self.hosts),
            "JAX_PROCESS_ID": str(host),
        }
        enter = ["ip", "netns", "exec", self._namespace(host), "sh", "-c", _WITH_HOSTS, "sh", self._hosts_file(host)]
        return subprocess.Popen([*enter, *argv], env=env, process_group=0, **options)

    def counters(self, host: int) -> Counters:
        """Return the counters of a host's interface, from outside."""
        text = _call(["ip", "-n", self._namespace(host), "-j", "-s", "link", "show", "dev", INTERFACE])
        stats = json.loads(text)[0]["stats64"]
        rx, tx = stats["rx"], stats["tx"]
        return Counters(tx["bytes"], tx["packets"], rx["bytes"], rx["packets"])

    def _namespace(self, host: int) -> str:
        return f"{self._name}-h{host}"

    def _hosts_file(self, host: int) -> str:
        return str(self._folder / f"hosts{host}")

    def _create(self) -> None:
        _call(["ip", "netns", "add", self._switch])
        _batch("ip", self._switch, ["link set lo up", "link add br0 type bridge mcast_snooping 0", *_up("br0")])
        for host in range(self.hosts):
            namespace, port = self._namespace(host), f"p{host}"
            _call(["ip", "netns", "add", namespace])
            lines = [
                "link set lo up",
                f"link add {INTERFACE} type veth peer name {port} netns {self._switch}",
                f"addr add {self.address(host)}/24 dev {INTERFACE}",
                *_up(INTERFACE),
                f"route change {_NETWORK} dev {INTERFACE} proto kernel scope link src {self.address(host)}"
                f" rto_min {_MIN_RETRANSMISSION_TIMEOUT}",
            ]
            _batch("ip", namespace, lines)
            _set_tcp(namespace)
            _batch("ip", self._switch, [f"link set {port} master br0", *_up(port)])
            # Gloo listens on the address that the machine's name resolves to.
            names = f"127.0.0.1 localhost\n{self.address(host)} {socket.gethostname()}\n"
            Path(self._hosts_file(host)).write_text(names)


def sweep() -> None:
    """Remove the namespaces, with their processes, and the folders whose owner is dead."""
    temporary = Path(tempfile.gettempdir())
    for name in sorted(os.listdir(temporary) + (os.listdir(_NAMESPACES) if _NAMESPACES.is_dir() else [])):
        if (match := _NAMES.fullmatch(name)) and _start_time(int(match[1])) != match[2]:
            _remove([name])
            shutil.rmtree(temporary / name, ignore_errors=True)


def _up(interface: str) -> list[str]:
    # Without an IPv6 address nothing is sent that no program asked for.
    return [f"link set {interface} addrgenmode none", f"link set {interface} up"]


def _set_tcp(namespace: str) -> None:
    """Set what the kernel has of the settings: one before 5.18 builds small packets for slow connections by itself."""
    writes = "; ".join(f"echo {value} > /proc/sys/net/ipv4/{name}" for name, value in _TCP_SETTINGS.items())
    subprocess.run(["ip", "netns", "exec", namespace, "sh", "-c", writes], capture_output=True, timeout=30)


def _shaping(interface: str, bits: float) -> str:
    if math.isinf(bits):
        return f"qdisc replace dev {interface} root noqueue"
    bytes_per_second = bits / 8
    burst = int(max(10 * _MTU, bytes_per_second / _TICKS_PER_SECOND))
    # The bytes that wait, not those of the bucket: longer queues hide what a slow link costs.
    limit = int(max(20 * _MTU, bytes_per_second * QUEUE_SECONDS))
    return f"qdisc replace dev {interface} root tbf rate {int(bits)}bit burst {burst} limit {limit}"


def _remove(namespaces: Sequence[str]) -> None:
    """End what runs in the namespaces, also what has left its process group, and delete them."""
    for name in namespaces:
        if not (_NAMESPACES / name).exists():
            continue
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
            if not found:
                break
            for pid in map(int, found):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _start_time(pid: int) -> str:
    """Return when a process began, in clock ticks, "" if it is dead: a number may be another process's by now."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _batch(tool: str, namespace: str, lines: Sequence[str]) -> str:
    return _call([tool, "-n", namespace, "-batch", "-"], "".join(f"{line}\n" for line in lines))


def _call(argv: Sequence[str], text: str | None = None) -> str:
    done = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise ConfigError(f"`{' '.join(argv)}`: {' '.join(done.stderr.split()) or f'exit code {done.returncode}'}")
    return done.stdout
