"""The engine's tokens: against the dense oracle, and whatever the batch and the chunks are.

In fp32 and without the model's rounding steps: what is left are pool rows, which fp32 arithmetic in
another order may round the other way.
"""

import pytest
import torch
from engine_small import SMALL, assert_idle, make_engine, oracle, some_tokens

from fp8kv_inductor.budget import PoolPlan

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [some_tokens(count, seed) for seed, count in enumerate((301, 5, 130, 64, 1))]
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def engine():
    return make_engine(rounding=False)


@pytest.fixture(scope="module")
def outputs(engine):
    return engine.generate(PROMPTS, NEW_TOKENS)


@pytest.mark.parametrize(
    ("kv_cache_dtype", "kv_format"), [("auto", "bf16"), ("fp8_e4m3", "fp8_e4m3")]
)
def test_score_equals_the_dense_reference(kv_cache_dtype, kv_format):
    engine = make_engine(kv_cache_dtype, rounding=False)
    logits = engine.score(PROMPTS[0])
    expected, bound = oracle(PROMPTS[0], kv_format, rounding=False)
    assert logits.shape == (len(PROMPTS[0]), SMALL.vocab_size)
    assert (logits - expected).abs().max() <= bound
    assert_idle(engine)


@pytest.mark.parametrize("index", range(len(PROMPTS)))
def test_greedy_tokens_are_the_dense_references(outputs, index):
    prompt, output = PROMPTS[index], outputs[index]
    expected, bound = oracle(prompt + output, "bf16", rounding=False)
    steps = expected[len(prompt) - 1 : -1]
    missed = steps.max(-1).values - steps[torch.arange(NEW_TOKENS), torch.tensor(output)]
    assert missed.max() <= 2 * bound


def test_a_batch_gives_the_tokens_of_each_request_alone(engine, outputs):
    assert_idle(engine)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert engine.generate([prompt], NEW_TOKENS) == [output]
    assert_idle(engine)


@pytest.mark.parametrize("prefill_chunk", [2, 77, 512])
def test_chunks_do_not_change_the_tokens(outputs, prefill_chunk):
    few = slice(1, 3) if prefill_chunk == 2 else slice(None)
    engine = make_engine(prefill_chunk=prefill_chunk, rounding=False)
    assert engine.generate(PROMPTS[few], NEW_TOKENS) == outputs[few]
    assert_idle(engine)


def test_few_window_pages_shorten_chunks_but_not_the_tokens(engine, outputs):
    plan = PoolPlan(engine.cache, num_pages=16, window_pages=4)
    scarce = make_engine(budget=plan, rounding=False)
    assert scarce.generate(PROMPTS, NEW_TOKENS) == outputs
    assert_idle(scarce)


def test_more_requests_than_pages_take_turns(engine, outputs):
    plan = PoolPlan(engine.cache, num_pages=4, window_pages=4)
    narrow = make_engine(budget=plan, rounding=False)
    assert narrow.generate([*PROMPTS, *PROMPTS], NEW_TOKENS) == outputs * 2
    assert_idle(narrow)


def test_requests_join_and_leave_between_steps(engine, outputs):
    lengths = [3, 12, 7, 1, 12]
    ids = []
    for prompt, length in zip(PROMPTS, lengths, strict=True):
        ids.append(engine.add_request(prompt, length))
        for _ in range(2):
            engine.step()
    while engine.unfinished:
        engine.step()
    assert [engine.finished(i) for i in ids] == [
        output[:length] for output, length in zip(outputs, lengths, strict=True)
    ]
    with pytest.raises(KeyError):
        engine.finished(ids[0])
    assert_idle(engine)


def test_progress_counts_every_token(engine):
    steps = []
    engine.generate(PROMPTS[1:3], 5, progress=steps.append)
    assert sum(steps) == 2 * 5
