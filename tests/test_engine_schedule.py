"""What the engine runs in which step, and what it refuses."""

import pytest
from engine_small import SMALL, assert_idle, make_engine, some_tokens

from fp8kv_inductor.budget import PoolPlan
from fp8kv_inductor.config import CacheConfig, ConfigError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def engine():
    return make_engine()


def test_several_prompts_share_a_chunk_up_to_its_limit(engine):
    short, middle, long = (engine.add_request(some_tokens(count), 3) for count in (50, 100, 300))
    steps = [engine.step() for _ in range(3)]
    assert [step.kind for step in steps] == ["prefill", "prefill", "prefill"]
    # 50 + 100 + 50 of 300, then 200, then the last 50.
    assert [set(step.tokens) for step in steps] == [{short, middle}, set(), {long}]
    decode = engine.step()
    assert decode.kind == "decode" and set(decode.tokens) == {short, middle, long}
    late = engine.add_request(some_tokens(9), 1)
    assert engine.step() == ("prefill", {late: engine.finished(late)[0]})
    assert engine.finished(short) is None
    assert set(engine.step().tokens) == {short, middle, long}
    assert_idle(engine)


def test_plan_lets_a_full_batch_decode_while_a_chunk_runs():
    engine = make_engine(max_batch=8, prefill_chunk=512)
    assert engine.plan.window_pages >= 8 * 2 + 4
    assert engine.plan.nbytes == engine.model.pools.nbytes() <= 16 << 20


@pytest.mark.parametrize(
    ("prompt", "new_tokens", "options", "error", "message"),
    [
        ([], 1, {}, ValueError, "found no tokens"),
        ([0, 64], 1, {}, ValueError, r"found token ids 0 \.\. 64.*knows 0 \.\. 63"),
        ([-1], 1, {}, ValueError, r"found token ids -1 \.\. -1"),
        ([0], 0, {}, ValueError, "found max_new_tokens=0"),
        ([0], 1, {"temperature": -0.5}, ValueError, "found temperature=-0.5"),
        ([0] * 600, 42, {}, ConfigError, "found 5 pages per request.*raise max_len"),
    ],
)
def test_requests_that_cannot_run_are_refused(engine, prompt, new_tokens, options, error, message):
    with pytest.raises(error, match=message):
        engine.add_request(prompt, new_tokens, **options)
    assert_idle(engine)


def test_a_request_larger_than_the_pools_is_refused_at_once():
    cache = CacheConfig.resolve(SMALL, "auto", "cpu")
    engine = make_engine(budget=PoolPlan(cache, num_pages=2, window_pages=2))
    with pytest.raises(ConfigError, match=r"found 2 full-history pages.*needs 3.*raise the budget"):
        engine.add_request(some_tokens(256), 2)
    assert len(engine.generate([some_tokens(256)], 1)[0]) == 1


@pytest.mark.parametrize(
    ("budget", "limits", "error", "message"),
    [
        (1000, {}, ConfigError, "found a KV budget of 1000 bytes"),
        (16 << 20, {"max_len": 5000}, ConfigError, "found max_len=5000.*4096 positions"),
        (16 << 20, {"max_batch": 0}, ValueError, "found max_batch=0"),
        (16 << 20, {"prefill_chunk": 1}, ValueError, "found prefill_chunk=1"),
    ],
)
def test_engines_that_cannot_work_are_refused(budget, limits, error, message):
    with pytest.raises(error, match=message):
        make_engine(budget=budget, **limits)


def test_scoring_waits_for_a_free_row():
    engine = make_engine(max_batch=1)
    engine.add_request([1, 2, 3], 2)
    engine.step()
    with pytest.raises(RuntimeError, match="no free row or pages"):
        engine.score([1, 2])
    with pytest.raises(RuntimeError, match="add_request first"):
        while True:
            engine.step()
    assert engine.score([1]).shape == (1, SMALL.vocab_size)
    assert_idle(engine)
