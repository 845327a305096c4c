"""The command line of the trainer: typed flags, `--set section.field=value`, and errors of one line."""

import contextlib
import dataclasses
import io
import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from experiments.config import ConfigError, TrainConfig, flatten, nearest
from experiments.processes import HEARTBEAT_SECONDS, JOIN_SECONDS
from experiments.recipes import RECIPES
from experiments.saved import with_model_of
from taco_jax.models.presets import PRESETS

PROGRAM = "python -m experiments.train"
T = TypeVar("T")


def _flag(metavar: str, default: str = "the recipe's") -> Any:
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})" if default else "")


def _number(parse: Callable[[str], float], wanted: str, metavar: str) -> tyro.constructors.PrimitiveConstructorSpec:
    """Return how tyro reads a number or None: its own text for a bad one spans lines and names Python types."""

    def read(words: list[str]) -> Any:
        try:
            return parse(words[0])
        except ValueError:
            raise ValueError(f"needs {wanted}, got {words[0]!r}") from None

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=read,
        is_instance=lambda value: value is None or isinstance(value, int | float),
        str_from_instance=lambda value: [str(value)],
    )


def _minutes(word: str) -> float:
    minutes = float(word)
    if not 0 < minutes < math.inf:
        raise ValueError
    return minutes


_WHOLE_NUMBER = _number(int, "a whole number", "INT")
_NUMBER = _number(float, "a number", "FLOAT")
_MINUTES = _number(_minutes, "a number of minutes above 0", "MINUTES")


@dataclass(frozen=True)
class Arguments:
    """Train a GPT or Qwen in dp x pp x tp with compressed tensor-parallel communication; rerun a command to resume."""

    mesh: Annotated[str, _flag("dp4,pp4,tp8")] = ""
    """Devices per axis: data, pipeline, tensor parallel; CPU devices are emulated where there are too few."""
    recipe: Annotated[str, _flag("main|small|tiny|large", "main; large with a published model")] = ""
    """Starting point that the other flags change."""
    model: Annotated[str, _flag("NAME", "the recipe's, or that of --init-from")] = ""
    """Architecture by name: gpt2-124m, gpt3-6.7b, qwen-7b, qwen2.5-7b, qwen3-0.6b, ... or gpt2-tiny, qwen3-tiny."""
    data: Annotated[str, _flag("FILE", "the King James Bible that comes with the package")] = ""
    """What to learn from: a text, .jsonl or prepared .bin file, or several with weights, a.bin:0.7,b.txt:0.3."""
    steps: Annotated[int | None, _WHOLE_NUMBER, _flag("INT")] = None
    """Optimizer steps; more than a finished run has continue it."""
    compression: Annotated[str, _flag("taco|taco_block|paper|fp8|int8|bf16|none")] = ""
    """What tensor-parallel messages are sent as."""
    out: Annotated[str, _flag("DIR", "runs/RECIPE-COMPRESSION-seedSEED")] = ""
    """Run folder; the same command, also with another mesh or more steps, continues the run that it holds."""
    seed: Annotated[int | None, _WHOLE_NUMBER, _flag("INT")] = None
    """Seed of the initial parameters and of the order of the data."""
    init_from: Annotated[str, _flag("DIR", "random parameters")] = ""
    """Folder of a run or of experiments.convert, or one checkpoint in it, whose model a new run starts with."""
    from_step: Annotated[int | None, _WHOLE_NUMBER, _flag("INT", "the newest")] = None
    """Go on from this checkpoint of the run; later ones are moved aside."""
    exit_after: Annotated[float | None, _MINUTES, _flag("MINUTES", "never")] = None
    """Save and exit with code 75 when the program has run this long; the same command goes on."""
    profile: Annotated[str, _flag("FIRST:STOP", "none")] = ""
    """Trace these steps into RUN/profile; 10:13 means 10, 11, 12."""
    peak_flops: Annotated[float | None, _NUMBER, _flag("FLOP/S", "what is known of the device")] = None
    """Dense FLOP/s of one device, which the MFU is a fraction of; 989e12 for an H100."""
    coordinator: Annotated[str, _flag("HOST:PORT", "a launcher's, or a single process")] = ""
    """Address of process 0, if several processes train together; all run the same command but for their number."""
    num_processes: Annotated[int | None, _WHOLE_NUMBER, _flag("INT", "a launcher's, or 1")] = None
    """How many processes there are; 1 lets this one train alone whatever started it."""
    process_id: Annotated[int | None, _WHOLE_NUMBER, _flag("INT", "a launcher's, or 0")] = None
    """Number of this one, 0 first."""
    join_timeout: Annotated[int, _WHOLE_NUMBER, _flag("SECONDS", str(JOIN_SECONDS))] = JOIN_SECONDS
    """How long to wait for the other processes at the start."""
    heartbeat_timeout: Annotated[int, _WHOLE_NUMBER, _flag("SECONDS", str(HEARTBEAT_SECONDS))] = HEARTBEAT_SECONDS
    """Silence after which a process counts as dead, and the others end."""
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, _flag("SECTION.FIELD=VALUE", "")] = ()
    """Change any other field that --print-config shows."""
    print_config: bool = False
    """Print the configuration as JSON and stop."""
    dry_run: bool = False
    """Compile the step from shapes alone, print what a device would hold, send and compute, and stop."""
    target: Annotated[str, _flag("a100|h100|h200|b200", "emulated CPU devices")] = ""
    """GPU that --dry-run compiles for; it need not be there, JAX's CUDA compiler must."""


