"""Requests that join and leave for a long time: no stray byte, no recompilation, no growth."""

import os
import random
from pathlib import Path

import pytest
import torch
from engine_small import SMALL, assert_idle, make_model, some_tokens
from torch._dynamo.utils import counters

from fp8kv_inductor import slots
from fp8kv_inductor.budget import PoolPlan
from fp8kv_inductor.demo import CPU_OPTIONS
from fp8kv_inductor.engine import Engine

pytestmark = pytest.mark.usefixtures("one_thread")

LONG = 10_000


class Shadow:
    """A copy of all pools that follows only the rows which a step means to write."""

    def __init__(self, engine):
        self.layers = engine.model.pools.layers
        self.ratios = engine.cache.model.compress_ratios
        self.ring = engine.cache.model.state_ring
        self.copies = [[buffer.clone() for buffer in layer.buffers()] for layer in self.layers]
        for name in ("_prefill", "_decode"):
            setattr(engine, name, self.following(getattr(engine, name)))

    def following(self, step):
        def run(batch):
            result = step(batch)
            for layer, ratio, copies in zip(self.layers, self.ratios, self.copies, strict=True):
                written = self.written(batch, ratio)
                names = [name for name, _ in layer.named_buffers()]
                for name, buffer, copy in zip(names, layer.buffers(), copies, strict=True):
                    rows = written[name.split(".")[0]]
                    rows = rows[rows >= 0]
                    assert len(rows.unique()) == len(rows), "two tokens, one row"
                    copy[rows] = buffer[rows]
            return result

        return run

    def written(self, batch, ratio):
        """Rows of each tier that a step writes, -1 among them."""
        rows = {"window": slots.window_slots(batch)}
        if ratio:
            ring = self.ring(ratio)
            rows["cmp"] = rows["idx"] = slots.groups(batch, ratio, ring).slots
            rows["state"] = rows["idx_state"] = slots.state_slots(batch, ring)
        return rows

    def check(self):
        """Every byte of every pool is the copy's."""
        for layer, copies in zip(self.layers, self.copies, strict=True):
            for buffer, copy in zip(layer.buffers(), copies, strict=True):
                assert torch.equal(buffer.view(torch.uint8), copy.view(torch.uint8))


def memory(device):
    """Bytes that the process and the device hold."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    device_bytes = torch.cuda.memory_allocated() if device == "cuda" else 0
    return pages * os.sysconf("SC_PAGE_SIZE"), device_bytes


def run(engine, shadow, decode_steps, at_quarter=lambda: None):
    """Random requests until so many decode steps are done; returns some of them with tokens."""
    draw, kept, outstanding, done = random.Random(0), [], {}, 0
    while done < decode_steps or engine.unfinished:
        while done < decode_steps and len(outstanding) < 6:
            prompt = some_tokens(draw.choice((1, 5, 64, 127, 128, 129, 300)), draw.randrange(1000))
            new_tokens = draw.randrange(1, 120)
            outstanding[engine.add_request(prompt, new_tokens)] = prompt, new_tokens
        result = engine.step()
        done += result.kind == "decode"
        if result.kind == "decode" and done % 500 == 0:
            shadow.check()
        if result.kind == "decode" and done == decode_steps // 4:
            at_quarter()
        for request_id in result.tokens:
            if (tokens := engine.finished(request_id)) is not None:
                kept.append((*outstanding.pop(request_id), tokens))
    shadow.check()
    return kept


def make_engine(kv_cache_dtype, device, compile):
    """Few pages, so that each is taken and given back again and again."""
    model = make_model(SMALL, kv_cache_dtype, device=device)
    options = CPU_OPTIONS if device == "cpu" else None
    plan = PoolPlan(model.cache, num_pages=9, window_pages=6)
    limits = {"max_batch": 4, "max_len": 512, "prefill_chunk": 200}
    return Engine(model, plan, **limits, compile=compile, compile_options=options)


def test_no_step_writes_a_row_that_is_not_its_own():
    engine = make_engine("fp8_e4m3", "cpu", compile=False)
    kept = run(engine, Shadow(engine), 60)
    assert_idle(engine)
    prompt, new_tokens, tokens = kept[-1]
    assert engine.generate([prompt], new_tokens) == [tokens]


def test_a_stray_write_would_be_seen():
    """Positive control of the shadow."""
    engine = make_engine("fp8_e4m3", "cpu", compile=False)
    shadow = Shadow(engine)
    run(engine, shadow, 3)
    engine.model.pools.layers[1].cmp.scale[-1, -1] += 1
    with pytest.raises(AssertionError):
        shadow.check()


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_ten_thousand_steps(kv_cache_dtype, device, record_property):
    """Memory is flat if it grows by less than the logits of one step in ten."""
    engine = make_engine(kv_cache_dtype, device, compile=True)
    engine.warm_up()
    shadow, at_quarter = Shadow(engine), []
    graphs = counters["stats"]["unique_graphs"]
    with torch._dynamo.config.patch(error_on_recompile=True):
        kept = run(engine, shadow, LONG, lambda: at_quarter.extend(memory(device)))
    assert counters["stats"]["unique_graphs"] == graphs
    assert_idle(engine)
    for prompt, new_tokens, tokens in random.Random(1).sample(kept, 5):
        assert engine.generate([prompt], new_tokens) == [tokens]
    host, on_device = memory(device)
    growth = {"requests": len(kept), "host": host - at_quarter[0]}
    growth["device"] = on_device - at_quarter[1]
    for name, value in growth.items():
        record_property(name, value)
    print(kv_cache_dtype, device, growth)
    logits = 4 * SMALL.vocab_size * torch.float32.itemsize
    assert growth["host"] < LONG // 10 * logits
    assert growth["device"] <= 0
