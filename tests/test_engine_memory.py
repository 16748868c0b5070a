"""Peak memory of prefill on a GPU: compiled against eager, and whatever was compiled first."""

import gc
from dataclasses import replace

import pytest
import torch
from engine_small import SMALL, make_engine, some_tokens

pytestmark = pytest.mark.gpu

CHUNK = 2048
WIDE = replace(SMALL, name="wide", n_heads=64, head_dim=512)
"""Queries, outputs and split parts of the read are the largest tensors of a chunk."""


def peak(compile, first):
    """Bytes at most in use while a long prompt is run after one of ``first`` tokens."""
    torch._dynamo.reset()
    gc.collect()
    before = torch.cuda.memory_allocated()
    engine = make_engine(
        "fp8_e4m3",
        budget=256 << 20,
        config=WIDE,
        device="cuda",
        dtype=torch.bfloat16,
        compile=compile,
        max_len=2 * CHUNK,
        prefill_chunk=CHUNK,
    )
    prompt = some_tokens(CHUNK + 500)
    for length in (first, len(prompt)):
        engine.generate([prompt[:length]], 1)
    torch.cuda.reset_peak_memory_stats()
    engine.generate([prompt], 1)
    return torch.cuda.max_memory_allocated() - before


def test_compiled_prefill_needs_no_more_than_eager():
    assert peak(compile=True, first=CHUNK) <= 1.05 * peak(compile=False, first=CHUNK)


def test_a_short_first_prompt_makes_no_long_one_expensive():
    """Graphs compiled for few tokens split their columns; 2048 tokens in as many parts are GiB."""
    assert peak(compile=True, first=3) <= 1.05 * peak(compile=True, first=CHUNK)
