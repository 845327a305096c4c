"""A trace that `--profile` makes, opened again."""

import functools

import jax
import jax.numpy as jnp
import pytest

from experiments.config import ConfigError, profiled_steps
from experiments.metrics import Progress, StepLog
from experiments.profiling import Profiler


@jax.jit
def train_step(x):
    with jax.named_scope("taco.psum.mlp.forward"):
        x = x @ x / 8
    return x, {"loss": jnp.sum(x), "grad_norm": jnp.float32(1), "lr": jnp.float32(0)}


def validate(x) -> dict[str, float]:
    return {"val_loss": float(jnp.linalg.norm(x))}


def run(folder, text: str, start: int, total: int) -> None:
    """Run the steps after `start` as the trainer does, with a hook that makes work of its own between them."""
    x = jnp.eye(8)
    with StepLog(None, start, total) as log, Profiler(folder, profiled_steps(text), start, log) as profiler:
        for number in range(start + 1, total + 1):
            with profiler.step(number):
                x, metrics = train_step(x)
            progress = Progress(number, number == total, x, metrics)
            log(progress)
            profiler(progress)
            log.annotate(functools.partial(validate, x))
        log.flush()


def trace(folder) -> tuple[list[int], set[str], bytes]:
    """Return the step numbers, the compiled modules that ran and the bytes of the one trace in a folder."""
    (file,) = folder.glob("plugins/profile/*/*.xplane.pb")
    steps, modules = [], set()
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                steps += [stats["step_num"]] if event.name == "train" else []
                modules |= {stats["hlo_module"]} if "hlo_module" in stats else set()
    return sorted(steps), modules, file.read_bytes()


# jaxlib's own iterator types lack a module name.
no_module = pytest.mark.filterwarnings("ignore:builtin type .* has no __module__ attribute:DeprecationWarning")


@no_module
def test_a_trace_holds_the_steps_of_its_range(tmp_path):
    run(tmp_path, "3:6", start=0, total=7)
    steps, modules, content = trace(tmp_path)
    assert steps == [3, 4, 5]
    assert "jit_train_step" in modules
    assert b"taco.psum.mlp.forward" in content


@no_module
def test_a_trace_of_one_step_leaves_out_the_hooks_before_and_after_it(tmp_path):
    run(tmp_path, "2:3", start=0, total=4)
    assert trace(tmp_path)[:2] == ([2], {"jit_train_step"})


@no_module
def test_a_run_that_resumes_inside_the_range_traces_the_rest(tmp_path):
    run(tmp_path, "2:5", start=3, total=6)
    assert trace(tmp_path)[0] == [4]


def test_a_range_that_is_over_traces_nothing_and_says_so(tmp_path, program_log):
    run(tmp_path, "2:5", start=4, total=6)
    assert list(tmp_path.iterdir()) == []
    assert "traces nothing: the run has done step 4 already" in program_log.text


@no_module
def test_an_error_inside_the_range_still_writes_the_trace(tmp_path):
    with pytest.raises(RuntimeError), StepLog(None, 0, 9) as log:
        with Profiler(tmp_path, profiled_steps("1:9"), 0, log) as profiler, profiler.step(1):
            train_step(jnp.eye(8))
            raise RuntimeError
    assert trace(tmp_path)[0] == [1]


def test_steps_of_a_range():
    assert profiled_steps("10:13") == range(10, 13) and not profiled_steps("")


@pytest.mark.parametrize("text", ["10", "10:", "a:b", "1:2:3", "10:10", "13:10", "0:3", "-1:3"])
def test_a_bad_range_is_one_line(text):
    with pytest.raises(ConfigError, match="--profile must be FIRST:STOP") as raised:
        profiled_steps(text)
    assert "\n" not in str(raised.value) and repr(text) in str(raised.value)
