"""Show what each codec keeps: signal-to-noise ratios of round trips and all-reduces, beside the bytes of a value.

python -m experiments.fidelity [--json FILE] [--out DIR]

On stated distributions and on the messages of a small GPT while it trains; the table, and a plot in DIR. Codecs run
under `jit`, the sums of the all-reduce through `taco_jax.psum` on emulated devices; ratios are computed in float64.

Exit codes: 0 every figure is as expected (`experiments.fidelity_report`), 1 one is not, 2 a mistake.
"""

import dataclasses
import functools
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import PartitionSpec as P
from rich.console import Console

import taco_jax
from experiments import fidelity_data as data
from experiments.cli import parse_command_line
from experiments.codecs import share_without_alpha
from experiments.config import ConfigError, nearest
from experiments.fidelity_report import checks, tables, write_plot
from experiments.rounding import all_reduce_snr_db, round_trip_snr_db
from taco_jax.config import Codec
from taco_jax.scales import ALPHA, FORWARD, alpha_for
from taco_jax.sharding.mesh import ensure_devices, make_mesh

PROGRAM = "python -m experiments.fidelity"
CODECS = {
    "bf16": Codec("bf16", scale="none"),
    "e4m3_tensor": Codec("e4m3", scale="adaptive"),
    "taco": Codec("e4m3", hadamard="block", scale="adaptive"),
    "e4m3_block128": Codec("e4m3"),
    "taco_block": Codec("e4m3", hadamard="block"),
    "paper": Codec("e4m3", 256, "block", "paper"),
    "e5m2_block256_hadamard": Codec("e5m2", 256, "block"),
    "e3m4_block128": Codec("e3m4"),
    "int8_block128": Codec("int8"),
    "int8_block128_hadamard": Codec("int8", hadamard="block"),
    "int6_block128_hadamard": Codec("int6", hadamard="block"),
    "int4_block128_hadamard": Codec("int4", hadamard="block"),
    "int4_block32_hadamard": Codec("int4", 32, "block"),
}
NAMES = tuple(CODECS)
RANKS = (2, 4, 8)
MOST_ROWS = 1 << 14
_LOWEST_ROWS = 1.0  # percent


