"""Eight emulated devices for every test process, set before JAX starts; runs of the trainer that tests share."""

import collections
import contextlib
import logging
import os
import subprocess

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=100",
        "--xla_cpu_collective_call_terminate_timeout_seconds=1200",
    ]
).strip()
if not os.environ.get("TACO_CONTRACT_IMPLEMENTATIONS"):
    jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture
def program_log(caplog, monkeypatch):
    """What the program itself logs, whichever handlers the tests before have left behind."""
    log = logging.getLogger("experiments")
    monkeypatch.setattr(log, "handlers", [caplog.handler])
    monkeypatch.setattr(log, "propagate", False)
    caplog.set_level(logging.INFO, log.name)
    return caplog


@pytest.fixture(scope="module")
def quickly_compiled():
    """Compile without LLVM's optimisations, which take a third of the time; for files that compare within budgets."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@contextlib.contextmanager
def _compiled_into(folder):
    settings = {"jax_compilation_cache_dir": str(folder), "jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield {name.upper(): str(value) for name, value in settings.items()}
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """Folder of what runs of the trainer have compiled."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def compiled_once(compiled):
    """Let the runs of this file, also those in other processes, share what they compile with those of other files."""
    with _compiled_into(compiled) as settings:
        yield settings


@pytest.fixture(scope="session")
def uninterrupted(compiled, tmp_path_factory):
    """A run of six steps, recorded in every way; its log is in the folder too."""
    from trainer import TINY

    from experiments import train

    folder = tmp_path_factory.mktemp("uninterrupted")
    recording = ("--set=log.tensorboard=true", "--set=log.replica_hash_every=2", "--profile=2:4", "--peak-flops=1e10")
    with _compiled_into(compiled), (folder / "log").open("w") as log, contextlib.redirect_stdout(log):
        assert train.main([*TINY, *recording, f"--out={folder}"]) == 0
    return folder


@pytest.fixture
def small_disk(tmp_path):
    """Return a function that mounts a file system with a number of bytes and of files."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = []

    def mount(size: str, files: int):
        options = f"size={size},nr_inodes={files}"
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"needs the right to mount a tmpfs: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give the tests of a file to one process, which makes its fixtures once, and the files that share runs to one."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "trainer" if file.endswith(("test_faults.py", "test_train_cli.py", "test_inference.py")) else file

    return Scheduling(config, log)


def pytest_terminal_summary(terminalreporter):
    """Print the seconds that each file took, all processes together."""
    seconds = collections.Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration") and hasattr(report, "nodeid"):
                seconds[report.nodeid.split("::")[0]] += report.duration
    if seconds:
        terminalreporter.section("seconds per file")
        for file, total in seconds.most_common():
            terminalreporter.write_line(f"{total:8.1f}  {file}")
