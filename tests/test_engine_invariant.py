"""A batch-invariant engine gives a request the same bits, whatever runs beside it."""

import pytest
import torch
from engine_small import assert_idle, make_engine, some_tokens

from fp8kv_inductor.budget import PoolPlan
from fp8kv_inductor.config import PAGE_SIZE, ConfigError

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = some_tokens(230, 1)
NEW_TOKENS = 6


def logits_of(engine, others, position=0):
    """Logits of every token of the request with PROMPT, among ``others`` with other prompts."""
    prompts = [some_tokens(3 + 29 * i % 190, 100 + i) for i in range(others)]
    prompts.insert(position, PROMPT)
    ids = [engine.add_request(prompt, NEW_TOKENS) for prompt in prompts]
    ours = ids[position]
    found = []
    sample = engine._sample

    def sampled(logits, requests):
        found.extend(logits[row].cpu() for row, i in requests.items() if i == ours)
        return sample(logits, requests)

    engine._sample = sampled
    while engine.unfinished:
        engine.step()
    engine._sample = sample
    assert_idle(engine)
    tokens = [engine.finished(i) for i in ids][position]
    assert len(found) == NEW_TOKENS
    return torch.stack(found), tokens


def same(one, other):
    return torch.equal(one[0].view(torch.int32), other[0].view(torch.int32)) and one[1] == other[1]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_alone_and_among_others(kv_cache_dtype):
    engine = make_engine(
        kv_cache_dtype, max_batch=8, batch_invariant=True, prefill_chunk=100, budget=32 << 20
    )
    alone = logits_of(engine, 0)
    for others, position in ((1, 0), (1, 1), (7, 3), (20, 20)):
        assert same(logits_of(engine, others, position), alone)
    assert engine.preemptions == 0


def test_prompts_are_run_alone_in_whole_chunks():
    engine = make_engine(batch_invariant=True, prefill_chunk=100)
    sizes = []
    prefill = engine._inputs.prefill

    def recorded(segments, last, size):
        batch = prefill(segments, last, size)
        sizes.append((len(segments), len(batch.tokens)))
        return batch

    engine._inputs.prefill = recorded
    engine.generate([PROMPT, some_tokens(20)], 1)
    assert sizes == [(1, 100)] * 4


def test_a_request_waits_for_all_its_pages():
    first = make_engine(batch_invariant=True)
    engine = make_engine(batch_invariant=True, budget=PoolPlan(first.cache, 3, 3))
    one, two = (engine.add_request(some_tokens(PAGE_SIZE - 4), 8) for _ in range(2))
    steps = []
    while engine.unfinished:
        steps.append(set(engine.step().tokens))
    assert all(len(tokens) <= 1 for tokens in steps), "both need two pages, and there are three"
    assert engine.preemptions == 0 and engine.finished(one) == engine.finished(two)


def test_too_few_window_pages_are_refused():
    cache = make_engine().cache
    with pytest.raises(ConfigError, match="found 4 window pages; batch_invariant needs"):
        make_engine(batch_invariant=True, budget=PoolPlan(cache, 40, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_compiled_and_captured_on_a_gpu(kv_cache_dtype):
    engine = make_engine(
        kv_cache_dtype,
        budget=512 << 20,
        compile=True,
        max_batch=132,
        device="cuda",
        dtype=torch.bfloat16,
        cuda_graph="capture",
        batch_invariant=True,
    )
    alone = logits_of(engine, 0)
    for requests, position in ((2, 1), (8, 0), (64, 40), (132, 0), (132, 131)):
        assert same(logits_of(engine, requests - 1, position), alone)
