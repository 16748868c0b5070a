"""torch.library.opcheck of every operator: schema, fakes, strides, dynamic sizes under AOT."""

import pytest
import torch
from torch.library import opcheck

import fp8kv_inductor
from fp8kv_inductor.formats import FORMATS

NAMES = [name for name in FORMATS if name != "fp32"]
TOKENS = [0, 1, 5]
D, H, N = 64, 3, 12

LAYOUTS = {"contiguous": lambda *shape: torch.randn(*shape)}
LAYOUTS["sliced"] = lambda *shape: torch.randn(*shape[:-1], shape[-1] + 8)[..., 8:]
LAYOUTS["transposed"] = lambda *shape: torch.randn(*shape[-2::-1], shape[-1]).transpose(0, -2)
"""Ways to make a `[..., D]` input whose rows are not what a fresh tensor's are."""


@pytest.fixture(params=list(LAYOUTS))
def make(request):
    return LAYOUTS[request.param]


def pool_tensors(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The middle `N` slots of a larger pool."""
    pool = fp8kv_inductor.Pool.empty(N + 8, D, name)
    rows = torch.randn(N + 8, D)
    fp8kv_inductor.store(rows, torch.arange(N + 8), pool)
    return pool.data[4:-4], pool.scale[4:-4]


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("heads", [(), (H,)])
def test_rope(make, tokens, heads):
    x = make(tokens, *heads, D).to(torch.bfloat16)
    angle = torch.rand(tokens, D // 4)
    opcheck(torch.ops.fp8kv.rope.default, (x, angle.cos(), angle.sin()))
    opcheck(torch.ops.fp8kv.rope.default, (x, angle.cos(), angle.sin(), True))


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("heads", [(), (H,)])
def test_act_quant(make, tokens, heads):
    opcheck(torch.ops.fp8kv.act_quant.default, (make(tokens, *heads, D), 32, 32))


def check_store(rows, name):
    slots = torch.randperm(N, dtype=torch.int32)[: len(rows)]
    slots[1::2] = -1
    opcheck(torch.ops.fp8kv.store.default, (rows, slots, *pool_tensors(name), name))


@pytest.mark.parametrize("tokens", TOKENS)
def test_store(make, tokens):
    check_store(make(tokens, D).to(torch.bfloat16), "fp8_e4m3")


@pytest.mark.parametrize("name", NAMES)
def test_store_formats(name):
    check_store(torch.randn(3, D), name)


@pytest.mark.parametrize("name", NAMES)
def test_write_rows(name):
    codes, scales = (part[:3].clone() for part in pool_tensors(name))
    slots = torch.tensor([2, -1, 5])
    opcheck(torch.ops.fp8kv.write_rows.default, (codes, scales, slots, *pool_tensors(name)))


@pytest.mark.parametrize("tokens", TOKENS)
def test_live_slots(make, tokens):
    indices = make(tokens, H, 16)[:, 1].clamp(-1, 1).int()
    for counts in (None, torch.randint(0, 6, (tokens,))):
        opcheck(torch.ops.fp8kv.live_slots.default, (indices, counts, 4, N, N))


@pytest.mark.parametrize("tokens", TOKENS)
def test_live_pages(tokens):
    page_rows = torch.tensor([[0, 4, 8], [8, 0, 0]])
    request, counts = torch.randint(0, 2, (tokens,)), torch.full((tokens,), 4)
    opcheck(torch.ops.fp8kv.live_pages.default, (page_rows, request, counts, 4, N))


def check_sparse_attention(q, name, counts):
    tokens = q.shape[0]
    indices = torch.randint(-1, N, (tokens, 9), dtype=torch.int32)
    arguments = (q, *pool_tensors(name), *pool_tensors(name), indices, counts, torch.randn(H))
    theta = torch.rand(tokens, 3)
    for angles in ((), (theta.cos(), theta.sin())):
        opcheck(torch.ops.fp8kv.sparse_attention.default, (*arguments, 4, D**-0.5, name, *angles))


@pytest.mark.parametrize("tokens", TOKENS)
def test_sparse_attention(make, tokens):
    q = make(tokens, H, D).to(torch.bfloat16)
    check_sparse_attention(q, "fp8_e4m3", torch.randint(0, 6, (tokens,)))


@pytest.mark.parametrize("name", NAMES)
def test_sparse_attention_formats(name):
    check_sparse_attention(torch.randn(2, H, D), name, None)


@pytest.mark.parametrize("tokens", TOKENS)
def test_indexer_scores(make, tokens):
    q = make(tokens, H, D).to(torch.bfloat16)
    weights = torch.rand(tokens, H)
    page_rows = torch.tensor([[0, 4, 8], [8, 0, 0]])
    request = torch.randint(0, 2, (tokens,))
    counts = torch.full((tokens,), 4)
    keys = torch.randn(N, D).to(torch.bfloat16)
    arguments = (q, weights, keys, page_rows, request, counts, 4)
    opcheck(torch.ops.fp8kv.indexer_scores.default, arguments)
