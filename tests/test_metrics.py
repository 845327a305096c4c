import time

import jax.numpy as jnp
import pytest

from experiments.flops import Throughput
from experiments.metrics import Progress, StepLog, format_line, read_metrics

VALUES = {"loss": 4.59721, "grad_norm": 0.81234, "lr": 1e-3, "step_ms": 812.4, "tokens_per_s": 5041.6}
LINE = "step  11/100  loss 4.5972  grad norm 0.812  lr 1.00e-03  812 ms  5,042 tokens/s"


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({}, LINE),
        ({"tflops_per_device": 413.21}, f"{LINE}  413 TFLOP/s/device"),
        ({"tflops_per_device": 8.52e-5, "mfu": 0.4178}, f"{LINE}  85.2 MFLOP/s/device  MFU 41.8 %"),
        ({"alpha/mlp/forward/1": 8.0, "snr/mlp/forward": 29.0, "val_loss": 5.0}, f"{LINE}  validation 5.0000"),
        (
            {"first_step": 1.0, "tflops_per_device": 413.21, "mfu": 0.4},
            f"{LINE.removesuffix('  5,042 tokens/s')} (first step, with warm-up)",
        ),
    ],
)
def test_a_step_is_one_line(more, line):
    assert format_line(11, 100, VALUES | more) == line


def log_steps(log: StepLog, numbers, between=lambda number: None) -> None:
    for number in numbers:
        metrics = {name: jnp.float32(1) for name in ("loss", "grad_norm", "lr", "tokens")}
        log(Progress(number, False, None, metrics))
        between(number)
    log.flush()


def test_the_first_step_after_each_start_is_marked(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for start, numbers in ((0, range(1, 6)), (3, range(4, 7))):
        with StepLog(path, start, 6) as log:
            log_steps(log, numbers)
    assert [(row["step"], row.get("first_step")) for row in read_metrics(path)] == [
        (1, 1.0), (2, None), (3, None), (4, 1.0), (5, None), (6, None)
    ]  # fmt: skip


def test_a_pause_is_in_no_steps_time(tmp_path):
    path = tmp_path / "metrics.jsonl"

    def pause(number: int) -> None:
        if number == 2:
            with log.paused():
                time.sleep(0.5)

    with StepLog(path, 0, 4, throughput=Throughput(flops_per_step=1e9, num_devices=1)) as log:
        log_steps(log, range(1, 5), pause)
    rows = read_metrics(path)
    assert max(row["step_ms"] for row in rows) < 400
    for row in rows:
        assert row["tflops_per_device"] == pytest.approx(1e-3 / (1e-3 * row["step_ms"]))
