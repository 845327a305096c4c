"""Print which implementation of the codec serves which device, or why not, how that is proven, and what is chosen.

The answers are those of the registry that the collectives ask; no device is touched.

python -m experiments.backends [--dtype TYPE] [--json FILE]
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

import taco_jax
from taco_jax.pallas import registry


@dataclass(frozen=True)
class Device:
    """A kind of device, as JAX describes it.

    Attributes:
        name: what it is sold as.
        platform: "gpu", "tpu" or "cpu".
        capability: compute capability of a GPU.
    """

    name: str
    platform: str
    capability: str = ""


DEVICES = (
    Device("A100", "gpu", "8.0"),
    Device("L40S", "gpu", "8.9"),
    Device("H100, H200", "gpu", "9.0"),
    Device("B200", "gpu", "10.0"),
    Device("RTX 50", "gpu", "12.0"),
    Device("AMD MI300", "gpu", "gfx942"),
    Device("TPU", "tpu"),
    Device("CPU", "cpu"),
)
SUITE, INTERPRETED, COMPILED, RUN = "suite", "suite (interpreted)", "compiled", "run"
MEANING = {
    SUITE: "bytes and values by tests/test_contract.py on a CPU (paper: tests/test_codec_paper.py)",
    INTERPRETED: "the same with the GPU's kernels in Pallas' interpreter",
    COMPILED: "the kernels for such a GPU without one: registers, accesses, instructions (pytest -m gpu_aot)",
    RUN: "on a device of this kind",
}
PROOF = {"xla": SUITE, "triton": INTERPRETED, "triton_sm80": INTERPRETED, "mosaic_gpu": INTERPRETED}
COMPILED_FOR = {
    ("triton", "8.0"): ("int8", "int6", "int4"),
    ("triton_sm80", "8.0"): ("taco", "taco_block", "fp8"),
    ("triton", "9.0"): ("taco", "taco_block", "fp8", "int8", "int6", "int4"),
    ("mosaic_gpu", "9.0"): ("taco",),
    ("triton", "10.0"): ("taco", "taco_block", "fp8", "int8", "int6", "int4"),
}
"""Presets whose kernels for bf16 the tests compile, by implementation and capability."""
RUN_ON = {("xla", "cpu")}
"""Implementation and platform."""


@dataclass(frozen=True)
class Answer:
    """Whether an implementation serves a preset on a device.

    Attributes:
        implementation: name in the registry.
        device: name in `DEVICES`.
        platform, capability: of the device.
        jax: the installed version.
        preset: name of the compression.
        dtype: type of the values.
        reason: why it is not served, None if it is.
        is_default: whether this implementation is taken when none is named.
        proven: how what is served is shown to work.
    """

    implementation: str
    device: str
    platform: str
    capability: str
    jax: str
    preset: str
    dtype: str
    reason: str | None
    is_default: bool
    proven: tuple[str, ...]


@dataclass(frozen=True)
class Options:
    """Show what the implementations serve."""

    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"], tyro.conf.arg(help="type of the values that are sent")
    ] = "bfloat16"
    json: Annotated[Path | None, tyro.conf.arg(help="also write every answer to this file")] = None


def main(argv: list[str] | None = None) -> int:
    """Print the tables; returns the exit code."""
    options = tyro.cli(Options, args=argv)
    found = answers(options.dtype)
    if options.json is not None:
        try:
            options.json.write_text(json.dumps([asdict(answer) for answer in found], indent=1) + "\n")
        except OSError as error:
            print(f"cannot write {options.json}: {error.strerror}", file=sys.stderr)
            return 2
    console = Console(width=120)
    console.print(_served(found), _chosen(found))
    for word, meaning in MEANING.items():
        console.print(f"{word}: {meaning}", highlight=False)
    return 0


def answers(dtype: str) -> list[Answer]:
    """Return the answer for every implementation, device and preset, for values of `dtype`."""
    found = []
    for device in DEVICES:
        at = device.platform, device.capability
        for preset in taco_jax.PRESETS:
            codec = taco_jax.Compression.named(preset).forward
            if codec is None:
                continue
            chosen, _ = registry.choose(codec, dtype, *at)
            for name in registry.IMPLEMENTATIONS:
                reason = registry.unsupported_reason(name, codec, dtype, *at)
                proven = () if reason else _proven(name, device, preset, dtype)
                found.append(
                    Answer(name, device.name, *at, jax.__version__, preset, dtype, reason, name == chosen, proven)
                )
    return found


def _proven(implementation: str, device: Device, preset: str, dtype: str) -> tuple[str, ...]:
    presets = COMPILED_FOR.get((implementation, device.capability), ())
    compiled = (COMPILED,) if preset in presets and dtype == "bfloat16" else ()
    run = (RUN,) if (implementation, device.platform) in RUN_ON else ()
    return PROOF[implementation], *compiled, *run


def _served(found: list[Answer]) -> Table:
    """Make a row of the devices for which an implementation says the same about the same presets."""
    table = Table(box=box.SIMPLE_HEAD, title=f"JAX {jax.__version__}, {found[0].dtype}: who serves what")
    for column in ("implementation", "devices", "presets", "served", "proven"):
        table.add_column(column)
    devices: dict[tuple, list[str]] = {}
    for name in registry.IMPLEMENTATIONS:
        for device in DEVICES:
            presets: dict[tuple, list[str]] = {}
            for a in found:
                if (a.implementation, a.device) == (name, device.name):
                    presets.setdefault((a.reason or "yes", ", ".join(a.proven)), []).append(a.preset)
            for (said, proven), names in presets.items():
                devices.setdefault((name, ", ".join(names), said, proven), []).append(_label(device))
    for (name, presets_said, said, proven), labels in devices.items():
        everywhere = len(labels) == len(DEVICES)
        table.add_row(name, "all" if everywhere else "; ".join(labels), presets_said, said, proven)
    return table


def _label(device: Device) -> str:
    return f"{device.name} ({device.capability})" if device.capability else device.name


def _chosen(found: list[Answer]) -> Table:
    presets = list(dict.fromkeys(answer.preset for answer in found))
    table = Table(box=box.SIMPLE_HEAD, title="chosen when no implementation is named")
    for column in ("device", *presets):
        table.add_column(column)
    for device in DEVICES:
        taken = {a.preset: a.implementation for a in found if a.device == device.name and a.is_default}
        table.add_row(_label(device), *(taken[preset] for preset in presets))
    return table


if __name__ == "__main__":
    raise SystemExit(main())
