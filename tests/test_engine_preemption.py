"""Requests that need more pages than are free: the youngest gives way and is computed again."""

import pytest
from engine_small import assert_idle, make_engine, some_tokens

from fp8kv_inductor.budget import PoolPlan
from fp8kv_inductor.config import PAGE_SIZE

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [some_tokens(count, count) for count in (PAGE_SIZE - 8, PAGE_SIZE - 12, PAGE_SIZE - 16)]
NEW_TOKENS = 18
"""Every request starts in one page and needs a second one."""


def engine_of(num_pages, **options):
    engine = make_engine(rounding=False, **options)
    plan = PoolPlan(engine.cache, num_pages, window_pages=6)
    return make_engine(rounding=False, budget=plan, **options)


@pytest.mark.parametrize(("num_pages", "temperature"), [(3, 1.0), (5, 0.0)])
def test_preemption_does_not_change_the_tokens(num_pages, temperature):
    ample, scarce = engine_of(6), engine_of(num_pages)
    expected = ample.generate(PROMPTS, NEW_TOKENS, temperature)
    assert scarce.generate(PROMPTS, NEW_TOKENS, temperature) == expected
    assert ample.preemptions == 0 and scarce.preemptions > 0
    assert_idle(scarce)


def test_the_youngest_gives_way_and_comes_back_first():
    engine = engine_of(4)
    first, second, third = (engine.add_request(prompt, NEW_TOKENS) for prompt in PROMPTS)
    late = engine.add_request(PROMPTS[0], 1)
    steps = []
    while engine.unfinished:
        steps.append(engine.step())
    decoded = [set(step.tokens) for step in steps if step.kind == "decode"]
    assert decoded[0] == {first, second, third}
    assert {first, second} in decoded and {first} not in decoded
    # The oldest never misses a step, and nobody overtakes.
    assert all(first in tokens for tokens in decoded[: NEW_TOKENS - 1])
    resumed = [i for i, step in enumerate(steps) if step.kind == "prefill" and third in step.tokens]
    assert len(resumed) == 2
    assert next(i for i, step in enumerate(steps) if late in step.tokens) >= resumed[1]
    assert_idle(engine)


def test_a_request_is_not_admitted_to_lose_its_page_at_once():
    engine = engine_of(2)
    exact = some_tokens(PAGE_SIZE)
    engine.add_request(PROMPTS[0], 4)
    engine.add_request(exact, 4)
    engine.step()
    assert (engine.pages.page_table >= 0).sum() == 1, "the second needs two pages to begin"
    while engine.unfinished:
        engine.step()
    assert engine.preemptions == 0
