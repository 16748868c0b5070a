"""sparse_attention and indexer_scores through Inductor's C++ backend, against fp64."""

import math

import pytest
import torch
from nasty import FAR_SLOTS, HEAD_DIM, far_pool, nasty_reads, pool_bytes, stores_and_reads
from torch._inductor.utils import run_and_get_code

from fp8kv_inductor import (
    Pool,
    get_format,
    indexer_scores,
    reference,
    register,
    sparse_attention,
    store,
)
from fp8kv_inductor.chains import MODEL, read
from fp8kv_inductor.demo import CPU_OPTIONS
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
    assert "sparse_attention.default(" not in code, "lowered, not called"
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


def test_stores_and_reads_stay_in_order():
    """Two layers, each twice, 200 calls: every bit is eager mode's."""
    ours, eager = (
        (
            torch.zeros(2, 8, HEAD_DIM, dtype=torch.uint8),
            torch.zeros(2, 8, HEAD_DIM // 32, dtype=torch.float16),
        )
        for _ in range(2)
    )
    register()
    # Work this small takes longer to divide among threads than to do.
    options = {**CPU_OPTIONS, "cpp.threads": 1}
    compiled = torch.compile(stores_and_reads, fullgraph=True, options=options)
    for call in range(200):
        row, slot = torch.randn(2, HEAD_DIM).bfloat16(), torch.randperm(8)[:2]
        want = stores_and_reads(row, slot, *eager)
        got = compiled(row, slot, *ours)
        assert all(map(torch.equal, want, got)), call
        assert all(map(torch.equal, eager, ours)), call


@pytest.mark.parametrize(("column", "tier"), [(7, "window"), (N_WINDOW + 2, "cmp")])
def test_an_index_beyond_the_pool_raises(column, tier):
    """In code of several threads, where a loop that raised would end the process."""
    q, window, cmp, indices, counts, sink = nasty_reads(64, HEADS, COLUMNS, "fp8_e4m3")
    indices[3, column] = n_slots = (window if tier == "window" else cmp).n_slots
    counts[3] = 1000
    step = torch.compile(read, fullgraph=True)
    with pytest.raises(IndexError, match=f"index {n_slots} is beyond the {tier} pool of {n_slots}"):
        step(q, window, cmp, indices, counts, sink)
    indices[3, column] = -1
    check_against_fp64(
        step(q, window, cmp, indices, counts, sink), q, window, cmp, indices, counts, sink
    )


def test_a_pool_without_rows():
    q, window, _, indices, counts, sink = nasty_reads(TOKENS, HEADS, COLUMNS, "fp8_e4m3")
    indices[:, N_WINDOW:] = -1
    cmp = Pool.empty(0, HEAD_DIM, "fp8_e4m3")
    got = torch.compile(read, fullgraph=True)(q, window, cmp, indices, counts, sink)
    check_against_fp64(got, q, window, window, indices, counts, sink)


@pytest.mark.parametrize(("tokens", "columns"), [(0, 9), (3, 0), (0, 0)])
def test_nothing_to_read(tokens, columns):
    q, window, cmp, indices, counts, sink = nasty_reads(4, HEADS, 192, "fp8_e4m3")

    def one(q, window, cmp, indices, counts, sink):
        return sparse_attention(q, window, cmp, indices, counts, sink, columns // 2, 0.1)

    args = q[:tokens], window, cmp, indices[:tokens, :columns], counts[:tokens], sink
    out, lse = torch.compile(one, fullgraph=True)(*args)
    assert torch.equal(out, torch.zeros(tokens, HEADS, HEAD_DIM).bfloat16())
    assert torch.equal(lse, torch.full((tokens, HEADS), -math.inf))


def test_rows_beyond_32_bit_addresses():
    """Through one graph, which a small pool came to first."""
    q, near, _, indices, counts, sink = nasty_reads(TOKENS, HEADS, 132, "fp8_e4m3", len(FAR_SLOTS))
    far, step = far_pool("fp8_e4m3"), torch.compile(read, fullgraph=True, dynamic=True)
    far.data[list(FAR_SLOTS)], far.scale[list(FAR_SLOTS)] = near.data, near.scale
    far_indices = torch.tensor([*FAR_SLOTS, -1], dtype=torch.int32)[indices]
    want = step(q, near, near, indices, counts, sink)
    check_against_fp64(want, q, near, near, indices, counts, sink)
    assert all(map(torch.equal, want, step(q, far, far, far_indices, counts, sink)))
    eager = read(q, near, near, indices, counts, sink)
    assert all(map(torch.equal, eager, read(q, far, far, far_indices, counts, sink)))


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
    assert "indexer_scores.default(" not in code, "lowered, not called"
    live = want > -math.inf
    assert torch.equal(live, got > -math.inf)
    error = (low.double() - want)[live].abs().max()
    assert (got.double() - want)[live].abs().max() <= 2 * error
    page_rows[2, 0] = pool.n_slots
    with pytest.raises(IndexError, match=f"page row {pool.n_slots} with 31 live keys lies outside"):
        compiled(q, weights, pool, page_rows, request, counts)
