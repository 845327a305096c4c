"""Train a GPT or Qwen on a dp x pp x tp mesh: `python -m experiments.train --mesh=dp4,pp4,tp8`.

Rerunning a command resumes its run folder. Exit codes:

      0  the run is complete
      2  a mistake in the command, found before anything is compiled
      3  a step was not finite and not applied
      4  the compiled step does not send what the configuration says
      5  devices that must hold the same bits do not (log.replica_hash_every)
      6  a checkpoint or a log could not be written; older checkpoints are kept
      7  another process is gone
     75  the time of --exit-after is up, state saved
    130  SIGINT (Ctrl-C), 138 SIGUSR1, 143 SIGTERM: state saved after the step under way; a second signal quits at once
"""

import dataclasses
import functools
import importlib.metadata
import itertools
import json
import logging
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments import communication, compiler_options, step
from experiments.checkpoint import CheckpointError, Checkpoints, Position, check_same_run
from experiments.cli import PROGRAM, Arguments, build_config, config_json, parse_arguments
from experiments.config import ConfigError, TrainConfig, profiled_steps, validate
from experiments.data import Batch, Corpus, TrainingData, load_corpus, validation_batches, with_model_sizes
from experiments.dry_run import dry_run
from experiments.flops import throughput_of
from experiments.generation import Generator, Sampling, allowed_ids
from experiments.metrics import (
    Bar,
    Hook,
    Progress,
    StepLog,
    read_metrics,
    start_logging,
    write_atomically,
)
from experiments.nonfinite import Diverged, NonfiniteGuard
from experiments.processes import agreed, check_same, check_shared, devices_of, find, join, mesh_of
from experiments.profiling import Profiler
from experiments.replicas import ReplicasDiffer, replica_check
from experiments.saved import keep_origin, make_folder, split_checkpoint
from experiments.stopping import Stop, describe
from experiments.trackers import check_installed, tracking
from taco_jax.models.config import padding_note

PEER_LOST = 7
# The end of process 0 ends the others, in a dump of JAX's; they shall say before what they have seen.
_LAST_WORDS_SECONDS = 2.0

_log = logging.getLogger("experiments")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the program's own) and return the exit code."""
    started = time.monotonic()
    argv = sys.argv[1:] if argv is None else argv
    try:
        arguments = parse_arguments(argv)
        config = build_config(arguments)
        validate(config)
        if arguments.dry_run:
            return dry_run(arguments, config)
        if arguments.print_config:
            print(config_json(config), end="")
            return 0
        processes = find(
            arguments.coordinator,
            arguments.num_processes,
            arguments.process_id,
            join_timeout=arguments.join_timeout,
            heartbeat_timeout=arguments.heartbeat_timeout,
        )
        join(processes, devices_of(config.mesh))
        session = Session(
            folder=run_folder(arguments, config),
            command=" ".join([PROGRAM, *argv]),
            from_step=arguments.from_step,
            deadline=arguments.exit_after and started + 60 * arguments.exit_after,
        )
        return train(config, session)
    except ConfigError as error:
        return _fail(error, 2)
    except Diverged as error:
        return _fail(error, 3)
    except communication.CommunicationMismatch as error:
        return _fail(error, 4)
    except ReplicasDiffer as error:
        return _fail(error, 5)
    except CheckpointError as error:
        return _fail(error, 6)
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        reason = str(error).split("\n")[0]
        return _fail(f"another process is gone ({reason}); the same commands go on from the last checkpoint", PEER_LOST)
    except OSError as error:
        return _fail(f"cannot read or write {error.filename or 'the run folder'}: {error.strerror or error}", 6)
    except KeyboardInterrupt:
        return _fail("interrupted; the same command goes on from the last checkpoint", 128 + signal.SIGINT)


def run_folder(arguments: Arguments, config: TrainConfig) -> Path:
    """Return where the run lives: --out, or a name that the mesh and the number of steps do not change."""
    model = f"-{arguments.model}" * bool(arguments.model)
    return Path(arguments.out or f"runs/{config.recipe}{model}-{config.compression}-seed{config.seed}")


