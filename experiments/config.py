"""The typed configuration of a training run, what `--print-config` shows and config.json keeps, and its checks."""

import dataclasses
import difflib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from taco_jax.config import PRESETS
from taco_jax.models.config import ModelConfig, divisors
from taco_jax.pallas import registry
from taco_jax.sharding.mesh import parse_mesh

NONFINITE_POLICIES = ("abort", "skip")
DTYPES = ("bfloat16", "float16", "float32")


class ConfigError(ValueError):
    """A mistake of the user's: its text is one line that says what would work."""


@dataclass(frozen=True)
class DataConfig:
    """What is read and how it is cut into batches; the same tokens on every mesh."""

    path: str = ""
    """A text, a .jsonl file, a .bin of token ids, or several with weights, `a.bin:0.7,b.txt:0.3`; without weights they
    count in proportion to their sizes. Empty means the King James Bible shipped with the package."""
    tokenizer: str = ""
    """`bytes`, a tokenizer.json, a folder with one or with vocab.json and merges.txt, or VOCAB,MERGES. Empty means the
    first .bin file's, or bytes."""
    text_field: str = "text"
    """Where the text stands in the objects of a .jsonl file."""
    sequence_length: int = 64
    batch_size: int = 64
    """Sequences per step over the whole mesh."""
    validation_fraction: float = 0.05


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up and cosine decay to `final_fraction` of the peak."""

    learning_rate: float = 5e-3
    warmup_steps: int = 10
    decay_steps: int = 0
    """Step at which the cosine ends, whatever the number of steps: a run that is continued later follows the same
    curve. 0 means the number of steps, which bends the curve of a run that is continued."""
    final_fraction: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    """Applied to matrices only."""
    clip_norm: float = 1.0


@dataclass(frozen=True)
class ParallelConfig:
    """How the mesh is used."""

    num_microbatches: int = 4
    remat: bool = True


@dataclass(frozen=True)
class CommunicationConfig:
    """What travels on the tensor-parallel axis; the preset is `--compression`."""

    min_bytes: int = 4096
    chunks: int = 1
    implementation: str = "auto"


@dataclass(frozen=True)
class CheckpointConfig:
    """When state is saved and how much of it is kept."""

    every: int = 50
    keep: int = 3
    """How many of the newest ones stay."""
    keep_every: int = 0
    """Steps whose multiples stay for good; 0: none."""


@dataclass(frozen=True)
class LogConfig:
    """What is recorded beside the log's lines and metrics.jsonl."""

    tensorboard: bool = False
    """Write event files to RUN/tensorboard; needs tensorboardX."""
    wandb: str = ""
    """Project of Weights & Biases to send the metrics to; needs wandb. Empty means none."""
    replica_hash_every: int = 0
    """Steps between comparisons of the replicas of every array of the state, bit by bit; 0 means never."""
    peak_flops: float = 0.0
    """Dense FLOP/s of one device, which the MFU is a fraction of; 0 means what is known of the device."""
    profile: str = ""
    """Steps FIRST:STOP to trace into RUN/profile, the second not included; empty means none."""


@dataclass(frozen=True)
class TrainConfig:
    """One training run."""

    mesh: str = "dp1,pp1,tp1"
    recipe: str = "main"
    compression: str = "taco"
    steps: int = 100
    seed: int = 0
    dtype: str = "bfloat16"
    """Compute type; weights and moments are float32."""
    eval_every: int = 50
    eval_batches: int = 8
    sample_length: int = 200
    on_nonfinite: str = "abort"
    """What happens at a step whose loss or gradient is not finite, which is never applied: `abort` ends the run, `skip`
    counts it and goes on."""
    init_from: str = ""
    """Run folder, or checkpoint in one, whose parameters a new run starts with; optimizer and scales start anew."""
    model: ModelConfig = field(default_factory=lambda: ModelConfig(num_layers=4, hidden_size=128, num_heads=8))
    """Architecture; a vocab_size of 0 means the tokenizer's (ids beyond the tokenizer's are never sampled), a
    max_positions of 0 data.sequence_length."""
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    communication: CommunicationConfig = field(default_factory=CommunicationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)


