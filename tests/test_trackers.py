import dataclasses
import json
import sys
import types

import pytest
from event_files import events, scalars

from experiments import step, train
from experiments.config import LogConfig, TrainConfig
from experiments.metrics import Progress, StepLog, read_metrics
from experiments.trackers import NoTracker, TensorBoard, tracking


class FakeRun:
    """What `wandb.init` returns, as far as it is used; a resumed run begins where the service stands."""

    def __init__(self, step: int):
        self.step, self.logged, self.finished = step, [], False

    def log(self, values, *, step):
        self.logged.append((step, values))
        self.step = step

    def finish(self):
        self.finished = True


class FakeWandB(types.ModuleType):
    def __init__(self, failures: int = 0, step: int = 0):
        super().__init__("wandb")
        self.calls, self.failures, self.step, self.torn_down = [], failures, step, 0

    def init(self, **arguments):
        self.calls.append(arguments)
        if len(self.calls) <= self.failures:
            raise RuntimeError("no route to the service\nand much more")
        self.run = FakeRun(self.step)
        return self.run

    def teardown(self):
        self.torn_down += 1


def with_log(**fields) -> TrainConfig:
    return dataclasses.replace(TrainConfig(), log=LogConfig(**fields))


def test_tensorboard_reads_back_and_a_resumed_run_repeats_no_step(tmp_path):
    # The kill comes after step 5, the newest checkpoint is of step 3.
    for start, steps in ((0, range(1, 6)), (3, range(4, 9))):
        with tracking(with_log(tensorboard=True), tmp_path, start) as tracker:
            for number in steps:
                tracker.log(number, {"loss": 1 / number, "snr/mlp/forward": float(number)})
        file = next((tmp_path / "tensorboard").glob("events.out.tfevents.??????????.*"))
        # Files of one second have one name; runs do not start that fast.
        file.rename(file.with_name(f"events.out.tfevents.{start}.host"))
    found = scalars(tmp_path / "tensorboard")
    assert found["loss"] == [(n, pytest.approx(1 / n)) for n in range(1, 9)]
    assert found["snr/mlp/forward"] == [(n, float(n)) for n in range(1, 9)]
    texts = [v.tensor.string_val[0].decode() for e in events(tmp_path / "tensorboard/events.out.tfevents.0.host")
             for v in e.summary.value if v.tag.startswith("config")]  # fmt: skip
    assert len(texts) == 1 and json.loads(texts[0].strip("`json\n"))["compression"] == "taco"


def test_a_tracker_gets_the_finite_numbers_of_metrics_jsonl(tmp_path):
    class Recorder(NoTracker):
        def __init__(self):
            self.logged = []

        def log(self, step, values):
            self.logged.append({"step": step, **values})

    tracker = Recorder()
    with StepLog(tmp_path / "metrics.jsonl", 0, 2, tracker) as log:
        for number in (1, 2):
            metrics = {"loss": 1.5, "grad_norm": 2.0, "lr": 1e-3, "tokens": 64.0, "snr_forward": float("nan")}
            log(Progress(number, number == 2, None, metrics, {"val_loss": 3.0}))
        log.flush()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row.pop("snr_forward") for row in rows] == [None, None]
    assert tracker.logged == rows
    assert [row.get("first_step") for row in rows] == [1.0, None]


def test_wandb_gets_the_steps_that_it_does_not_have(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", wandb := FakeWandB())
    with tracking(with_log(wandb="taco"), tmp_path, 0) as tracker:
        for number in range(1, 6):
            tracker.log(number, {"loss": float(number)})
    assert wandb.run.logged == [(n, {"loss": float(n)}) for n in range(1, 6)] and wandb.run.finished
    # The service has five steps and stands at the sixth; the checkpoint is of step 3.
    wandb.step = 6
    with tracking(with_log(wandb="taco"), tmp_path, 3) as tracker:
        for number in range(4, 8):
            tracker.log(number, {"loss": float(number)})
    assert [number for number, _ in wandb.run.logged] == [6, 7]
    first, second = wandb.calls
    assert first == second and first["resume"] == "allow" and first["project"] == "taco"
    assert first["config"]["mesh"] == "dp1,pp1,tp1" and first["dir"] == str(tmp_path)


def test_another_run_folder_is_another_wandb_run(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", wandb := FakeWandB())
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        with tracking(with_log(wandb="taco"), tmp_path / name, 0):
            pass
    assert wandb.calls[0]["id"] != wandb.calls[1]["id"]


def test_wandb_without_its_service_goes_on_offline(tmp_path, monkeypatch, program_log):
    monkeypatch.setitem(sys.modules, "wandb", wandb := FakeWandB(failures=1))
    with tracking(with_log(wandb="taco"), tmp_path, 0) as tracker:
        tracker.log(1, {"loss": 1.0})
    assert wandb.calls[1]["mode"] == "offline" and wandb.calls[1]["id"] == wandb.calls[0]["id"]
    assert wandb.run.logged == [(1, {"loss": 1.0})] and wandb.torn_down == 1
    assert [record.getMessage().split(": ")[1] for record in program_log.records] == ["no route to the service"]


@pytest.mark.parametrize(
    ("name", "setting"), [("tensorboardX", "log.tensorboard=true"), ("wandb", "log.wandb=my-project")]
)
@pytest.mark.parametrize("module", [None, types.ModuleType("a folder of that name")])
def test_a_missing_package_is_one_line_before_anything_compiles(name, setting, module, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(step, "build", None)
    assert train.main(["--recipe=tiny", f"--out={tmp_path / 'run'}", f"--set={setting}"]) == 2
    error = capsys.readouterr().err
    assert f"pip install {name}" in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_nothing_is_recorded_unless_asked_for(tmp_path):
    with tracking(TrainConfig(), tmp_path, 0) as tracker:
        assert isinstance(tracker, NoTracker)
        tracker.log(1, {"loss": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_a_tensorboard_without_a_kill_is_on_disk_within_seconds(tmp_path):
    tracker = TensorBoard(tmp_path)
    tracker.start({}, 0)
    tracker.log(1, {"loss": 1.0})
    assert tracker._writer._flush_secs <= 1  # what SIGKILL may lose
    tracker.finish()
    assert scalars(tmp_path)["loss"] == [(1, 1.0)]