@dataclasses.dataclass(frozen=True)
class Session:
    """What one call of the program adds to the configuration of a run.

    Attributes:
        folder: run folder.
        command: command line, for environment.json.
        from_step: checkpoint to go on from; None takes the newest.
        deadline: `time.monotonic()` at which it shall save and stop; None: when the run is complete.
    """

    folder: Path
    command: str
    from_step: int | None = None
    deadline: float | None = None


def train(config: TrainConfig, session: Session) -> int:
    """Train, or go on training, a run; return the exit code.

    Raises:
        ConfigError: for a mistake of the user's, before anything is compiled.
        Diverged: at a step that is not finite.
        CommunicationMismatch: if the compiled step does not send what the configuration says.
        CheckpointError: for a checkpoint that could not be written.
        ReplicasDiffer: if devices that must hold the same bits do not.
    """
    folder = session.folder
    started = time.perf_counter()
    with agreed():
        check_installed(config.log)
        corpus = load_corpus(config.data)
        config = with_model_sizes(config, corpus)
        make_folder(folder)
        config, mesh = mesh_of(config)
    check_same(configuration=dataclasses.asdict(config), data=corpus.digest)
    check_shared(folder)
    start_logging()
    with Checkpoints(folder / "checkpoints", config.checkpoint) as checkpoints:
        saved = checkpoints.latest(session.from_step)
        if saved:
            check_same_run(saved, config, corpus.digest, folder)
            if saved.step >= config.steps:
                _log.info(_complete(folder, saved.step, corpus))
                return 0
        _describe(config, corpus, folder, mesh, session.command)
        program = step.build(config, mesh)
        checkpoints.check_space(program.abstract_state())
        parameters = None if saved or not config.init_from else _load_parameters(config, program, folder)
        _compile(program)
        run = Run(config, session, corpus, program, checkpoints)
        _report_communication(run)
        state, start = _first_state(run, parameters)
        state, code = _loop(run, state, start)
    if code:
        _log.info("%s, state saved; the same command goes on from here", describe(code))
        return code
    _write_sample(run, state)
    _log.info("%s, %.0f s", _complete(folder, config.steps, corpus), time.perf_counter() - started)
    return 0


@dataclasses.dataclass(frozen=True)
class Run:
    """What does not change while a run trains."""

    config: TrainConfig
    session: Session
    corpus: Corpus
    program: step.Program
    checkpoints: Checkpoints

    @property
    def folder(self) -> Path:
        """Run folder."""
        return self.session.folder

    def rows(self, data: TrainingData, number: int) -> dict[str, jax.Array]:
        """Return batch `number` as global arrays on the mesh."""
        shape = self.program.abstract_batch["tokens"].shape
        return place_rows(functools.partial(data.rows, number), shape, self.program.batch_sharding)


def evaluate(program: step.Program, state: Any, batches: Sequence[dict[str, jax.Array]]) -> float:
    """Return the mean loss in nats per token over `batches` of arrays on the mesh."""
    sums = jax.device_get([program.eval_step(state, batch) for batch in batches])
    return float(sum(s["loss_sum"] for s in sums) / sum(s["tokens"] for s in sums))


def place(batch: Batch, sharding: jax.sharding.NamedSharding) -> dict[str, jax.Array]:
    """Return a batch, which every process has whole, as global arrays on the mesh."""
    return {name: jax.make_array_from_callback(rows.shape, sharding, rows.__getitem__) for name, rows in batch.items()}


def place_rows(
    read: Callable[[int, int], Batch], shape: tuple[int, int], sharding: jax.sharding.NamedSharding
) -> dict[str, jax.Array]:
    """Return a batch as global arrays on the mesh; each process reads the rows of its own devices.

    Args:
        read: returns rows start to stop - 1 of the batch.
        shape: of the batch, (sequences, tokens).
        sharding: how it lies on the mesh.
    """
    read = functools.cache(read)

    def part(name: str, index: tuple[slice, ...]) -> np.ndarray:
        start, stop, _ = index[0].indices(shape[0])
        return read(start, stop)[name][:, index[1]]

    return {
        name: jax.make_array_from_callback(shape, sharding, functools.partial(part, name)) for name in step.BATCH_DTYPES
    }


