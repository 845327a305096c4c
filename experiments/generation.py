"""Continue a sequence of token ids on any mesh, with a cache of keys and values.

Shapes: S new positions, T positions in the cache, V vocabulary, L layers, K key heads, D head. One sequence at a time;
the devices of dp all do the same.
"""

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.step import Program
from experiments.tokenizer import Tokenizer
from taco_jax.compat import vary
from taco_jax.models.config import stored_sizes
from taco_jax.models.decoder import LAYER_SITES
from taco_jax.sharding import pipeline

CACHE = P("pp", None, None, "tp", None)
"""Keys and values are global [L, 1, T, K, D]; K counts a key head once for every device that holds it."""
SMALLEST_PREFILL = 16


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    Attributes:
        temperature: p(v) = softmax(logits_v / temperature); 0 takes the likeliest.
        top_p: only the likeliest tokens that together have this probability are drawn.
        seed: of the draws; the same on every mesh.
    """

    temperature: float = 0.8
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 or more and finite, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")


def sample(logits: jax.Array, allowed: jax.Array, count: jax.Array, sampling: Sampling) -> jax.Array:
    """Return int32[], a token drawn from logits f32[V].

    Args:
        logits: of all ids, padding included.
        allowed: bool[V], the ids that may be drawn.
        count: how many were drawn before.
        sampling: how.
    """
    logits = jnp.where(allowed, logits, -jnp.inf)
    if sampling.temperature == 0:
        return jnp.argmax(logits).astype(jnp.int32)
    logits = logits / sampling.temperature
    if sampling.top_p < 1:
        order = jnp.argsort(-logits)
        likeliest = jax.nn.softmax(logits[order])
        kept = jnp.cumsum(likeliest) - likeliest < sampling.top_p
        logits = jnp.where(jnp.zeros_like(allowed).at[order].set(kept), logits, -jnp.inf)
    key = jax.random.fold_in(jax.random.key(sampling.seed), count)
    return jax.random.categorical(key, logits).astype(jnp.int32)


def allowed_ids(tokenizer: Tokenizer) -> np.ndarray:
    """Return bool[vocab_size], the ids that a tokenizer has a token for; the model may know more, which are padding."""
    allowed = np.ones(tokenizer.vocab_size, bool)
    allowed[list(tokenizer.unused)] = False
    return allowed


class Generator:
    """Continues token ids; it holds compiled programs, one for every size of prompt.

    Args:
        program: model, mesh and compression.
        allowed: bool[<= V], the ids that may be drawn; what is missing may not.
        length: positions T in the cache, at most the model's max_positions. When they are full the text goes on from
            the last half of them.
        sampling: how tokens are drawn.
    """

    def __init__(self, program: Program, allowed: np.ndarray, *, length: int, sampling: Sampling):
        assert 2 <= length <= program.model_config.max_positions, (length, program.model_config.max_positions)
        self.program, self.length, self.sampling = program, length, sampling
        self._allowed = np.zeros(stored_sizes(program.model_config, program.mesh.shape["tp"]).vocab, bool)
        self._allowed[: len(allowed)] = allowed
        self._traced: dict[int, Any] = {}
        self._compiled: dict[int, Any] = {}
        self.seconds: list[tuple[int, float]] = []
        """Positions and time of every call since the generator was made, compilation not included."""

    def generate(self, state: dict, prompt: Sequence[int]) -> Iterator[int]:
        """Yield tokens that continue `prompt`, without end.

        Args:
            state: {"params", "scales"} on the program's mesh.
            prompt: one id or more.
        """
        text, count = list(prompt), 0
        recent = text[-self.length :]
        cache, position = None, 0
        while True:
            if cache is None:
                cache = self.new_cache(state["params"])
                tokens, position = np.zeros((1, self.prefill_size(len(recent))), np.int32), len(recent)
                tokens[0, :position] = recent
                token, cache = self.advance(state, tokens, 0, position, count, cache)
            else:
                tokens, position = np.array([[text[-1]]], np.int32), position + 1
                token, cache = self.advance(state, tokens, position - 1, 1, count, cache)
            text.append(token)
            count += 1
            yield token
            if position == self.length:
                recent, cache = text[-(self.length // 2) :], None

    def advance(
        self, state: dict, tokens: np.ndarray, start: int, size: int, count: int, cache: Any
    ) -> tuple[int, Any]:
        """Return the next token and the cache with `tokens` in it, and add the call to `seconds`.

        Args:
            state: as for `generate`.
            tokens: int32[1, S], padded behind the first `size`.
            start: position of the first.
            size: how many of them are text.
            count: tokens drawn before.
            cache: of `new_cache` or of the call before; donated.
        """
        run = self.compiled(tokens.shape[1])
        started = time.perf_counter()
        scalars = (np.int32(x) for x in (start, size, count))
        token, cache = run(state["params"], state["scales"], tokens, *scalars, cache)
        token = int(token)
        self.seconds.append((tokens.shape[1], time.perf_counter() - started))
        return token, cache

    def prefill_size(self, count: int) -> int:
        """Return the positions that a prompt of `count` tokens is padded to, so that few programs are compiled."""
        return min(max(SMALLEST_PREFILL, 1 << (min(count, self.length) - 1).bit_length()), self.length)

    def compiled(self, size: int) -> Any:
        """Return the compiled program that reads `size` positions."""
        if size not in self._compiled:
            self._compiled[size] = self.traced(size).lower().compile()
        return self._compiled[size]

    def traced(self, size: int) -> Any:
        """Return the traced program that reads `size` positions and draws the token after them."""
        if size not in self._traced:
            self._traced[size] = self._trace(size)
        return self._traced[size]

    def _trace(self, size: int) -> Any:
        program, replicated = self.program, NamedSharding(self.program.mesh, P())
        state = program.abstract_state()
        tokens = jax.ShapeDtypeStruct((1, size), jnp.int32, sharding=replicated)
        scalar = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
        cache = jax.eval_shape(self.new_cache, state["params"])
        shardings = jax.tree.map(lambda _: NamedSharding(program.mesh, CACHE), cache)
        run = jax.jit(
            self._advance,
            donate_argnums=6,
            in_shardings=(
                *(program.state_shardings[key] for key in ("params", "scales")),
                *[replicated] * 4,
                shardings,
            ),
            out_shardings=(replicated, shardings),
        )
        return run.trace(state["params"], state["scales"], tokens, scalar, scalar, scalar, cache)

    def _advance(self, parameters, scales, tokens, start, size, count, cache) -> tuple[jax.Array, Any]:
        """Return the token after the first `size` of `tokens`, which stand at start .., and the cache with them."""
        program = self.program
        run = jax.shard_map(
            self._last_logits,
            mesh=program.mesh,
            in_specs=(program.specs, program.scale_specs, P(), P(), P(), CACHE),
            out_specs=(P(None, "tp"), CACHE),
            check_vma=True,
        )
        logits, cache = run(parameters, scales, tokens, start, size, cache)
        return sample(logits[0], jnp.asarray(self._allowed), count, self.sampling), cache

    def _last_logits(self, parameters, scales, tokens, start, size, cache) -> tuple[jax.Array, Any]:
        model, comm = self.program.model(parameters), self.program.comm(scales)
        with jax.named_scope("embedding"):
            x = pipeline.on_first_stage(lambda: model.embed(tokens, comm, start), axes=("pp",))
        layers = comm.select(LAYER_SITES)

        def stage(x: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
            return model.run_layers(x, layers, start=start, cache=cache, remat=False)

        with jax.named_scope("layers"):
            x, cache = pipeline.pass_through_stages(stage, x, cache)
        last = lax.dynamic_index_in_dim(x, size - 1, axis=1, keepdims=False)
        with jax.named_scope("head"):
            return model.logits(pipeline.from_last_stage(last), comm), cache

    @functools.cached_property
    def new_cache(self) -> Any:
        """The compiled function from parameters to an empty cache."""
        program = self.program

        def local(parameters: dict) -> Any:
            comm = program.comm({})
            empty = program.model(parameters).new_cache(1, self.length, comm)
            return jax.tree.map(lambda x: vary(x, ("pp", "tp")), empty)

        run = jax.shard_map(local, mesh=program.mesh, in_specs=(program.specs,), out_specs=CACHE, check_vma=True)
        return jax.jit(run)
