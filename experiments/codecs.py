"""Print what each preset costs and keeps: bytes per value, round-trip and all-reduce signal-to-noise ratio.

python -m experiments.codecs [--size N] [--ranks N] [--seed N]
"""

from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from rich import box
from rich.console import Console
from rich.table import Table

import taco_jax
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
    for column in ("preset", "bytes per value", "round trip (dB)", f"all-reduce of {options.ranks} (dB)"):
        table.add_column(column, justify="left" if column == "preset" else "right")
    for name in taco_jax.PRESETS:
        if name != "none":
            table.add_row(name, *measure(name, jnp.asarray(values), mesh))
    Console(width=100).print(table)
    return 0


def measure(name: str, values: jax.Array, mesh: Mesh) -> tuple[str, str, str]:
    """Return the three figures of a preset for values[ranks, size], as text."""
    compression = taco_jax.Compression.named(name, min_bytes=0)
    codec = compression.forward
    assert codec is not None
    sent = taco_jax.wire_bytes(values.shape[1:], codec, 2, "ppermute") / values.shape[1]
    single = taco_jax.snr_db(values[0], taco_jax.round_trip(values[0], codec))
    scales = taco_jax.init_scales({"sum": compression})["sum"]

    def step(x, scales):
        return jnp.mean(taco_jax.psum(x, "tp", compression=compression, scales=scales, name="sum"))

    def summed(x, scales):
        return taco_jax.psum(x[0], "tp", compression=compression, scales=scales, name="sum")

    def on_mesh(f):
        return jax.shard_map(f, mesh=mesh, in_specs=(P("tp"), P()), out_specs=P())

    observed = jax.jit(jax.grad(on_mesh(step), argnums=1))(values, scales)
    updated, _ = taco_jax.update_scales({"sum": scales}, {"sum": observed}, axis_name=None)
    total = jax.jit(on_mesh(summed))(values, updated["sum"])
    return f"{sent:.3f}", f"{single:.1f}", f"{taco_jax.snr_db(jnp.sum(values, axis=0), total):.1f}"


if __name__ == "__main__":
    raise SystemExit(main())
