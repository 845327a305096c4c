"""Several processes: who takes part, waiting for all, and real ones that train, fail and go on together."""

import contextlib
import signal
import socket
import subprocess
import threading
import time

import chex
import pytest
from trainer import TINY, command, environment, free_port, numbers

from experiments import processes, train
from experiments.config import ConfigError
from experiments.processes import Processes, find
from experiments.rendezvous import wait_for_all

SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "gpu[07-08],gpu11",
    "SLURM_NTASKS": "6",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
VARIABLES = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}


@pytest.fixture
def environ(monkeypatch):
    """Return a function that sets variables; those of launchers are gone before."""
    for name in (*SLURM, *OPEN_MPI, *VARIABLES, "OMPI_VERSION", "JAX_COORDINATOR_PORT"):
        monkeypatch.delenv(name, raising=False)
    return lambda values: [monkeypatch.setenv(*item) for item in values.items()]


@pytest.mark.parametrize(
    ("variables", "flags", "expected"),
    [
        ({}, {}, Processes()),
        (VARIABLES, {}, Processes("a:1", 4, 3, "JAX_* variables")),
        (VARIABLES, {"index": 0, "coordinator": "b:2"}, Processes("b:2", 4, 0, "JAX_* variables")),
        (VARIABLES | SLURM, {}, Processes("a:1", 4, 3, "JAX_* variables")),
        # JAX takes the port from the job's number: 65535 - 4096 + 1 + 4097 % 4096.
        (SLURM, {}, Processes("gpu07:61441", 6, 4, "Slurm")),
        (SLURM, {"coordinator": "b:2"}, Processes("b:2", 6, 4, "Slurm")),
        (SLURM | {"JAX_COORDINATOR_PORT": "7"}, {}, Processes("gpu07:7", 6, 4, "Slurm")),
        (SLURM, {"count": 1}, Processes()),
        # A script of sbatch's that starts Python without srun.
        ({k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"}, {}, Processes()),
        (SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, {}, Processes()),
        ({}, {"coordinator": "[::1]:5", "count": 2, "index": 1}, Processes("[::1]:5", 2, 1, "flags")),
        ({"JAX_NUM_PROCESSES": "1"}, {}, Processes()),
    ],
)
def test_who_takes_part(environ, variables, flags, expected):
    environ(variables)
    assert find(**flags) == expected


def test_open_mpi_is_found(environ):
    environ(OPEN_MPI | {"OMPI_VERSION": "4.1.5"})
    found = find()
    assert (found.count, found.index, found.source) == (2, 1, "Open MPI")
    assert found.coordinator.startswith("10.96.0.1:")


@pytest.mark.parametrize(
    ("variables", "flags", "part"),
    [
        ({}, {"count": 2}, "--num-processes can only go with --coordinator (or JAX_COORDINATOR_ADDRESS) and --proc"),
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, {}, "--coordinator can only go with --num-processes (or JAX_NUM_PROCESS"),
        (VARIABLES, {"index": 4}, "--process-id must be from 0 to 3, got 4"),
        ({}, {"count": 1, "index": 1}, "--num-processes and --process-id can only go with --coordinator (or JAX_COORD"),
        (VARIABLES, {"count": 0}, "--num-processes must be 1 or more, got 0"),
        (VARIABLES, {"coordinator": "host"}, "--coordinator must be HOST:PORT, got 'host'"),
        (VARIABLES | {"JAX_PROCESS_ID": "x"}, {}, "JAX_PROCESS_ID must be a whole number, got 'x'"),
        (SLURM | {"SLURM_PROCID": "x"}, {}, "the environment of Slurm does not say who takes part"),
        ({}, {"heartbeat_timeout": 0}, "--heartbeat-timeout must be at least 1 second, got 0"),
    ],
)
def test_who_takes_part_must_be_clear(environ, variables, flags, part):
    environ(variables)
    with pytest.raises(ConfigError) as raised:
        find(**flags)
    assert part in str(raised.value)


def test_the_processes_must_divide_the_devices():
    with pytest.raises(ConfigError, match="--num-processes=3 does not divide the 8 devices of the mesh"):
        processes.join(Processes("127.0.0.1:1", 3, 0), 8)


def meet(port: int, *who: tuple[int, int], timeout: float = 5.0) -> list[str]:
    """Let (index, count) meet, each in a thread; return what they are told, nothing if all have come."""
    told = ["?"] * len(who)

    def run(place: int, index: int, count: int) -> None:
        try:
            wait_for_all(f"127.0.0.1:{port}", count, index, timeout)
            told[place] = ""
        except ConfigError as error:
            told[place] = str(error)

    threads = [threading.Thread(target=run, args=(place, *one)) for place, one in enumerate(who)]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    return told


def test_all_have_come_whoever_is_first():
    port = free_port()
    assert meet(port, (2, 3), (0, 3), (1, 3)) == ["", "", ""]
    # The port is free again at once, as JAX needs it.
    assert meet(port, (0, 2), (1, 2)) == ["", ""]


def test_all_are_told_who_did_not_come():
    expected = "of 4 processes, number 1, 3 did not come within 0.5 s"
    assert meet(free_port(), (0, 4), (2, 4), timeout=0.5) == [expected, expected]
    port = free_port()
    [told] = meet(port, (1, 2), timeout=0.5)
    assert told == f"process 1 of 2 did not find process 0 at 127.0.0.1:{port} within 0.5 s: Connection refused"


def test_numbers_that_do_not_fit_are_told():
    assert set(meet(free_port(), (0, 3), (1, 3), (1, 3))[:2]) == {"two processes say that they are number 1 of 3"}
    expected = "process 1 was told of 3 processes, process 0 of 2"
    assert meet(free_port(), (0, 2), (1, 3)) == [expected, expected]
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        [told] = meet(port, (0, 2))
        assert told == f"process 0 cannot listen at port {port}: Address already in use"


def test_strangers_and_the_restarted_do_not_count():
    port = free_port()
    told = []
    waiting = threading.Thread(target=lambda: told.extend(meet(port, (0, 3))))
    waiting.start()
    with contextlib.ExitStack() as stack:
        for words in (b"GET / HTTP/1.1\r\n", b"1 3\n"):
            for _ in range(100):
                with contextlib.suppress(ConnectionRefusedError):
                    connection = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                    break
                time.sleep(0.02)
            connection.sendall(words)
        time.sleep(0.2)
    assert meet(port, (1, 3), (2, 3)) == ["", ""]
    waiting.join()
    assert told == [""]


@contextlib.contextmanager
def trainers(compiled_once, count: int, mesh: str, *argv: str, **of_one: str):
    """Trainers in processes of their own; `of_one` are further arguments of some, such as p1="--seed=1"."""
    port = free_port()
    settings = environment(compiled_once) | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    del settings["JAX_NUM_CPU_DEVICES"]
    found = []
    try:
        for i in range(count):
            own = [of_one[f"p{i}"]] if f"p{i}" in of_one else []
            variables = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(count)}
            found.append(
                subprocess.Popen(
                    command("--recipe=tiny", "--set=sample_length=0", f"--mesh={mesh}", *argv, *own),
                    env=settings | variables | {"JAX_PROCESS_ID": str(i)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        yield found
    finally:
        for process in found:
            process.kill()
            process.communicate()


def read_until(process, part: str) -> None:
    for line in process.stdout:
        if part in line:
            return
    raise AssertionError(f"no line with {part!r}: {process.stderr.read()}")


def ended(found, timeout: float = 200) -> list[tuple[int, str]]:
    """Return the exit code of every process and the last line of its errors."""
    errors = [process.communicate(timeout=timeout)[1].strip().splitlines() for process in found]
    return [(process.returncode, lines[-1]) for process, lines in zip(found, errors, strict=True)]


def test_two_processes_fail_and_go_on_together(compiled_once, tmp_path):  # P3, P6
    shared = ["--set=optimizer.decay_steps=500", "--set=checkpoint.every=2"]
    argv = [*shared, "--steps=500", "--heartbeat-timeout=30", f"--out={tmp_path / 'run'}"]
    with trainers(compiled_once, 2, "tp2", *argv) as (first, second):
        read_until(first, "step   3/500")
        second.kill()
        killed = time.monotonic()
        assert [code for code, _ in ended([first, second])] == [7, -signal.SIGKILL]
        assert time.monotonic() - killed < 30
    with trainers(compiled_once, 2, "tp2", *argv) as (first, second):
        read_until(first, "resumed from step 2")
        read_until(first, "step   4/500")
        second.send_signal(signal.SIGTERM)
        assert [code for code, _ in ended([first, second])] == [143, 143]
    saved = max(int(path.name) for path in (tmp_path / "run/checkpoints").iterdir())
    losses = numbers(tmp_path / "run", "step", "loss", "grad_norm")
    assert [row[0] for row in losses] == list(range(1, saved + 1)) and 4 <= saved < 500
    # One process with as many devices: the same tokens, parameters and scales; sums in another order.
    assert train.main([*TINY, *shared, "--mesh=tp2", f"--steps={saved}", f"--out={tmp_path / 'alone'}"]) == 0
    chex.assert_trees_all_close(losses, numbers(tmp_path / "alone", "step", "loss", "grad_norm"), rtol=2e-3)


def test_processes_with_other_arguments_do_not_start(compiled_once, tmp_path):
    with trainers(compiled_once, 2, "tp2", f"--out={tmp_path}", p1="--seed=1") as found:
        line = (
            "python -m experiments.train: error: process 1 has another configuration than process 0; give all the same"
        )
        assert ended(found) == [(2, line), (2, line)]


@pytest.mark.slow
def test_folders_that_are_not_shared_and_files_that_one_misses(compiled_once, tmp_path):
    prefix = "python -m experiments.train: error:"
    with trainers(compiled_once, 2, "tp2", f"--out={tmp_path}", p1="--data=missing.txt") as found:
        assert ended(found) == [
            (2, f"{prefix} process 1 cannot start; its own message says why"),
            (2, f"{prefix} cannot read --data=missing.txt: No such file or directory"),
        ]
    with trainers(compiled_once, 2, "tp2", p0=f"--out={tmp_path / 'a'}", p1=f"--out={tmp_path / 'b'}") as found:
        for (code, line), name in zip(ended(found), "ab", strict=True):
            other = f"{prefix} --out={tmp_path / name} of process 1 is not the folder of process 0"
            assert code == 2 and line.startswith(other)
    assert not list(tmp_path.glob("*/.shared*"))


@pytest.mark.slow
def test_a_step_that_is_not_finite_ends_all(compiled_once, tmp_path):
    argv = ["--set=optimizer.learning_rate=1e38", "--steps=9", f"--out={tmp_path}"]
    with trainers(compiled_once, 2, "tp2", *argv) as found:
        (first, line), (second, other) = ended(found)
    assert (first, second) == (3, 3) and line == other and "loss nan, gradient norm nan" in line


@pytest.mark.slow
def test_a_process_that_falls_silent_ends_the_others(compiled_once, tmp_path):  # P3
    argv = ["--steps=500", "--heartbeat-timeout=10", f"--out={tmp_path}"]
    with trainers(compiled_once, 2, "tp2", *argv) as found:
        read_until(found[0], "step   2/500")
        found[1].send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        [(code, _)] = ended(found[:1], timeout=60)
        assert code not in (0, None) and time.monotonic() - stopped < 30


@pytest.mark.slow
def test_four_processes_train_as_one_does(uninterrupted, compiled_once, tmp_path):  # T5
    with trainers(compiled_once, 4, "dp2,pp2,tp2", f"--out={tmp_path}") as found:
        assert [code for code, _ in ended(found, timeout=400)] == [0] * 4
    for name in ("loss", "grad_norm"):
        chex.assert_trees_all_close(numbers(tmp_path, name), numbers(uninterrupted, name), rtol=2e-3)
