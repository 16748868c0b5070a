"""Peak memory of prefill on a GPU: compiled against eager, and whatever was compiled first."""

from dataclasses import replace

import pytest
import torch
from engine_small import SMALL, make_engine, some_tokens

pytestmark = pytest.mark.gpu

CHUNK = 2048
WIDE = replace(SMALL, name="wide", n_heads=64, head_dim=512)
"""Outputs and split parts of the read are the largest tensors of a chunk."""


def engine_of(compile, max_len=2 * CHUNK):
    torch._dynamo.reset()
    return make_engine(
        "fp8_e4m3",
        budget=256 << 20,
        config=WIDE,
        device="cuda",
        dtype=torch.bfloat16,
        compile=compile,
        max_len=max_len,
        prefill_chunk=CHUNK,
    )


def peak(engine, tokens):
    """Bytes at most in use while a prompt is run, pools and weights included."""
    prompt = some_tokens(tokens)
    engine.generate([prompt], 1)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    engine.generate([prompt], 1)
    return torch.cuda.max_memory_allocated()


def test_compiled_prefill_needs_no_more_than_eager():
    results = {}
    for compile in (False, True):
        engine = engine_of(compile)
        others = torch.cuda.memory_allocated() - sum(
            tensor.nbytes for tensor in (*engine.model.parameters(), *engine.model.buffers())
        )
        results[compile] = peak(engine, CHUNK + 500) - others
        del engine
    assert results[True] <= 1.05 * results[False]


def test_a_short_first_prompt_makes_no_long_one_expensive():
    """Graphs compiled for few tokens split their columns; 2048 tokens in as many parts are GiB."""
    engine = engine_of(compile=True)
    engine.generate([some_tokens(3)], 1)
    late = peak(engine, CHUNK)
    del engine
    engine = engine_of(compile=True)
    engine.generate([some_tokens(CHUNK)], 1)
    assert late <= 1.05 * peak(engine, CHUNK)
