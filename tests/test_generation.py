import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import mesh

from experiments import step
from experiments.config import CommunicationConfig, DataConfig, ParallelConfig, TrainConfig
from experiments.generation import Generator, Sampling, allowed_ids, sample
from experiments.tokenizer import ByteTokenizer
from taco_jax.models.config import ModelConfig

pytestmark = pytest.mark.usefixtures("quickly_compiled")

VOCAB = 40
CONFIG = TrainConfig(
    compression="none",
    dtype="float32",
    model=ModelConfig(2, 32, 4, "qwen", num_kv_heads=2, vocab_size=VOCAB, kernel_std=0.3, embedding_std=0.5),
    data=DataConfig(sequence_length=16, batch_size=2),
    parallel=ParallelConfig(num_microbatches=1),
    communication=CommunicationConfig(min_bytes=0),
)


@functools.cache
def program_on(**sizes):
    return step.build(CONFIG, mesh(**{"dp": 1, "pp": 1, "tp": 1, **sizes}))


def continued(program, prompt, count, *, length=16, allowed=VOCAB, **sampling):
    generator = Generator(program, np.ones(allowed, bool), length=length, sampling=Sampling(**sampling))
    return list(itertools.islice(generator.generate(program.init(3), prompt), count))


def drawn(probabilities, count=2000, allowed=None, **sampling):
    """How often each token is drawn, as shares."""
    logits = jnp.log(jnp.asarray(probabilities, jnp.float32))
    allowed = jnp.ones(logits.shape, bool) if allowed is None else jnp.asarray(allowed)
    draw = jax.jit(jax.vmap(lambda i: sample(logits, allowed, i, Sampling(**sampling))))
    return np.bincount(draw(jnp.arange(count)), minlength=len(probabilities)) / count


@pytest.mark.parametrize(
    ("sampling", "want"),
    [
        ({"temperature": 1.0}, [0.05, 0.5, 0.15, 0.3]),
        ({"temperature": 0.5}, np.square([0.05, 0.5, 0.15, 0.3]) / 0.365),
        ({"temperature": 1.0, "top_p": 0.75}, [0, 0.625, 0, 0.375]),
        ({"temperature": 1.0, "top_p": 0.1}, [0, 1, 0, 0]),
        ({"temperature": 0.0}, [0, 1, 0, 0]),
        ({"temperature": 1.0, "allowed": [True, False, True, False]}, [0.25, 0, 0.75, 0]),
        ({"temperature": 1.0, "top_p": 0.7, "allowed": [True, False, True, False]}, [0, 0, 1, 0]),
    ],
    ids=["as it is", "sharper", "nucleus", "small nucleus", "greedy", "some are no tokens", "nucleus of the others"],
)
def test_tokens_are_drawn_as_often_as_they_should_be(sampling, want):
    np.testing.assert_allclose(drawn([0.05, 0.5, 0.15, 0.3], **sampling), want, atol=0.035)


def test_another_seed_draws_other_tokens():
    draws = [[int(sample(jnp.zeros(1000), True, i, Sampling(1.0, seed=s))) for i in range(5)] for s in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1}, "temperature must be 0 or more"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
    ],
)
def test_sampling_refuses(fields, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**fields)


def test_the_same_tokens_are_drawn_on_every_mesh():
    want = continued(program_on(), [3, 1, 4], 10, temperature=1.0, top_p=0.9)
    assert len(set(want)) > 4
    for sizes in ({"tp": 8}, {"dp": 2, "pp": 2, "tp": 2}):
        assert continued(program_on(**sizes), [3, 1, 4], 10, temperature=1.0, top_p=0.9) == want


def test_a_full_cache_goes_on_from_its_last_half():
    """The oracle scores every window as a whole."""
    program, prompt, length = program_on(), [7, 5, 3, 9, 1], 8
    state = program.init(3)
    text, window = list(prompt), list(prompt)
    for _ in range(14):
        logits = np.asarray(program.logits(state, np.pad(window, (0, length - len(window)))[None]))
        text.append(int(np.argmax(logits[0, len(window) - 1])))
        window = [*window, text[-1]] if len(window) < length else text[-length // 2 :]
    assert continued(program, prompt, 14, length=length, temperature=0) == text[len(prompt) :]


def test_a_prompt_longer_than_the_cache_is_cut_at_its_beginning():
    program, prompt = program_on(), list(range(20))
    assert continued(program, prompt, 3, length=8, temperature=0) == continued(
        program, prompt[-8:], 3, length=8, temperature=0
    )


def test_what_no_token_stands_for_is_never_drawn():
    """M6."""
    assert max(continued(program_on(tp=2), [1], 40, allowed=4, temperature=5.0)) == 3


def test_ids_without_a_token_are_not_allowed():
    class Tokenizer(ByteTokenizer):
        vocab_size, unused = 5, (1, 3)

    chex.assert_trees_all_equal(allowed_ids(Tokenizer()), np.array([True, False, True, False, True]))
