"""sparse_attention and indexer_scores through Inductor's C++ backend, against fp64."""

import math

import pytest
import torch
from nasty import HEAD_DIM, nasty_reads, pool_bytes
from torch._inductor.utils import run_and_get_code

from fp8kv_inductor import Pool, get_format, indexer_scores, reference, sparse_attention, store
from fp8kv_inductor.chains import MODEL, read
from fp8kv_inductor.lowerings.cross_compile import pool_copies

TOKENS, HEADS, COLUMNS = 6, 4, 192
N_WINDOW = MODEL.window_size


def exact(q, window, cmp, indices, counts, sink, n_window=N_WINDOW, dtype=torch.float64):
    pools = window.data, window.scale, cmp.data, cmp.scale
    return reference.sparse_attention(
        q, *pools, indices, counts, sink, n_window, HEAD_DIM**-0.5, window.format.name, dtype=dtype
    )


def check_against_fp64(got, q, *args):
    """At most twice the error that plain PyTorch makes in the dtype of the queries."""
    want, want_lse = exact(q, *args)
    low, low_lse = exact(q, *args, dtype=torch.float32)
    out, lse = got
    assert not out.isnan().any()
    assert torch.equal(lse == -math.inf, want_lse == -math.inf)
    rounding = torch.finfo(q.dtype).eps * want.abs().max()
    error = (low.double() - want).abs().max()
    assert (out.double() - want).abs().max() <= 2 * (error + rounding)
    live = want_lse > -math.inf
    error = (low_lse.double() - want_lse)[live].abs().max()
    unit = torch.finfo(torch.float32).eps * want_lse[live].abs().max()
    assert (lse.double() - want_lse)[live].abs().max() <= 2 * (error + unit)


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp8_e4m3_amax", "fp8_e4m3_ue8m0", "bf16"])
def test_equals_fp64_on_the_stored_bytes(fmt):
    args = nasty_reads(TOKENS, HEADS, COLUMNS, fmt)
    got, (code,) = run_and_get_code(torch.compile(read, fullgraph=True), *args)
    check_against_fp64(got, *args)
    assert "fp8kv.sparse_attention" not in code, "lowered, not called"
    assert not pool_copies(code, args[1].data, args[2].data)


def test_dead_columns_cannot_change_a_bit():
    q, window, cmp, indices, counts, sink = nasty_reads(TOKENS, HEADS, COLUMNS, "fp8_e4m3")
    compiled = torch.compile(read, fullgraph=True)
    clean = compiled(q, window, cmp, indices, counts, sink)
    columns = torch.arange(COLUMNS)
    used = (indices >= 0) & (columns - N_WINDOW < counts[:, None])
    for pool, part in ((window, columns < N_WINDOW), (cmp, columns >= N_WINDOW)):
        dead = torch.ones(pool.n_slots, dtype=torch.bool)
        dead[indices[used & part]] = False
        assert dead.any()
        pool.data[dead] = 0x7F
        pool.scale[dead] = math.nan
    poisoned = compiled(q, window, cmp, indices, counts, sink)
    assert all(map(torch.equal, clean, poisoned))


@pytest.mark.parametrize("n_window", [0, COLUMNS])
def test_columns_of_one_pool_only(n_window):
    q, window, cmp, indices, _, sink = nasty_reads(TOKENS, HEADS, COLUMNS, "fp8_e4m3")

    def one(q, window, cmp, indices, sink):
        return sparse_attention(q, window, cmp, indices, None, sink, n_window, HEAD_DIM**-0.5)

    got = torch.compile(one, fullgraph=True)(q, window, cmp, indices, sink)
    check_against_fp64(got, q, window, cmp, indices, None, sink, n_window)


def test_store_then_read_sees_the_new_rows():
    def step(rows, slots, q, window, cmp, indices, counts, sink):
        store(rows, slots, window)
        return read(q, window, cmp, indices, counts, sink)

    q, window, cmp, indices, counts, sink = nasty_reads(TOKENS, HEADS, COLUMNS, "fp8_e4m3")
    rows, slots = torch.randn(TOKENS, HEAD_DIM).bfloat16(), torch.arange(TOKENS)
    indices[:, :TOKENS] = torch.arange(TOKENS)
    ours = Pool(window.data.clone(), window.scale.clone(), window.format)
    want = step(rows, slots, q, window, cmp, indices, counts, sink)
    compiled = torch.compile(step, fullgraph=True)
    got, (code,) = run_and_get_code(compiled, rows, slots, q, ours, cmp, indices, counts, sink)
    assert all(map(torch.equal, pool_bytes(window), pool_bytes(ours)))
    check_against_fp64(got, q, window, cmp, indices, counts, sink)
    assert torch.allclose(got[0].float(), want[0].float(), atol=2e-2)
    assert not pool_copies(code, window.data)


def test_indexer_scores_equal_fp64_and_dead_pages_are_not_read():
    tokens, heads, width, page_size, pages = 6, 8, 64, 32, 5
    pool = Pool.empty(20 * page_size, width, get_format("bf16"))
    store(torch.randn(pool.n_slots, width), torch.arange(pool.n_slots), pool)
    page_rows = torch.stack([torch.randperm(16)[:pages] for _ in range(3)]) * page_size
    request = torch.tensor([0, 1, 2, 0, 1, 2])
    counts = torch.tensor([0, 1, 31, 32, 33, 1000])
    # The last page of requests 0 and 1 does not exist: an address far outside the pool.
    page_rows[:2, 4] = 1 << 40
    q = torch.randn(tokens, heads, width).bfloat16()
    weights = torch.randn(tokens, heads)
    args = (q, weights, pool.data, page_rows, request, counts, page_size)
    want = reference.indexer_scores(*args, dtype=torch.float64)
    low = reference.indexer_scores(*args, dtype=torch.float32)

    def scores(q, weights, idx, page_rows, request, counts):
        return indexer_scores(q, weights, idx, page_rows, request, counts, page_size)

    compiled = torch.compile(scores, fullgraph=True)
    got, (code,) = run_and_get_code(compiled, q, weights, pool, page_rows, request, counts)
    assert "fp8kv.indexer_scores" not in code, "lowered, not called"
    live = want > -math.inf
    assert torch.equal(live, got > -math.inf)
    error = (low.double() - want)[live].abs().max()
    assert (got.double() - want)[live].abs().max() <= 2 * error
