"""What a run would need, before it is paid for: `experiments.train --dry-run --model=qwen-7b --mesh=dp8,pp4,tp8`.

The training step is traced from shapes and compiled for the mesh, on emulated CPU devices or, with `--target=h200`, for
GPUs that need not be there. No array of the model is made and no text is read.
"""

import dataclasses
import json
import sys
import time
import warnings
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
from rich import box
from rich.console import Console
from rich.table import Table

from experiments import communication, memory, step, targets
from experiments.cli import Arguments
from experiments.communication import CommunicationRow
from experiments.compiler_options import step_options
from experiments.config import ConfigError, TrainConfig, nearest
from experiments.data import Corpus, tokenizer_of_data, with_model_sizes
from experiments.flops import training_flops_per_token
from experiments.metrics import write_atomically
from experiments.processes import mesh_of
from experiments.saved import make_folder
from taco_jax.models.families import parameter_count
from taco_jax.pallas import registry
from taco_jax.sharding.mesh import parse_mesh

FILE = "dry_run.json"
_CPU = "XLA:CPU's buffer assignment (widens some bf16 to f32, so too high)"
# Nothing runs: without LLVM's optimisations the compilation takes half the time and assigns the same buffers.
_CPU_OPTIONS: dict[str, bool | int] = {"xla_backend_optimization_level": 0}
# Arguments that mean something to a run only.
_OF_A_RUN = ("print_config", "coordinator", "num_processes", "process_id", "from_step", "exit_after", "profile")
_CAPACITY_OF = dict(zip(targets.GPUS, memory.CAPACITIES, strict=True))


def dry_run(arguments: Arguments, config: TrainConfig) -> int:
    """Compile the step of a validated configuration, print the plan, write it if --out is given; return 0.

    Raises:
        ConfigError: for a mistake of the user's, before anything is compiled.
        experiments.communication.CommunicationMismatch: if the step would not send what the configuration says.
    """
    _check(arguments, config)
    # Accelerators of this machine stay out of it; the CUDA compiler then looks for no driver.
    jax.config.update("jax_platforms", "cpu")
    config = with_model_sizes(config, Corpus((), tokenizer_of_data(config.data)))
    program = _program(config, arguments.target)
    folder = Path(arguments.out) if arguments.out else None
    if folder:
        make_folder(folder)
    where = f"{program.mesh.size} x {arguments.target.upper() or 'emulated CPU devices'}"
    print(f"compiling the training step for {where}", file=sys.stderr, flush=True)
    started = time.perf_counter()
    compiled = _compiled(program, arguments.target)
    seconds = time.perf_counter() - started
    text = compiled.as_text()
    assert text is not None, "this backend prints no HLO, so nobody knows what travels"
    rows = _sent(program, text)
    source = f"XLA:GPU for {arguments.target.upper()}" if arguments.target else _CPU
    items = memory.memory_items(program, compiled, source)
    arrays = memory.largest_arrays(text)
    name = arguments.model or arguments.init_from or f"the model of recipe {config.recipe}"
    plan = {
        **_work(program, name),
        "target": arguments.target or "cpu",
        "compile_seconds": round(seconds, 1),
        "memory": {
            "items": [dataclasses.asdict(item) for item in items],
            "total_bytes": memory.total_bytes(items),
            "largest_arrays": [dataclasses.asdict(array) for array in arrays],
            "capacities": _capacities(arguments.target),
            "verdict": memory.memory_verdict(program, items, arrays),
        },
        "communication": {**communication.communication_json(rows), "verdict": communication_verdict(rows)},
    }
    print_plan(plan, rows)
    if folder:
        write_atomically(folder / FILE, json.dumps(plan, indent=2) + "\n")
    return 0


def communication_verdict(rows: list[CommunicationRow]) -> str:
    """Return which axis and site send most bytes, and how many compression saves."""
    totals = communication.communication_json(rows)["totals"]
    everything = totals["all"]["bytes_per_step"]
    if not everything:
        return "a device sends nothing"
    axis = max(totals["axes"], key=lambda name: totals["axes"][name]["bytes_per_step"])
    sites: dict[str, float] = {}
    for row in rows:
        if row.axis == axis:
            sites[row.site] = sites.get(row.site, 0) + row.bytes_per_step
    site = max(sites, key=lambda name: sites[name])
    most = totals["axes"][axis]["bytes_per_step"]
    text = f"axis {axis} carries {most / everything:.0%} of what a device sends, mostly {site} ({_gib(sites[site])})"
    if ratio := totals["compressed"]["ratio"]:
        sent, bf16 = (totals["compressed"][key] for key in ("bytes_per_step", "bf16_bytes_per_step"))
        text += f"; compressed sites send {_gib(sent)} for {_gib(bf16)} in bf16, {ratio:.2f}x fewer"
    elif axis == "tp":
        text += "; --compression=taco would send half of it"
    if site == "gradients":
        text += "; gradients are exact and grow with the parameters of a device, not with the tokens: more pp or tp"
    return text