def flatten(config: object, prefix: str = "") -> dict[str, Any]:
    """Return every field of a configuration (or of its dict) under its dotted name."""
    fields = config if isinstance(config, dict) else vars(config)
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        nested = isinstance(value, dict) or dataclasses.is_dataclass(value)
        flat |= flatten(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return flat


def profiled_steps(text: str) -> range:
    """Return the steps that `log.profile` names, "10:13" being 10, 11, 12; none for an empty text.

    Raises:
        ConfigError: for anything but two ascending step numbers, of which the first is 1.
    """
    if not text:
        return range(0)
    try:
        first, stop = map(int, text.split(":"))
    except ValueError:
        raise ConfigError(f"--profile must be FIRST:STOP, as 10:13 for steps 10 to 12, got {text!r}") from None
    if not 1 <= first < stop:
        raise ConfigError(f"--profile must be FIRST:STOP with 1 <= FIRST < STOP, got {text!r}")
    return range(first, stop)


def nearest(name: str, names: Iterable[str]) -> str:
    """Return `"; did you mean X?"` for the most similar of `names`, or nothing if none is similar."""
    found = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"; did you mean {found[0]}?" if found else ""


def validate(config: TrainConfig) -> None:
    """Check a configuration without touching a device.

    Raises:
        ConfigError: naming every mistake, with the numbers and what would work, on one line.
    """
    problems = list(_problems(config))
    if problems:
        raise ConfigError("; ".join(problems))


def _problems(config: TrainConfig) -> Iterator[str]:
    yield from _field_problems(config)
    try:
        sizes = parse_mesh(config.mesh)
    except ValueError as error:
        yield str(error)
        return
    yield from _mesh_problems(config, sizes["dp"], sizes["pp"])


def _field_problems(config: TrainConfig) -> Iterator[str]:
    choices = (
        ("compression", config.compression, PRESETS),
        ("dtype", config.dtype, DTYPES),
        ("on_nonfinite", config.on_nonfinite, NONFINITE_POLICIES),
        ("communication.implementation", config.communication.implementation, _implementations()),
    )
    for name, chosen, allowed in choices:
        if chosen not in allowed:
            yield f"{name} must be one of {', '.join(allowed)}, got {chosen!r}{nearest(chosen, allowed)}"
    values = flatten(config)
    for name, (low, high) in _RANGES.items():
        if not low <= values[name] <= high:
            limits = f"at least {low}" if high == math.inf else f"from {low} to {high}"
            yield f"{name} must be {limits}, got {values[name]}"
    if not 0 < config.optimizer.learning_rate < math.inf:
        yield f"optimizer.learning_rate must be above 0 and finite, got {config.optimizer.learning_rate}"
    if not 0 < config.data.validation_fraction < 1:
        yield f"data.validation_fraction must be between 0 and 1, got {config.data.validation_fraction}"
    if config.log.peak_flops and not 1e6 <= config.log.peak_flops <= 1e18:
        yield f"--peak-flops must be one device's FLOP/s, such as 989e12, got {config.log.peak_flops:g}"
    try:
        if (steps := profiled_steps(config.log.profile)) and steps[-1] > config.steps:
            yield f"--profile={config.log.profile} traces up to step {steps[-1]}, but the run has {config.steps} steps"
    except ConfigError as error:
        yield str(error)
    longest = config.model.max_positions
    if 0 < longest < config.data.sequence_length:
        yield f"data.sequence_length={config.data.sequence_length} is longer than model.max_positions={longest}"


def _implementations() -> tuple[str, ...]:
    return "auto", *registry.IMPLEMENTATIONS, *registry.registered()


def _mesh_problems(config: TrainConfig, dp: int, pp: int) -> Iterator[str]:
    model = config.model
    if pp > 0 and model.num_layers % pp:
        usable = _listed(divisors(model.num_layers))
        yield f"pp={pp} does not divide model.num_layers={model.num_layers} (usable pp: {usable})"
    parts = dp * config.parallel.num_microbatches
    batch = config.data.batch_size
    if parts > 0 and batch > 0 and batch % parts:
        below, above = batch // parts * parts, (batch // parts + 1) * parts
        usable = _listed(size for size in (below, above) if size)
        yield (
            f"data.batch_size={batch} is no multiple of dp={dp} x parallel.num_microbatches="
            f"{config.parallel.num_microbatches} (nearest usable: {usable})"
        )


_RANGES: dict[str, tuple[float, float]] = {
    "steps": (1, math.inf),
    # JAX keys and grain's shuffle both take a seed of 32 bits.
    "seed": (0, 2**32 - 1),
    "eval_every": (1, math.inf),
    "eval_batches": (1, math.inf),
    "sample_length": (0, math.inf),
    "data.sequence_length": (1, math.inf),
    "data.batch_size": (1, math.inf),
    "optimizer.warmup_steps": (0, math.inf),
    "optimizer.decay_steps": (0, math.inf),
    "optimizer.final_fraction": (0, 1),
    "optimizer.b1": (0, 1),
    "optimizer.b2": (0, 1),
    "optimizer.eps": (0, math.inf),
    "optimizer.weight_decay": (0, math.inf),
    "optimizer.clip_norm": (1e-30, math.inf),
    "parallel.num_microbatches": (1, math.inf),
    "communication.min_bytes": (0, math.inf),
    "communication.chunks": (1, math.inf),
    "checkpoint.every": (1, math.inf),
    "checkpoint.keep": (1, math.inf),
    "checkpoint.keep_every": (0, math.inf),
    "log.replica_hash_every": (0, math.inf),
}


def _listed(values: Iterable[int]) -> str:
    return ", ".join(map(str, values))