@dataclasses.dataclass(frozen=True)
class Options:
    """Show what each codec keeps of stated distributions and of a small GPT's messages."""

    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help="also write all figures to this file")] = None
    out: Annotated[Path, tyro.conf.arg(metavar="DIR", help="folder of the plot")] = Path("runs/fidelity")
    codecs: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...", help="those to measure")] = NAMES
    rows: Annotated[int, tyro.conf.arg(help="tokens of each distribution, of 1,024 values")] = 1024
    recipe: Annotated[str, tyro.conf.arg(help="model to capture messages from, small or tiny")] = "small"
    steps: Annotated[int, tyro.conf.arg(help="steps that it trains; 0: as it begins")] = 40
    seed: Annotated[int, tyro.conf.arg(help="of the values and of the training")] = 0


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and draw; returns the exit code."""
    try:
        return _run(parse_command_line(Options, PROGRAM, sys.argv[1:] if argv is None else argv))
    except ConfigError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2


def _run(options: Options) -> int:
    _check(options)
    found = measure(options)
    found["checks"] = checks(found)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
    write_plot(found, options.out / "fidelity.png")
    console = Console(width=160)
    for table in tables(found):
        console.print(table)
    share = found["ablation"]["equal_codes"]
    print(f"paper: {share:.4%} of {found['ablation']['codes']:,} codes are the same without alpha")
    print(f"plot: {options.out / 'fidelity.png'}")
    wrong = [check for check in found["checks"] if not check["passed"]]
    for check in wrong:
        print(f"{check['what']}: {check['found']}, expected {check['expected']}", file=sys.stderr)
    return 1 if wrong else 0


def _check(options: Options) -> None:
    for name in options.codecs:
        if name not in NAMES:
            raise ConfigError(f"--codecs: there is no {name!r}{nearest(name, NAMES)}; there are {', '.join(NAMES)}")
    if not options.codecs:
        raise ConfigError(f"--codecs needs one or more of {', '.join(NAMES)}")
    if not 64 <= options.rows <= MOST_ROWS:
        raise ConfigError(f"--rows must be 64 to {MOST_ROWS:,}, got {options.rows}")
    if options.recipe not in ("small", "tiny"):
        raise ConfigError(f"--recipe must be small or tiny, got {options.recipe!r}")
    if not 0 <= options.steps <= 1000:
        raise ConfigError(f"--steps must be 0 to 1,000, got {options.steps}")
    if options.seed < 0:
        raise ConfigError(f"--seed must be 0 or more, got {options.seed}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("the plot needs the package matplotlib: pip install taco_jax[plot]")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        if options.json is not None:
            options.json.touch()
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}") from None
    try:
        ensure_devices(max(RANKS))
    except ValueError as error:
        raise ConfigError(f"{error}; JAX_PLATFORMS=cpu takes emulated ones") from None


def measure(options: Options) -> dict[str, Any]:
    """Return all figures, as they are written."""
    codecs = {name: CODECS[name] for name in options.codecs}
    equal = share_without_alpha(np.random.default_rng(options.seed))
    return {
        "seed": options.seed,
        "rows": options.rows,
        "recipe": options.recipe,
        "steps": options.steps,
        "jax": jax.__version__,
        "roundtrip": list(_round_trips(codecs, options)),
        "allreduce": list(_all_reduces(codecs, options)),
        "ablation": {"equal_codes": equal, "codes": 1 << 20},
        "captured": list(_captured(codecs, options)),
    }


def _round_trips(codecs: Mapping[str, Codec], options: Options) -> Iterator[dict[str, Any]]:
    for sent in data.distributions(options.rows, options.seed):
        for name, codec in codecs.items():
            found = round_trip(sent.values, codec)
            row = {
                "codec": name,
                "preset": preset_of(codec),
                "distribution": sent.name,
                "bytes_per_element": bytes_per_element(sent.values.shape, codec),
                "snr_db": snr_db(sent.values, found),
                "predicted_db": round_trip_snr_db(codec) if sent.name == "gaussian" else None,
                "row_p1_db": lowest_rows_db(sent.values, found),
                "ordinary_snr_db": None,
            }
            if sent.outliers is not None:
                ordinary = (np.delete(x, sent.outliers, axis=1) for x in (sent.values, found))
                row["ordinary_snr_db"] = snr_db(*ordinary)
            yield row


def _all_reduces(codecs: Mapping[str, Codec], options: Options) -> Iterator[dict[str, Any]]:
    size = options.rows * data.CHANNELS // data.TRAINED_RANKS
    cases: list[tuple[str, int, Callable]] = [("gaussian", ranks, data.gaussian_parts) for ranks in RANKS]
    cases.append(("cancelling", max(RANKS), data.cancelling_parts))
    for distribution, ranks, make in cases:
        parts = make(ranks, size, options.seed)
        for name, codec in codecs.items():
            yield {
                "codec": name,
                "preset": preset_of(codec),
                "distribution": distribution,
                "ranks": ranks,
                "bytes_per_element": bytes_per_element((size,), codec),
                "snr_db": snr_db(_total(parts), all_reduce(parts, codec)),
                "predicted_db": all_reduce_snr_db(codec, ranks) if distribution == "gaussian" else None,
            }


def _captured(codecs: Mapping[str, Codec], options: Options) -> Iterator[dict[str, Any]]:
    for message in data.captured(data.training(options.recipe, options.seed), options.steps):
        parts, total = message.parts, _total(message.parts)
        alone = np.sqrt(np.mean(np.square(parts, dtype=np.float64)))
        for name, codec in codecs.items():
            assert parts[0].size % codec.block == 0, "a block would hold two ranks' values"
            single, reduced = round_trip(parts, codec), all_reduce(parts, codec)
            yield {
                "codec": name,
                "preset": preset_of(codec),
                "site": message.site,
                "direction": message.direction,
                "layer": message.layer,
                "step": message.step,
                "ranks": len(parts),
                "bytes_per_element": bytes_per_element(parts.shape[1:], codec),
                "sum_over_part": float(np.sqrt(np.mean(total**2)) / alone),
                "roundtrip_snr_db": snr_db(parts, single),
                "roundtrip_row_p1_db": lowest_rows_db(parts, single),
                "allreduce_snr_db": snr_db(total, reduced),
                "allreduce_row_p1_db": lowest_rows_db(total, reduced),
            }


def preset_of(codec: Codec) -> str | None:
    """Return the preset that sends with `codec`."""
    return next((name for name in taco_jax.PRESETS if taco_jax.Compression.named(name).forward == codec), None)


def bytes_per_element(shape: tuple[int, ...], codec: Codec) -> float:
    """Return the bytes a value of a tensor of this shape takes, scales included."""
    return taco_jax.wire_bytes(shape, codec, 2, "ppermute") / int(np.prod(shape))


def snr_db(x: np.ndarray, y: np.ndarray) -> float | None:
    """Return 10 log10(sum x^2 / sum (x - y)^2) in float64; None without an error, or without a signal."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    signal, noise = np.sum(x**2), np.sum((x - y) ** 2)
    return float(10 * np.log10(signal / noise)) if signal and noise else None