def print_plan(plan: Mapping[str, Any], rows: list[CommunicationRow]) -> None:
    """Print what `dry_run.json` holds, for a reader."""
    model, held, sent = plan["model"], plan["memory"], plan["communication"]
    print(
        f"{model['name']}: {model['parameters']:,} parameters, {model['num_layers']} layers of {model['hidden_size']}"
    )
    print(f"mesh {plan['mesh']} of {plan['devices']} devices, compression {plan['compression']}")
    print(
        f"a step: {plan['batch_size']} sequences of {plan['sequence_length']} = {plan['tokens_per_step']:,} tokens, "
        f"{plan['model_flops_per_step']:.3g} model FLOPs, {plan['model_flops_per_device']:.3g} per device"
    )
    print(
        f"pipeline: {plan['num_microbatches']} microbatches of {plan['sequences_per_microbatch']} sequences in each dp "
        f"rank, {plan['bubble_share']:.1%} bubbles"
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("each device holds")
    table.add_column("GiB", justify="right")
    table.add_column("whose figure")
    for item in held["items"]:
        indent = "  of which " * bool(item["part_of"])
        table.add_row(indent + item["name"], f"{item['bytes'] / 2**30:.3f}", item["source"])
    table.add_row("total", f"{held['total_bytes'] / 2**30:.3f}", "", style="bold")
    console = Console(width=110)
    console.print(table)
    print(f"memory: {memory.fitting(held['total_bytes'], held['capacities'])}")
    print(f"memory: {held['verdict']}")
    print("largest arrays, not all alive at once:")
    for array in held["largest_arrays"]:
        print(f"  {_gib(array['bytes']):>10}  {array['type']}  {array['scope']}")
    if rows:
        print(f"\ncommunication per step and device:\n{communication.communication_text(rows)}")
    if plan["target"] == "cpu" and any(not row.compressed for row in rows):
        print("(XLA:CPU may widen exact bf16 messages to f32; gradients and scales are f32 on GPUs too)")
    print(f"communication: {sent['verdict']}")


def _check(arguments: Arguments, config: TrainConfig) -> None:
    for name in _OF_A_RUN:
        if getattr(arguments, name) not in (None, "", False):
            raise ConfigError(f"--{name.replace('_', '-')} has no meaning with --dry-run")
    if -1 in parse_mesh(config.mesh).values():
        raise ConfigError(f"--dry-run needs the size of every axis, got --mesh={config.mesh}")
    target = arguments.target
    if target and target not in targets.GPUS:
        known = ", ".join(targets.GPUS)
        raise ConfigError(f"--target must be one of {known}, got {target!r}{nearest(target, targets.GPUS)}")
    if target and (reason := targets.missing_compiler()):
        raise ConfigError(f"--target={target}: {reason}")


def _program(config: TrainConfig, target: str) -> step.Program:
    """Return the programs on a mesh of the target's GPUs, or of emulated devices."""
    if not target:
        return step.build(*mesh_of(config))
    codec, implementation = step.compression_of(config).forward, config.communication.implementation
    if codec and implementation == "auto":
        # The registry asks the devices of this process, which are not those of the mesh.
        implementation, _ = registry.choose(codec, config.dtype, "gpu", targets.CAPABILITIES[target])
    sending = dataclasses.replace(config.communication, implementation=implementation)
    config = dataclasses.replace(config, communication=sending)
    return step.build(config, targets.mesh(target, parse_mesh(config.mesh)))


def _compiled(program: step.Program, target: str) -> jax.stages.Compiled:
    options = step_options(program.mesh) if target else _CPU_OPTIONS
    try:
        with warnings.catch_warnings():
            message = "The Pallas Triton backend is deprecated"
            warnings.filterwarnings("ignore", message=message, category=DeprecationWarning)
            return program.compile(options)
    except NotImplementedError as error:
        raise ConfigError(str(error)) from None
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).split("\n")[0]
        raise ConfigError(f"XLA cannot compile the step for {target or 'CPU devices'}: {reason}") from None


def _sent(program: step.Program, text: str) -> list[CommunicationRow]:
    sizes = dict(program.mesh.shape)
    collectives = communication.read_collectives(text, sizes)
    planned = communication.planned_collectives(program.jaxpr, sizes)
    communication.check(collectives, planned, program.compressed_directions, program.compression.min_bytes)
    return communication.communication_rows(collectives, planned)


def _work(program: step.Program, name: str) -> dict[str, Any]:
    """Return the sizes of the model, of a step and of its pipeline."""
    config, model, sizes = program.config, program.model_config, program.mesh.shape
    tokens = config.data.batch_size * config.data.sequence_length
    flops = tokens * training_flops_per_token(model, config.data.sequence_length)
    microbatches = config.parallel.num_microbatches
    return {
        "model": {"name": name, "parameters": parameter_count(model), **dataclasses.asdict(model)},
        "mesh": config.mesh,
        "devices": program.mesh.size,
        "compression": config.compression,
        "implementation": config.communication.implementation,
        "sequence_length": config.data.sequence_length,
        "batch_size": config.data.batch_size,
        "num_microbatches": microbatches,
        "sequences_per_microbatch": config.data.batch_size // sizes["dp"] // microbatches,
        "tokens_per_step": tokens,
        "model_flops_per_step": flops,
        "model_flops_per_device": flops / program.mesh.size,
        "bubble_share": float(Fraction(sizes["pp"] - 1, microbatches + sizes["pp"] - 1)),
    }


def _capacities(target: str) -> dict[str, int]:
    """Return the memory of the target, or of every known device."""
    names = [_CAPACITY_OF[target]] if target else list(memory.CAPACITIES)
    return {name: memory.CAPACITIES[name] for name in names}


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**24 else f"{size / 2**10:.2f} KiB"
