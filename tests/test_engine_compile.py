"""Compiled engines: one graph for prefill, one for decode, whatever the requests do."""

from dataclasses import replace

import pytest
import torch
from engine_small import ONE_LAYER, assert_idle, make_engine, oracle, some_tokens
from torch._dynamo.utils import counters

from fp8kv_inductor._compat import generated_kernels

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def compiled():
    """An engine, and the graphs and kernels that each kind of step compiled."""
    engine = make_engine(rounding=False, compile=True)
    found = {}
    for kind in ("prefill", "decode"):
        before = counters["stats"]["unique_graphs"], generated_kernels()
        engine.warm_up([kind])
        found[kind] = (
            counters["stats"]["unique_graphs"] - before[0],
            generated_kernels() - before[1],
        )
    return engine, found


def test_one_graph_each(compiled):
    _, found = compiled
    assert {kind: graphs for kind, (graphs, _) in found.items()} == {"prefill": 1, "decode": 1}
    assert all(kernels > 0 for _, kernels in found.values())


def test_nothing_recompiles_while_requests_come_and_go(compiled):
    engine, _ = compiled
    lengths = (1, 2, 3, 127, 128, 129, 333)
    graphs = counters["stats"]["unique_graphs"]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in (1, 2, 4, 7):
            prompts = [some_tokens(count, count) for count in lengths[:batch]]
            assert [len(tokens) for tokens in engine.generate(prompts, 3)] == [3] * batch
        ids = [engine.add_request(some_tokens(9, count), count) for count in (2, 140, 5)]
        for _ in range(4):
            engine.step()
        ids.append(engine.add_request(some_tokens(260), 3, temperature=1.0))
        while engine.unfinished:
            engine.step()
    assert [len(engine.finished(i)) for i in ids] == [2, 140, 5, 3]
    assert counters["stats"]["unique_graphs"] == graphs
    assert_idle(engine)


def test_nothing_recompiles_when_requests_are_preempted(compiled):
    engine, _ = compiled
    prompts = [some_tokens(count, count) for count in (120, 116, 250)]
    before, others = engine.preemptions, engine.pages.full.take(len(engine.pages.full) - 4)
    with torch._dynamo.config.patch(error_on_recompile=True):
        scarce = engine.generate(prompts, 16)
        assert engine.preemptions > before
        engine.pages.full.give(others)
        assert engine.generate(prompts, 16) == scarce
    assert_idle(engine)


def test_the_first_chunk_has_the_largest_size():
    """The read's splits, which cost scratch per token, are chosen for the size compiled at."""
    for compile, sizes in ((True, [200, 3, 7]), (False, [2, 3, 7])):
        engine, seen = make_engine(config=ONE_LAYER, compile=compile), []
        engine._prefill = lambda batch, engine=engine, seen=seen: (
            seen.append(len(batch.tokens)) or engine.model(batch)
        )
        for count in (1, 3, 7):
            engine.generate([some_tokens(count)], 1)
        assert seen == sizes


def test_compiled_logits_are_the_dense_references(compiled):
    tokens = some_tokens(301)
    expected, bound = oracle(tokens, "bf16", rounding=False)
    assert (compiled[0].score(tokens) - expected).abs().max() <= bound


@pytest.mark.slow
def test_many_experts_make_two_graphs_of_prefill():
    """One that computes all experts and one for few tokens, which gathers those they choose."""
    many = replace(ONE_LAYER, name="many-experts", n_routed_experts=32)
    engine = make_engine(config=many, compile=True, rounding=False)
    graphs = counters["stats"]["unique_graphs"]
    engine.warm_up(["prefill"])
    engine.score(some_tokens(3))
    assert counters["stats"]["unique_graphs"] == graphs + 2
    with torch._dynamo.config.patch(error_on_recompile=True):
        for count in (1, 2, 15, 16, 17, 200, 203, 399):
            assert engine.score(some_tokens(count)).isfinite().all()


@pytest.mark.slow
def test_another_engine_compiles_graphs_of_its_own(compiled):
    """Dynamo must take neither the first engine's graphs nor its sizes for dynamic ones."""
    prompts = [some_tokens(count, count) for count in (300, 140, 40, 1)]
    expected = make_engine("fp8_e4m3", config=ONE_LAYER).generate(prompts, 6)
    graphs = counters["stats"]["unique_graphs"]
    other = make_engine("fp8_e4m3", config=ONE_LAYER, compile=True, max_batch=3, max_len=320)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert other.generate(prompts, 6) == expected
        assert len(compiled[0].generate(prompts, 2)) == len(prompts)
    assert counters["stats"]["unique_graphs"] == graphs + 2
