"""What an engine's steps may touch: its own pools, and of those no row for padding."""

import pytest
import torch
from engine_small import SMALL, make_engine, some_tokens

from fp8kv_inductor.config import ConfigError
from fp8kv_inductor.graphs import CapturedStep, places
from fp8kv_inductor.pools import KVPools

pytestmark = pytest.mark.usefixtures("one_thread")


def poison(pools):
    """Fill every pool with what no store writes, and return copies of it."""
    for buffer in pools.buffers():
        buffer.fill_(0x7F if buffer.dtype == torch.uint8 else torch.nan)
    return [buffer.clone() for buffer in pools.buffers()]


def same_bytes(pools, before):
    pairs = zip(pools.buffers(), before, strict=True)
    return [torch.equal(now.view(torch.uint8), then.view(torch.uint8)) for now, then in pairs]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_padding_writes_nothing(kv_cache_dtype):
    engine = make_engine(kv_cache_dtype)
    before = poison(engine.model.pools)
    engine.warm_up()
    assert all(same_bytes(engine.model.pools, before))
    engine.generate([some_tokens(5)], 2)
    assert not all(same_bytes(engine.model.pools, before))


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_padding_beside_a_request_writes_nothing(kv_cache_dtype):
    """A batch of one in an engine of four stores into the pages of that one alone."""
    engine = make_engine(kv_cache_dtype)
    poison(engine.model.pools)
    engine.add_request(some_tokens(3), 9)
    engine.step()
    page = engine.pages.window_table[engine.pages.window_table >= 0].item()
    before = [buffer.clone() for buffer in engine.model.pools.buffers()]
    engine.step()
    own = slice(page * engine.cache.page_size, (page + 1) * engine.cache.page_size)
    rows, old = engine.model.pools.layers[0].window.data, before[0]
    changed = (rows.view(torch.uint8) != old.view(torch.uint8)).any(1).nonzero().flatten()
    assert changed.tolist() == [own.start + 3]


def test_rebuilt_pools_are_refused():
    engine = make_engine()
    engine.add_request([1, 2, 3], 3)
    engine.step()
    own = engine.model.pools
    engine.model.bind(KVPools(engine.plan))
    before = poison(engine.model.pools)
    for step in (engine.step, engine.warm_up, lambda: engine.score([1])):
        with pytest.raises(RuntimeError, match="other pools than this engine's"):
            step()
    assert all(same_bytes(engine.model.pools, before))
    engine.model.bind(own)
    engine.step()


def test_the_inputs_of_decode_never_move():
    """Whatever runs, each field of a decode step has one address and one shape."""
    engine, steps = make_engine(), []
    inner = engine._decode
    engine._decode = lambda batch: steps.append(places(batch)) or inner(batch)
    engine.warm_up(["decode"])
    engine.generate([some_tokens(count, count) for count in (1, 60, 5)], 3)
    engine.generate([some_tokens(2)], 2)
    assert len(steps) == 4 and all(step == steps[0] for step in steps)
    fields = [address for address, _ in steps[0]]
    assert len(set(fields)) == len(fields)
    moved = engine._inputs.prefill([], [], 7)
    assert places(moved) != steps[0], "other sizes are told apart"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cuda_graph": "capture"}, "found cuda_graph='capture' on cpu"),
        ({"cuda_graph": "reduce-overhead", "compile": True}, "'reduce-overhead' on cpu"),
    ],
)
def test_graphs_need_a_gpu(options, message):
    with pytest.raises(ConfigError, match=message):
        make_engine(**options)


def test_a_step_on_the_cpu_is_not_captured():
    engine = make_engine()
    with pytest.raises(ValueError, match="found a batch on cpu"):
        CapturedStep(engine.model, engine.model, engine._inputs.decode([]))
    assert engine.score([0]).shape == (1, SMALL.vocab_size)
