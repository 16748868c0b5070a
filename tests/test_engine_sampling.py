"""Sampling: the right distribution, from each request's own generator."""

import pytest
import torch
from engine_small import make_engine, some_tokens

from fp8kv_inductor.sampling import sample

pytestmark = pytest.mark.usefixtures("one_thread")


def generator(seed):
    return torch.Generator().manual_seed(seed)


def test_temperature_zero_is_the_largest_logit():
    logits = torch.randn(5, 100)
    assert torch.equal(sample(logits, [0.0] * 5, [None] * 5), logits.argmax(-1))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature):
    draws = 20_000
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, -torch.inf])
    source = generator(0)
    tokens = sample(logits.expand(draws, -1), [temperature] * draws, [source] * draws)
    expected = (logits / temperature).softmax(-1)
    found = torch.bincount(tokens, minlength=5) / draws
    # Five standard deviations of a binomial share.
    assert ((found - expected).abs() <= 5 * (expected * (1 - expected) / draws).sqrt()).all()


def test_a_row_draws_the_same_beside_other_rows():
    logits = torch.randn(3, 50)
    alone = sample(logits[1:2], [0.8], [generator(7)])
    beside = sample(logits, [1.3, 0.8, 0.0], [generator(1), generator(7), None])
    assert beside[1] == alone[0]
    assert beside[2] == logits[2].argmax()


def test_generation_is_deterministic_per_seed():
    engine = make_engine()
    prompts = [some_tokens(20), some_tokens(20)]
    first, second = engine.generate(prompts, 8, temperature=1.0, seed=3)
    assert first != second, "equal prompts draw from generators of their own"
    assert engine.generate(prompts, 8, temperature=1.0, seed=3) == [first, second]
    assert engine.generate(prompts[:1], 8, temperature=1.0, seed=4) == [second]