def _loop(run: Run, state: Any, start: int) -> tuple[Any, int]:
    """Run the steps from `start` on; return the last state and the exit code of an early end, or 0."""
    steps = run.config.steps
    data = TrainingData(run.corpus, run.config.data, run.config.seed)
    path = run.folder / "metrics.jsonl" if jax.process_index() == 0 else None
    throughput = throughput_of(run.config, run.program.model_config, run.program.mesh)
    guard = _guard(run, start)
    with (
        tracking(run.config, run.folder, start) as tracker,
        StepLog(path, start, steps, tracker, throughput, guard) as log,
        Profiler(run.folder / "profile", profiled_steps(run.config.log.profile), start, log) as profiler,
        Bar(start, steps) as bar,
        Stop(run.session.deadline) as stop,
    ):
        replicas = replica_check(run.config.log.replica_hash_every, log)
        hooks: list[Hook] = [log, profiler, replicas, _validation(run, log), _saving(run, log), bar]
        log.restart_clock()
        for done in range(start, steps):
            batch = run.rows(data, done)
            with profiler.step(done + 1):
                state, metrics = run.program.train_step(state, done, batch)
            code = stop.code() if done + 1 < steps else 0
            progress = Progress(done + 1, bool(code) or done + 1 == steps, state, metrics)
            for hook in hooks:
                hook(progress)
            if code:
                break
    if guard.skipped:
        _log.warning("%d steps of this run were not finite and not applied", guard.skipped)
    return state, code


def _guard(run: Run, start: int) -> NonfiniteGuard:
    before = [m for m in read_metrics(run.folder / "metrics.jsonl") if m["step"] <= start and m.get("skipped_step")]
    return NonfiniteGuard(run.config.on_nonfinite, run.program.nonfinite_origin, len(before))


def _validation(run: Run, log: StepLog) -> Hook:
    """Return the hook that measures the validation loss now and then and when the run is complete."""
    config, sharding = run.config, run.program.batch_sharding
    batches = [place(batch, sharding) for batch in validation_batches(run.corpus, config.data, config.eval_batches)]

    def hook(progress: Progress) -> None:
        def measure() -> dict[str, float]:
            return {"val_loss": evaluate(run.program, progress.state, batches)}

        if progress.step % config.eval_every == 0 or progress.step == config.steps:
            log.annotate(measure)

    return hook


def _saving(run: Run, log: StepLog) -> Hook:
    """Return the hook that saves now and then and when the loop ends, and notices a write that failed."""

    def hook(progress: Progress) -> None:
        run.checkpoints.poll()
        if progress.step % run.config.checkpoint.every == 0 or progress.is_last:
            log.flush()  # a step that was not finite ends the run here, before it is saved
            position = Position(progress.step, dataclasses.asdict(run.config), run.corpus.digest)
            run.checkpoints.save(position, progress.state, run.program.unpadded_state)
            log.restart_clock()

    return hook


def _compile(program: step.Program) -> None:
    """Compile the training step."""
    started = time.perf_counter()
    try:
        program.compiled  # noqa: B018  compiles
    except NotImplementedError as error:
        raise ConfigError(str(error)) from None
    _log.info("compiled the training step in %.1f s", time.perf_counter() - started)


def _report_communication(run: Run) -> None:
    """Log what the compiled step sends, keep it in communication.json and compare it with the configuration."""
    program, sizes = run.program, dict(run.program.mesh.shape)
    text = program.compiled.as_text()
    assert text is not None, "this backend prints no HLO, so nobody knows what travels"
    collectives = communication.read_collectives(text, sizes)
    plan = communication.planned_collectives(program.jaxpr, sizes)
    rows = communication.communication_rows(collectives, plan)
    if rows:
        _log.info("communication per step and device:\n%s", communication.communication_text(rows))
    _write(run.folder / "communication.json", json.dumps(communication.communication_json(rows), indent=2) + "\n")
    communication.check(collectives, plan, program.compressed_directions, program.compression.min_bytes)


