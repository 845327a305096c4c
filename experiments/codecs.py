"""Print what each preset costs and keeps: bytes per value, round-trip and all-reduce signal-to-noise ratio.

Beside each measured figure stands the one that `experiments.rounding` predicts without running the codec.

python -m experiments.codecs [--size N] [--ranks N] [--seed N]
"""

import functools
from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import tyro
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from rich import box
from rich.console import Console
from rich.table import Table

import taco_jax
from experiments.rounding import all_reduce_snr_db, round_trip_snr_db
from taco_jax import codec as codecs
from taco_jax import hadamard
from taco_jax.sharding.mesh import ensure_devices, make_mesh


@dataclass(frozen=True)
class Options:
    """Compare the presets on Gaussian values."""

    size: Annotated[int, tyro.conf.arg(help="values per rank")] = 1 << 20
    ranks: Annotated[int, tyro.conf.arg(help="devices in the all-reduce")] = 4
    seed: int = 0


def main(argv: list[str] | None = None) -> int:
    """Print the table; returns the exit code."""
    options = tyro.cli(Options, args=argv)
    ensure_devices(options.ranks)
    mesh = make_mesh({"dp": 1, "pp": 1, "tp": options.ranks})
    values = np.random.default_rng(options.seed).standard_normal((options.ranks, options.size), np.float32)
    table = Table(box=box.SIMPLE_HEAD, title=f"{options.size} Gaussian values on each of {options.ranks} ranks")
    figures = ("bytes per value", "round trip (dB)", "predicted", f"all-reduce of {options.ranks} (dB)", "predicted")
    for column in ("preset", *figures):
        table.add_column(column, justify="left" if column == "preset" else "right")
    for name in taco_jax.PRESETS:
        if name != "none":
            table.add_row(name, *measure(name, jnp.asarray(values), mesh))
    console = Console(width=100)
    console.print(table)
    share = 100.0 * share_without_alpha(np.random.default_rng(options.seed))
    console.print(f"paper: {share:.4f} % of 2^20 codes are the same without alpha (log-normal block scales)")
    return 0


def measure(name: str, values: jax.Array, mesh: Mesh) -> tuple[str, ...]:
    """Return the figures of a preset for values[ranks, size], as text."""
    compression = taco_jax.Compression.named(name, min_bytes=0)
    codec = compression.forward
    assert codec is not None
    sent = taco_jax.wire_bytes(values.shape[1:], codec, 2, "ppermute") / values.shape[1]
    single = taco_jax.snr_db(values[0], jax.jit(taco_jax.round_trip, static_argnums=1)(values[0], codec))
    scales = taco_jax.init_scales({"sum": compression}).get("sum")

    def step(x, scales):
        return jnp.mean(taco_jax.psum(x, "tp", compression=compression, scales=scales, name="sum"))

    def summed(x, scales):
        return taco_jax.psum(x[0], "tp", compression=compression, scales=scales, name="sum")

    def on_mesh(f):
        return jax.shard_map(f, mesh=mesh, in_specs=(P("tp"), P()), out_specs=P())

    if compression.is_adaptive:
        observed = jax.jit(jax.grad(on_mesh(step), argnums=1))(values, scales)
        update = jax.jit(functools.partial(taco_jax.update_scales, axis_name=None))
        scales = update({"sum": scales}, {"sum": observed})[0]["sum"]
    total = jax.jit(on_mesh(summed))(values, scales)
    reduced = taco_jax.snr_db(jnp.sum(values, axis=0), total)
    predicted = round_trip_snr_db(codec), all_reduce_snr_db(codec, len(values))
    return f"{sent:.3f}", f"{single:.1f}", f"{predicted[0]:.1f}", f"{reduced:.1f}", f"{predicted[1]:.1f}"


def share_without_alpha(random: np.random.Generator) -> float:
    """Return the share of the codes of `paper` that stay as they are when alpha is left out of the formula.

    Each of 4,096 Gaussian blocks is multiplied by exp(5 g), g ~ N(0, 1), so that alpha differs from block to block and
    meets its limits; the codes without it are computed in float64.
    """
    codec = taco_jax.Compression.named("paper").forward
    assert codec is not None
    blocks = random.standard_normal((4096, codec.block)) * np.exp(5.0 * random.standard_normal((4096, 1)))
    blocks = blocks.astype(np.float32)
    message, _ = jax.jit(codecs.encode, static_argnums=1)(blocks, codec, codecs.NEUTRAL)
    rotated = blocks.astype(np.float64) @ hadamard.matrix(codec.block)
    codes = rotated * (codec.qmax / np.abs(rotated).max(axis=-1, keepdims=True))
    found = np.asarray(message)[:, : codec.block].view(ml_dtypes.float8_e4m3fn)
    return float(np.mean(found == codes.astype(np.float32).astype(ml_dtypes.float8_e4m3fn)))


if __name__ == "__main__":
    raise SystemExit(main())
