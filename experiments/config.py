"""The typed configuration of a training run: what `--print-config` shows and config.json keeps."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the GPT that is trained; `vocab_size` is the tokenizer's, padding to tp happens inside."""

    num_layers: int = 4
    hidden_size: int = 128
    num_heads: int = 8
    intermediate_size: int = 512
    vocab_size: int = 256
    tie_embeddings: bool = True


@dataclass(frozen=True)
class DataConfig:
    """What is read and how it is cut into batches; the same tokens on every mesh."""

    path: str = ""
    """A text file; empty means the King James Bible shipped with the package."""
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
    """Step at which the cosine ends; 0 means the run's number of steps."""
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
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    communication: CommunicationConfig = field(default_factory=CommunicationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
