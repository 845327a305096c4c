"""What ends a run early, and that the same command then goes on to the same bits: real processes, signals and disks."""

import contextlib
import json
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from event_files import scalars
from trainer import TINY, assert_same_run, command, environment, numbers

from experiments import train
from experiments.data import TrainingData
from experiments.metrics import read_metrics
from experiments.nonfinite import MAX_CONSECUTIVE, Diverged, NonfiniteGuard

pytestmark = pytest.mark.usefixtures("compiled_once")


@contextlib.contextmanager
def trainer(compiled_once, *argv: str):
    """A trainer in a process of its own; at the end it has ended."""
    options = {"env": environment(compiled_once), "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command(*argv), **options) as process:
        try:
            yield process
        finally:
            process.kill()


def lines_until(process, prefix: str) -> None:
    for line in process.stdout:
        if line.startswith(prefix):
            return
    raise AssertionError(f"no line {prefix!r}: {process.stderr and process.stderr.read()}")


def test_a_run_killed_in_the_middle_of_saving_resumes(uninterrupted, compiled_once, tmp_path):  # K3
    argv = [*TINY, "--set=checkpoint.every=1", "--set=checkpoint.keep=2", f"--out={tmp_path}"]
    argv.append("--set=log.tensorboard=true")
    with trainer(compiled_once, *argv) as process:
        lines_until(process, "step 2/6")
        while not list((tmp_path / "checkpoints").glob("*-tmp*")):
            assert process.poll() is None, "no checkpoint was being written"
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL
    assert list((tmp_path / "checkpoints").glob("*-tmp*")), "the kill came too late"
    # What the last step wrote may be cut off.
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    assert train.main(argv) == 0
    assert_same_run(tmp_path, uninterrupted)
    # What was written in the second before the kill may be missing, but no step is there twice.
    steps = [number for number, _ in scalars(tmp_path / "tensorboard")["loss"]]
    assert steps == sorted(set(steps)) and steps[-2:] == [5, 6]


def test_whatever_stops_a_run_saves_and_it_goes_on(uninterrupted, tmp_path, capsys, monkeypatch):  # P6
    rows = TrainingData.rows
    argv = [*TINY, "--set=checkpoint.every=100", f"--out={tmp_path}"]
    for done, number in enumerate((signal.SIGINT, signal.SIGTERM, signal.SIGUSR1), start=2):

        def stop_in_the_step(self, step, start, stop, done=done, number=number):
            if (step, start) == (done - 1, 0):
                signal.raise_signal(number)
            return rows(self, step, start, stop)

        with monkeypatch.context() as patch:
            patch.setattr(TrainingData, "rows", stop_in_the_step)
            assert train.main(argv) == 128 + number
        out = capsys.readouterr().out
        assert f"stopped by signal {number:d}, state saved" in out
        assert done == 2 or f"resumed from step {done - 1}" in out
        assert len(read_metrics(tmp_path / "metrics.jsonl")) == done
    assert train.main([*argv, "--exit-after=0.001"]) == 75
    assert "the time of --exit-after is up, state saved" in capsys.readouterr().out
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 5
    assert train.main([*argv, "--exit-after=60"]) == 0
    assert "resumed from step 5" in capsys.readouterr().out
    assert_same_run(tmp_path, uninterrupted)


SECOND_SIGNAL = """
import os, signal, sys
from experiments.stopping import Stop
with Stop() as stop:
    os.kill(os.getpid(), int(sys.argv[1]))
    print("exit code", stop.code(), flush=True)
    os.kill(os.getpid(), int(sys.argv[1]))
    print("still here", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda n: n.name)
def test_a_second_signal_quits_at_once(number):  # P6
    done = subprocess.run([sys.executable, "-c", SECOND_SIGNAL, str(int(number))], capture_output=True, text=True)
    assert done.returncode == -number
    assert done.stdout == f"exit code {128 + number}\n"


@pytest.mark.slow
def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(uninterrupted, compiled_once, tmp_path):  # K4
    shutil.copytree(uninterrupted, tmp_path, dirs_exist_ok=True)
    for file in (tmp_path / "checkpoints" / "6" / "state").rglob("manifest.ocdbt"):
        file.write_bytes(file.read_bytes()[:20])
    with trainer(compiled_once, *TINY, "--steps=7", f"--out={tmp_path}") as process:
        out, error = process.communicate(timeout=200)
    assert (process.returncode, error) == (0, "")
    assert out.count(f"checkpoint {tmp_path / 'checkpoints' / '6'} cannot be read, trying the one before it: ") == 1
    assert "resumed from step 3" in out
    assert numbers(tmp_path, "step", "loss")[:6] == numbers(uninterrupted, "step", "loss")


def test_a_disk_that_fills_up_ends_the_run_and_keeps_what_is_saved(
    uninterrupted, compiled_once, small_disk, tmp_path
):  # K2
    disk = small_disk("64m", 400)
    argv = [*TINY, f"--out={disk / 'run'}"]
    with trainer(compiled_once, *argv) as process:
        lines_until(process, "step 4/6")
        while not (disk / "run/checkpoints/3").exists():
            assert process.poll() is None
        # There is room for bytes but for no more files, so that the write fails and not the look at the free space.
        with contextlib.suppress(OSError):
            for i in range(400):
                (disk / f"ballast{i}").touch()
        _, error = process.communicate(timeout=200)
    assert process.returncode == 6
    assert error.startswith(
        f"python -m experiments.train: error: checkpoint {disk / 'run/checkpoints/6'} could not be"
    ), error
    assert "No space left on device; older ones are kept" in error and error.count("\n") == 1, error
    assert [p.name for p in (disk / "run/checkpoints").iterdir() if p.name.isdigit()] == ["3"]
    for file in disk.glob("ballast*"):
        file.unlink()
    assert train.main(argv) == 0
    assert_same_run(disk / "run", uninterrupted)


def test_a_disk_without_room_for_a_checkpoint_is_refused(small_disk, capsys):  # K2
    assert train.main([*TINY, f"--out={small_disk('1m', 400)}"]) == 2
    error = capsys.readouterr().err
    assert "MiB, 1.0 MiB are free; make room or choose another --out" in error and error.count("\n") == 1


def test_a_full_log_is_one_line(small_disk, capsys, monkeypatch):  # K2
    disk = small_disk("8m", 400)
    rows = TrainingData.rows

    def fill_at_the_second(self, step, start, stop):
        if (step, start) == (1, 0):
            free = shutil.disk_usage(disk).free
            (disk / "ballast").write_bytes(bytes(free))
        return rows(self, step, start, stop)

    monkeypatch.setattr(TrainingData, "rows", fill_at_the_second)
    # The first object fills the page that the file has.
    assert train.main([*TINY, "--steps=4", "--set=checkpoint.every=100", f"--out={disk / 'run'}"]) == 6
    error = capsys.readouterr().err
    assert "No space left on device" in error or "could not be saved" in error
    assert error.count("\n") == 1


def test_an_earlier_checkpoint_can_be_gone_back_to(uninterrupted, tmp_path, capsys):
    shutil.copytree(uninterrupted, tmp_path, dirs_exist_ok=True)
    argv = [*TINY, f"--out={tmp_path}"]
    assert train.main([*argv, "--from-step=4"]) == 2
    assert "no checkpoint of step 4" in capsys.readouterr().err
    assert train.main([*argv, "--from-step=3"]) == 0
    out = capsys.readouterr().out
    assert "resumed from step 3" in out and f"moved checkpoints 6 to {tmp_path / 'checkpoints-after-3'}" in out
    assert_same_run(tmp_path, uninterrupted)


def test_a_new_run_starts_with_the_parameters_of_another(uninterrupted, tmp_path, capsys):
    argv = [*TINY, f"--init-from={uninterrupted}", "--steps=1", f"--out={tmp_path / 'new'}"]
    assert train.main(argv) == 0
    assert f"parameters of {uninterrupted}, step 6; optimizer and scales start anew" in capsys.readouterr().out
    [[first]] = numbers(tmp_path / "new", "loss")
    trained = numbers(uninterrupted, "loss")
    # The learning rate of the old run's sixth step no longer matters: the parameters do, and they have learnt.
    assert first < trained[4][0] < trained[0][0]
    # The same command resumes, from its own checkpoint.
    assert train.main(argv) == 0
    assert "the run is complete" in capsys.readouterr().out
    assert train.main([*argv[:-1], f"--out={uninterrupted}"]) == 2
    assert "init_from is empty, not" in capsys.readouterr().err
    assert train.main([*argv[:-1], "--set=model.hidden_size=128", f"--out={tmp_path / 'wide'}"]) == 2
    assert "does not fit this run" in capsys.readouterr().err
    assert train.main([*TINY, f"--init-from={tmp_path}", f"--out={tmp_path / 'none'}"]) == 2
    assert f"{tmp_path} is no folder of a run or of experiments.convert" in capsys.readouterr().err


def poison(monkeypatch, *steps: int) -> None:
    """Let the loss of some steps be NaN: their masks are."""
    rows = TrainingData.rows

    def poisoned(self, step, *which):
        found = rows(self, step, *which)
        return {**found, "mask": found["mask"] * np.float32("nan")} if step in steps else found

    monkeypatch.setattr(TrainingData, "rows", poisoned)


def test_a_step_that_is_not_finite_ends_the_run(tmp_path, capsys, monkeypatch):
    poison(monkeypatch, 2)
    assert train.main([*TINY, f"--out={tmp_path}"]) == 3
    error = capsys.readouterr().err
    assert "error: step 3: loss nan, gradient norm nan, first in the backward head message, gradient of " in error
    assert "the step was not applied" in error and error.count("\n") == 1
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and json.loads(text.splitlines()[-1])["loss"] is None
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_step_that_is_not_finite_can_be_left_out(uninterrupted, tmp_path, capsys, monkeypatch):
    poison(monkeypatch, 2, 4)
    assert train.main([*TINY, "--steps=4", "--set=on_nonfinite=skip", f"--out={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert "step 3: loss nan" in out and "the step was not applied, 1 so far" in out
    assert "1 steps of this run were not finite and not applied" in out
    losses = numbers(tmp_path, "loss")
    assert losses[:2] == numbers(uninterrupted, "loss")[:2] and losses[2] == [None]
    # The count goes on with the run.
    assert train.main([*TINY, "--set=on_nonfinite=skip", f"--out={tmp_path}"]) == 0
    assert "step 5: loss nan" in (out := capsys.readouterr().out) and "2 so far" in out


def test_too_many_in_a_row_end_the_run():
    guard = NonfiniteGuard("skip", lambda values: "")
    bad = {"loss": float("nan"), "grad_norm": 1.0, "skipped_step": 1.0}
    for step in range(MAX_CONSECUTIVE - 1):
        guard(step, bad)
    guard(50, {"loss": 1.0, "grad_norm": 1.0, "skipped_step": 0.0})
    for step in range(MAX_CONSECUTIVE - 1):
        guard(step, bad)
    with pytest.raises(Diverged, match="step 60: .* none of the last 10 steps was finite"):
        guard(60, bad)
    assert guard.skipped == 2 * MAX_CONSECUTIVE - 1
