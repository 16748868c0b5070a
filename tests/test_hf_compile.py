"""Decode of a patched model is one graph, whatever happens between the steps."""

import pytest
import torch
from hf_small import CONFIG, hf, oracle, patched, some_tokens
from model_steps import per_token
from torch._dynamo.utils import counters

from fp8kv_inductor.demo import CPU_OPTIONS

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 210


@torch.no_grad()
def test_one_graph_for_two_hundred_steps():
    """Over the edges of the window, of pages and of groups, with sequences that come and go."""
    model = patched(compile=True, compile_options=CPU_OPTIONS, max_batch=2)
    tokens = some_tokens(STEPS)
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    cache, other, logits = {}, None, []
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(STEPS):
            output = model(tokens[:, step : step + 1], use_cache=True, **cache)
            cache = {hf.OUTPUT_FIELD: output[hf.OUTPUT_FIELD]}
            logits.append(output.logits)
            if step % 30 == 20:  # A neighbour of a few tokens.
                other = model(tokens[:, :1], use_cache=True)[hf.OUTPUT_FIELD]
            elif step % 30 < 3 and other is not None:
                model(tokens[:, 1:2], **{hf.OUTPUT_FIELD: other})
            elif other is not None and step % 30 == 10:
                other.reset()
                other = None
    assert counters["stats"]["unique_graphs"] == graphs + 1
    assert sum(counters["graph_break"].values()) == breaks
    expected, bound = oracle(tokens[0], "bf16")
    assert per_token(torch.cat(logits, 1)[0], expected).median() <= bound


@pytest.mark.slow
def test_generate_compiles_a_graph_of_each_kind():
    model = patched("fp8_e4m3", compile=True, compile_options=CPU_OPTIONS, max_batch=2)
    graphs = counters["stats"]["unique_graphs"]
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with torch._dynamo.config.patch(error_on_recompile=True):
        for count, new in ((130, 205), (17, 4), (1, 3)):
            prompts = some_tokens(count).expand(2, count)
            found = model.generate(prompts, max_new_tokens=new, **options)
            assert found.shape == (2, count + new)
    assert counters["stats"]["unique_graphs"] == graphs + 2
    expected = patched("fp8_e4m3").generate(prompts, max_new_tokens=3, **options)
    assert torch.equal(found, expected)
    assert CONFIG.window_size < 130 + 205