# Fields of the configuration that have a flag of their own.
_FLAGS = {
    "mesh": "mesh",
    "recipe": "recipe",
    "data": "data.path",
    "steps": "steps",
    "compression": "compression",
    "seed": "seed",
    "init_from": "init_from",
    "profile": "log.profile",
    "peak_flops": "log.peak_flops",
}


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Read the trainer's command line.

    Raises:
        ConfigError: for what it cannot read, on one line.
        SystemExit: after `--help`.
    """
    arguments = parse_command_line(Arguments, PROGRAM, argv)
    if arguments.target and not arguments.dry_run:
        raise ConfigError("--target needs --dry-run: a run takes the devices that are there")
    return arguments


def parse_command_line(kind: type[T], program: str, argv: Sequence[str]) -> T:
    """Read a command line as the dataclass `kind`.

    Raises:
        ConfigError: for what it cannot read, on one line.
        SystemExit: after `--help`.
    """
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(kind, prog=program, args=list(argv), config=(tyro.conf.FlagCreatePairsOff,))
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ConfigError(_one_line(errors.getvalue(), kind)) from None


def build_config(arguments: Arguments) -> TrainConfig:
    """Return the recipe's configuration with the flags and `--set` applied; `validate` has yet to check it.

    Raises:
        ConfigError: for a recipe, a model or a field that does not exist, a value of another type or a model that
            cannot be.
    """
    model = _named("model", arguments.model, PRESETS) if arguments.model else None
    published = model is not None and model.vocab_size > 0
    config = _named("recipe", arguments.recipe or ("large" if published else "main"), RECIPES)
    if model is not None:
        config = dataclasses.replace(config, model=model)
        if published and not arguments.recipe:
            data = dataclasses.replace(config.data, sequence_length=min(2048, model.max_positions))
            config = dataclasses.replace(config, data=data)
    elif arguments.init_from:
        config = with_model_of(config, Path(arguments.init_from))
    flags = {name: getattr(arguments, flag) for flag, name in _FLAGS.items()}
    config = _replace(config, {name: value for name, value in flags.items() if value not in (None, "")})
    return apply_settings(config, arguments.set)


def apply_settings(config: TrainConfig, settings: Sequence[str]) -> TrainConfig:
    """Return `config` with each `section.field=value` applied, the value read as the field's type.

    Raises:
        ConfigError: for a field that does not exist (with the nearest name), is given twice or has a flag of its own,
            or values that do not go together.
    """
    fields = flatten(config)
    flags = {name: flag for flag, name in _FLAGS.items()}
    changes: dict[str, object] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting}: write section.field=value, such as optimizer.learning_rate=0.001")
        if name in flags:
            raise ConfigError(f"--set {setting}: use --{flags[name].replace('_', '-')}={text}")
        if name not in fields:
            raise ConfigError(f"--set {setting}: there is no field {name!r}{nearest(name, fields)}")
        if name in changes:
            raise ConfigError(f"--set {name} is given twice")
        changes[name] = _parse_value(name, text, type(fields[name]))
    return _replace(config, changes)


def config_json(config: TrainConfig) -> str:
    """Return the text of config.json."""
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def _named(kind: str, name: str, functions: Mapping[str, Callable[[], T]]) -> T:
    if name not in functions:
        raise ConfigError(f"no {kind} is called {name!r}; there are {', '.join(functions)}{nearest(name, functions)}")
    return functions[name]()


def _replace(config: TrainConfig, changes: Mapping[str, object]) -> TrainConfig:
    """Return `config` with other values under their dotted names, all at once: a model checks how they go together."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        section, _, field = name.rpartition(".")
        sections.setdefault(section, {})[field] = value
    whole = sections.pop("", {})
    try:
        parts = {name: dataclasses.replace(getattr(config, name), **fields) for name, fields in sections.items()}
    except ValueError as error:
        raise ConfigError(f"model: {error}") from None
    return dataclasses.replace(config, **whole, **parts)


def _parse_value(name: str, text: str, kind: type) -> object:
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"--set {name} needs true or false, got {text!r}")
        return text.lower() == "true"
    try:
        return kind(text)
    except ValueError:
        wanted = {int: "a whole number", float: "a number"}[kind]
        raise ConfigError(f"--set {name} needs {wanted}, got {text!r}") from None


def _one_line(box: str, kind: type) -> str:
    """Return the first paragraph of a message that tyro framed, as one line."""
    lines = [line.strip("│ ") for line in box.splitlines() if not line.startswith(("╭", "╰"))]
    if lines[1:] and not lines[1].strip("-"):  # where stdout is not UTF-8 the title stands in a line of its own
        lines = lines[2:]
    paragraph = itertools.takewhile(lambda line: line.strip("─-"), lines)
    text = " ".join(paragraph) or "cannot read the command line"
    if match := re.match(r"Unrecognized options: (--[\w-]+)", text):
        names = [f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(kind)]
        return f"there is no option {match[1]}{nearest(match[1], names)}"
    return text
