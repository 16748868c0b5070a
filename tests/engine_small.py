"""Models small enough to compile in a test, engines on them, and their dense oracle."""

from dataclasses import replace

import torch

from fp8kv_inductor.config import CacheConfig
from fp8kv_inductor.demo import CPU_OPTIONS
from fp8kv_inductor.engine import Engine
from fp8kv_inductor.formats import get_format
from fp8kv_inductor.model_config import TINY
from fp8kv_inductor.models.deepseek_v4 import DeepseekV4, load_weights, random_weights
from fp8kv_inductor.models.deepseek_v4.dense import DenseReference
from fp8kv_inductor.parallel import SINGLE

SMALL = replace(
    TINY,
    name="small",
    dim=64,
    compress_ratios=(0, 4, 128),
    q_lora_rank=32,
    o_lora_rank=32,
    index_topk=64,
    moe_inter_dim=64,
    vocab_size=64,
    original_seq_len=256,
)
ONE_LAYER = replace(SMALL, name="one-layer", compress_ratios=(0,))


def make_model(
    config=SMALL,
    kv_cache_dtype="auto",
    rounding=True,
    parallel=SINGLE,
    device="cpu",
    dtype=torch.float32,
):
    """With the same weights each time."""
    cache = CacheConfig.resolve(config, kv_cache_dtype, device)
    model = DeepseekV4(cache, dtype, rounding, parallel)
    load_weights(model, random_weights(config, 0, dtype))
    return model


def make_engine(
    kv_cache_dtype="auto",
    budget=16 << 20,
    config=SMALL,
    rounding=True,
    compile=False,
    max_batch=4,
    max_len=640,
    prefill_chunk=200,
    parallel=SINGLE,
    device="cpu",
    dtype=torch.float32,
    cuda_graph=None,
    batch_invariant=False,
):
    return Engine(
        make_model(config, kv_cache_dtype, rounding, parallel, device, dtype),
        budget,
        max_batch=max_batch,
        max_len=max_len,
        prefill_chunk=prefill_chunk,
        compile=compile,
        compile_options=CPU_OPTIONS if compile and device == "cpu" else None,
        cuda_graph=cuda_graph,
        batch_invariant=batch_invariant,
    )


def some_tokens(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(SMALL.vocab_size, (count,), generator=generator).tolist()


def oracle(tokens, kv_format, rounding=True):
    """Dense logits of SMALL in fp32, and twice their largest distance from fp64."""
    weights = random_weights(SMALL, 0, torch.float32)
    expected, exact = (
        DenseReference(
            SMALL, weights, dtype, rounding, get_format(kv_format), get_format("bf16")
        ).forward(torch.tensor(tokens))
        for dtype in (torch.float32, torch.float64)
    )
    return expected, 2 * (expected - exact).abs().max().item()


def assert_idle(engine):
    """Nothing runs, every page is free, and the tables are empty."""
    assert not engine.unfinished
    assert len(engine.pages.full) == engine.plan.num_pages
    assert len(engine.pages.window) == engine.plan.window_pages
    assert (engine.pages.page_table == -1).all()
    assert (engine.pages.window_table == -1).all()