def lowest_rows_db(x: np.ndarray, y: np.ndarray) -> float | None:
    """Return the SNR that 1 % of the rows [..., channels] do not reach; rows of zeros do not count."""
    x, y = (np.asarray(a, np.float64).reshape(-1, a.shape[-1]) for a in (x, y))
    signal, noise = np.sum(x**2, axis=-1), np.sum((x - y) ** 2, axis=-1)
    counted = signal > 0
    with np.errstate(divide="ignore"):
        ratios = signal[counted] / noise[counted]
    lowest = np.percentile(ratios, _LOWEST_ROWS, method="lower") if counted.any() else np.inf
    return float(10 * np.log10(lowest)) if np.isfinite(lowest) else None


def round_trip(x: np.ndarray, codec: Codec) -> np.ndarray:
    """Return decode(encode(x)) of `taco_jax.round_trip`, an adaptive alpha being the one that scales settle on."""
    alpha = _alpha(x) if codec.scale == "adaptive" else None
    # Flat, so that tensors of as many values share a program.
    return np.asarray(_round_trip(x.reshape(-1), codec, alpha)).reshape(x.shape)


def all_reduce(parts: np.ndarray, codec: Codec) -> np.ndarray:
    """Return what `taco_jax.psum` makes of parts[ranks, ...] on as many devices, adaptive alphas as in `round_trip`."""
    compression = taco_jax.Compression(codec, codec, min_bytes=0)
    scales = None
    if compression.is_adaptive:
        hops = jnp.stack([_alpha(parts), _alpha(_total(parts))])
        scales = taco_jax.init_scales({"sum": compression})["sum"].at[FORWARD, :, ALPHA].set(hops)
    flat = parts.reshape(len(parts), -1)
    return np.asarray(_psum(compression, len(parts))(flat, scales)).reshape(parts.shape[1:])


_round_trip = jax.jit(taco_jax.round_trip, static_argnums=1)
_alpha_for = jax.jit(alpha_for)


def _alpha(x: np.ndarray) -> jax.Array:
    return _alpha_for(x.reshape(-1).astype(np.float32))


@functools.cache
def _psum(compression: taco_jax.Compression, ranks: int) -> Callable:
    def local(x: jax.Array, scales: Any) -> jax.Array:
        return taco_jax.psum(x[0], "tp", compression=compression, scales=scales, name="sum")

    mesh = make_mesh({"dp": 1, "pp": 1, "tp": ranks})
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P("tp"), P()), out_specs=P()))


def _total(parts: np.ndarray) -> np.ndarray:
    return np.sum(parts, axis=0, dtype=np.float64)


if __name__ == "__main__":
    raise SystemExit(main())
