"""Let a model continue a text: `python -m experiments.generate FOLDER --prompt="In the beginning" --mesh=tp8`.

FOLDER is a run, one of its checkpoints, or what `experiments.convert` has made of a Hugging Face model. The text goes
to standard output as it comes, everything else to standard error. Exit codes: 0 done, 2 a mistake in the command, 4 the
compiled program does not send what --compression asks for, 130 interrupted.
"""

import itertools
import json
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import tyro

from experiments.cli import parse_command_line
from experiments.communication import CommunicationMismatch, communication_json
from experiments.config import ConfigError
from experiments.generation import Generator, Sampling, allowed_ids
from experiments.inference import Model, ModelArguments, require_compression, sent_per_call, tokenizer_for
from experiments.metrics import log_to_stderr
from experiments.tokenizer import Tokenizer

PROGRAM = "python -m experiments.generate"


@dataclass(frozen=True)
class Arguments(ModelArguments):
    """Let a model continue a text, token by token, on any mesh."""

    prompt: Annotated[str, tyro.conf.arg(metavar="TEXT")] = ""
    """What to continue; - reads standard input."""
    prompt_ids: Annotated[str, tyro.conf.arg(metavar="ID,ID,...")] = ""
    """Token ids to continue instead; ids are printed too."""
    num_tokens: Annotated[int, tyro.conf.arg(metavar="INT")] = 100
    """Most tokens to add; an end-of-text token ends the text before."""
    temperature: Annotated[float, tyro.conf.arg(metavar="FLOAT")] = 0.8
    """Below 1 the likely tokens become likelier; 0 takes the likeliest."""
    top_p: Annotated[float, tyro.conf.arg(metavar="FLOAT")] = 1.0
    """Draw only from the likeliest tokens that together have this probability."""
    seed: Annotated[int, tyro.conf.arg(metavar="INT")] = 0
    """Of the draws; the same text on every mesh, as far as rounding allows."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the program's own) and return the exit code."""
    try:
        arguments = parse_command_line(Arguments, PROGRAM, sys.argv[1:] if argv is None else argv)
        log_to_stderr()
        _generate(arguments)
    except ConfigError as error:
        return _fail(error, 2)
    except CommunicationMismatch as error:
        return _fail(error, 4)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def _generate(arguments: Arguments) -> None:
    sampling = _checked(arguments)
    model = arguments.load()
    tokenizer = None if arguments.prompt_ids else tokenizer_for(model, arguments.tokenizer)
    prompt = _prompt(arguments, tokenizer, model.program.model_config.vocab_size)
    config = model.program.model_config
    length = min(config.max_positions, max(2, len(prompt) + arguments.num_tokens))
    allowed = allowed_ids(tokenizer) if tokenizer else np.ones(config.vocab_size, bool)
    generator = Generator(model.program, allowed, length=length, sampling=sampling)
    _say(f"{model.folder}, step {model.step}: {config.family} of {config.num_layers} layers on {arguments.mesh}")
    _prepare(generator, model, len(prompt))
    if len(prompt) + arguments.num_tokens > config.max_positions:
        _say(f"longer than the model's {config.max_positions} positions; when they are full it keeps the last half")
    ends = _end_ids(model, tokenizer)
    drawn = itertools.islice(generator.generate(model.state, prompt), arguments.num_tokens)
    tokens = itertools.takewhile(lambda token: token not in ends, drawn)
    for text in _texts(prompt, tokens, tokenizer):
        print(text, end="", flush=True)
    print()
    _say(_speed(generator))


def _checked(arguments: Arguments) -> Sampling:
    arguments.check(num_tokens=1)
    if bool(arguments.prompt) == bool(arguments.prompt_ids):
        raise ConfigError('give the beginning of the text as --prompt="..." or as --prompt-ids=ID,ID,...')
    try:
        return Sampling(arguments.temperature, arguments.top_p, arguments.seed)
    except ValueError as error:
        raise ConfigError(f"--{str(error).replace('_', '-')}") from None


def _prompt(arguments: Arguments, tokenizer: Tokenizer | None, vocab_size: int) -> list[int]:
    if tokenizer:
        text = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
        ids = tokenizer.encode([text.encode()])[0].tolist()
    else:
        try:
            ids = [int(word) for word in arguments.prompt_ids.split(",")]
        except ValueError:
            raise ConfigError(f"--prompt-ids must be numbers with commas, got {arguments.prompt_ids!r}") from None
    if not ids:
        raise ConfigError("the prompt is empty")
    if wrong := [i for i in ids if not 0 <= i < vocab_size]:
        raise ConfigError(f"the model knows the ids 0 to {vocab_size - 1}, the prompt has {wrong[0]}")
    return ids


def _prepare(generator: Generator, model: Model, prompt_length: int) -> None:
    """Compile both programs and say what they send; refuse if compression that was asked for is nowhere."""
    started = time.perf_counter()
    sizes = {"prefill": generator.prefill_size(prompt_length), "decode": 1}
    rows = {}
    for name, size in sizes.items():
        rows[name] = sent_per_call(model.program, generator.traced(size), generator.compiled(size))
    _say(f"compiled in {time.perf_counter() - started:.1f} s")
    if model.program.mesh.shape["tp"] == 1:
        if generator.program.config.compression != "none":
            _say("nothing is compressed: tp is 1")
        return
    for name, found in rows.items():
        total = communication_json(found)["totals"]["axes"]["tp"]
        exact = "" if any(row.compressed for row in found) else ", all exact"
        _say(
            f"{name} of {sizes[name]} positions sends {total['bytes_per_step']:,.0f} bytes over tp, "
            f"{total['bf16_bytes_per_step']:,.0f} in bf16{exact}"
        )
    require_compression(model.program, itertools.chain(*rows.values()))


def _texts(prompt: Sequence[int], tokens: Iterator[int], tokenizer: Tokenizer | None) -> Iterator[str]:
    """Yield the prompt and what is added to it as text, each part as soon as its characters are whole."""
    if tokenizer is None:
        yield ",".join(map(str, prompt))
        for token in tokens:
            yield f",{token}"
        return
    ids, shown = list(prompt), tokenizer.decode(prompt)
    yield shown
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids)
        # The first bytes of a character decode to a replacement.
        if text.startswith(shown) and not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(shown) :]
            shown = text
    yield tokenizer.decode(ids)[len(shown) :]


def _end_ids(model: Model, tokenizer: Tokenizer | None) -> set[int]:
    """Return the ids that end a text: those that came with the model, or the tokenizer's end of document."""
    try:
        ends = json.loads((model.folder / "generation_config.json").read_text())["eos_token_id"]
    except (OSError, ValueError, KeyError):
        ends = list(tokenizer.separator) if tokenizer and tokenizer.item == "token" else []
    return {ends} if isinstance(ends, int) else set(ends or ())


def _speed(generator: Generator) -> str:
    prefills = [seconds for size, seconds in generator.seconds if size > 1]
    decodes = [seconds for size, seconds in generator.seconds if size == 1]
    text = f"prefill {1e3 * statistics.median(prefills):.1f} ms"
    return (
        f"{text}, {1e3 * statistics.median(decodes):.1f} ms per token (median of {len(decodes)})" if decodes else text
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _fail(error: Exception, code: int) -> int:
    print(f"{PROGRAM}: error: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