def _first_state(run: Run, parameters: Any) -> tuple[Any, int]:
    """Return the state to go on from and the number of steps it has seen; a new run starts with `parameters`."""
    program = run.program
    restored = run.checkpoints.restore(program.abstract_state(), run.session.from_step, program.unpadded_state)
    if restored:
        state, position = restored
        _log.info("resumed from step %d", position.step)
        return state, position.step
    state = run.program.init(run.config.seed)
    if parameters is not None:
        state = {**state, "params": parameters}
    data = TrainingData(run.corpus, run.config.data, run.config.seed)
    return program.calibrate(state, run.rows(data, 0)), 0


def _load_parameters(config: TrainConfig, program: step.Program, folder: Path) -> Any:
    """Return the parameters of the run, or of the one checkpoint, that --init-from names; keep what came with them."""
    source, at = split_checkpoint(Path(config.init_from))
    with Checkpoints(source / "checkpoints", config.checkpoint) as checkpoints:
        target, unpadded = ({"params": tree["params"]} for tree in (program.abstract_state(), program.unpadded_state))
        restored, position = checkpoints.restore_parts(target, at, unpadded)
    _log.info("parameters of %s, step %d; optimizer and scales start anew", source, position.step)
    if jax.process_index() == 0:
        keep_origin(config, folder)
    return restored["params"]


def _describe(config: TrainConfig, corpus: Corpus, folder: Path, mesh: jax.sharding.Mesh, command: str) -> None:
    """Log what is about to run; write config.json and environment.json."""
    _log.info("run folder %s", folder)
    _log.info("mesh %s of %d devices, compression %s", config.mesh, mesh.size, config.compression)
    if note := padding_note(step.model_config(config), mesh.shape["tp"]):
        _log.info(note)
    _log.info(corpus.describe())
    decay = config.optimizer.decay_steps
    if decay and config.steps > decay:
        rate = config.optimizer.learning_rate * config.optimizer.final_fraction
        _log.info("the learning rate stays at %.2e after step %d (optimizer.decay_steps)", rate, decay)
    device = mesh.devices.flat[0]
    options = compiler_options.step_options(mesh)
    if options:
        _log.info("the step is compiled with %s (XLA_FLAGS of the same names win)", compiler_options.describe(options))
    environment = {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")},
        "platform": device.platform,
        "device_kind": device.device_kind,
        "device_count": jax.device_count(),
        "process_count": jax.process_count(),
        "mesh": config.mesh,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "compiler_options": options,
        "command": command,
    }
    _write(folder / "environment.json", json.dumps(environment, indent=2) + "\n")
    _write(folder / "config.json", config_json(config))


def _write_sample(run: Run, state: Any) -> None:
    """Let the model continue the beginning of the validation text; log it and keep it in sample.txt."""
    config = run.config
    if not config.sample_length:
        return
    prompt = run.corpus.validation[: 1 + config.data.sequence_length // 2].tolist()
    generator = Generator(
        run.program,
        allowed_ids(run.corpus.tokenizer),
        length=run.program.model_config.max_positions,
        sampling=Sampling(seed=config.seed),
    )
    tokens = itertools.islice(generator.generate(state, prompt), config.sample_length)
    text = run.corpus.tokenizer.decode([*prompt, *tokens])
    _log.info("sample: %s", text)
    _write(run.folder / "sample.txt", text + "\n")


def _complete(folder: Path, steps: int, corpus: Corpus) -> str:
    losses = [m["val_loss"] for m in read_metrics(folder / "metrics.jsonl") if m.get("val_loss") is not None]
    validation = f"validation loss {corpus.format_loss(losses[-1])}" if losses else "no validation loss"
    return f"the run is complete: {validation} after {steps} steps; {folder} (a larger --steps continues it)"


def _write(path: Path, text: str) -> None:
    if jax.process_index() == 0:
        write_atomically(path, text)


def _fail(error: Exception | str, code: int) -> int:
    print(f"{PROGRAM}: error: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    exit_code = main()
    if exit_code in (6, PEER_LOST):
        # Orbax's threads go on waiting for files that will never be written, JAX for processes that will never answer.
        if jax.process_count() > 1 and jax.process_index() == 0:
            time.sleep(_LAST_WORDS_SECONDS)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    sys.exit(exit_code)
