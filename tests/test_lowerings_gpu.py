"""Compiled graphs on a real GPU: bytes equal eager's and the CPU's, reads equal fp64."""

import copy
import math

import pytest
import torch
from nasty import (
    FAR_SLOTS,
    HEAD_DIM,
    REPORTED,
    check_reported_bytes,
    nasty_reads,
    nasty_rows,
    pool_bytes,
    row_ops,
    stores_and_reads,
    stores_into_layers,
)
from row_cases import margins_are_empty, pool_between_margins
from torch._inductor.utils import run_and_get_code

from fp8kv_inductor import Pool, indexer_scores, reference, sparse_attention, store
from fp8kv_inductor.chains import (
    angles,
    compressor_chain,
    compressor_inputs,
    q_chain,
    read,
    store_chain,
    store_inputs,
)
from fp8kv_inductor.lowerings.cross_compile import pool_copies, triton_kernels

pytestmark = pytest.mark.gpu

FORMATS = ["fp8_e4m3", "fp8_e4m3_amax", "fp8_e4m3_ue8m0", "bf16"]
N_SLOTS = 4096


def cuda(value):
    return value.cuda() if isinstance(value, torch.Tensor) else copy.deepcopy(value).cuda()


def on_cuda(args):
    return tuple(map(cuda, args))


def compiled(fn, **options):
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, **options)


def assert_same_rows(*pools):
    want, *others = ([part.cpu() for part in pool_bytes(pool)] for pool in pools)
    for other in others:
        assert all(map(torch.equal, want, other))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("tokens", [1, 64, 1000])
def test_operators_write_the_bytes_of_the_cpu(fmt, tokens):
    """Compiled, eager kernels and the definition agree on nasty rows, skipped slots included."""
    rows, (cos, sin) = nasty_rows(tokens), angles(tokens)
    slots = torch.randperm(N_SLOTS)[:tokens]
    slots[5::9] = -1
    pools = [Pool.empty(N_SLOTS, HEAD_DIM, fmt) for _ in range(3)]
    pools[1:] = map(cuda, pools[1:])
    want = row_ops(rows, cos, sin, slots, pools[0])
    args = on_cuda((rows, cos, sin, slots))
    eager = row_ops(*args, pools[1])
    ours, (code,) = run_and_get_code(compiled(row_ops), *args, pools[2])
    for result in (eager, ours):
        assert torch.equal(result.cpu().nan_to_num(nan=9.0), want.nan_to_num(nan=9.0))
    assert_same_rows(*pools)
    assert len(triton_kernels(code)) == 1
    assert not pool_copies(code, pools[2].data)


def test_every_bf16_value_and_every_tie():
    """All bf16 patterns as rows; e4m3 midpoints and their fp32 neighbours in blocks of scale 1."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    codes = torch.arange(127, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float()
    ties = (values[1:] + values[:-1]) / 2
    near = torch.stack([ties.nextafter(ties * 0), ties, ties.nextafter(ties * 2)], 1).flatten()
    near = torch.cat([near, -near])
    blocks = near[: near.numel() // 31 * 31].view(-1, 31)
    blocks = torch.cat([blocks, torch.full((blocks.shape[0], 1), 448.0)], 1)
    rows32 = blocks[: blocks.shape[0] // 16 * 16].view(-1, HEAD_DIM)
    for rows in (patterns.view(-1, HEAD_DIM), rows32):
        slots = torch.arange(rows.shape[0])
        for fmt in FORMATS[:3]:
            pools = [Pool.empty(rows.shape[0], HEAD_DIM, fmt) for _ in range(3)]
            pools[1:] = map(cuda, pools[1:])
            store(rows, slots, pools[0])
            store(rows.cuda(), slots.cuda(), pools[1])
            compiled(store)(rows.cuda(), slots.cuda(), pools[2])
            assert_same_rows(*pools)


@pytest.mark.parametrize("fault", REPORTED)
@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_that_others_got_wrong(fmt, fault):
    check_reported_bytes([fault], fmt, store, "cuda")
    check_reported_bytes([fault], fmt, compiled(store), "cuda")


@pytest.mark.slow
def test_ten_million_random_elements():
    rows = nasty_rows(20_000)
    (cos, sin), slots = angles(20_000), torch.randperm(20_000)
    for fmt in FORMATS:
        pools = [Pool.empty(20_000, HEAD_DIM, fmt) for _ in range(3)]
        pools[1:] = map(cuda, pools[1:])
        row_ops(rows, cos, sin, slots, pools[0])
        args = on_cuda((rows, cos, sin, slots))
        row_ops(*args, pools[1])
        compiled(row_ops)(*args, pools[2])
        assert_same_rows(*pools)


def test_one_kernel_behind_a_norm():
    code = []
    for fn, args in (
        (store_chain, store_inputs(64, "fp8_e4m3")),
        (q_chain, (torch.randn(64, 64, HEAD_DIM).bfloat16(), *angles(64))),
    ):
        _, codes = run_and_get_code(compiled(fn), *on_cuda(args))
        code += codes
    assert [len(triton_kernels(source)) for source in code] == [1, 1]


def test_compressor_chain_runs():
    args = on_cuda(compressor_inputs(64, "fp8_e4m3"))
    pool = args[-1]
    compiled(compressor_chain)(*args)
    assert pool.data.any()


def test_slots_far_beyond_32_bit_addresses():
    n_slots = (1 << 22) + 256
    rows = nasty_rows(4)
    slots = torch.tensor([0, (1 << 22) - 1, 1 << 22, n_slots - 1])
    small = Pool.empty(4, HEAD_DIM, "fp8_e4m3")
    store(rows, torch.arange(4), small)
    for dtype in (torch.int32, torch.int64):
        pool = Pool.empty(n_slots, HEAD_DIM, "fp8_e4m3", "cuda")
        compiled(store)(rows.cuda(), slots.to(dtype).cuda(), pool)
        assert torch.equal(pool.data[slots.cuda()].cpu(), small.data)
        assert torch.equal(pool.scale[slots.cuda()].cpu(), small.scale)
        assert int(pool.data.count_nonzero()) == int(small.data.count_nonzero())


def check_read(args, got):
    """The first rows: within twice plain PyTorch's error in bf16, against fp64 on the bytes."""
    q, window, cmp, indices, counts, sink = (copy.deepcopy(value).cpu() for value in args)
    rows = slice(24)
    q, indices, counts = q[rows], indices[rows], counts[rows]
    pools = window.data, window.scale, cmp.data, cmp.scale
    fmt = window.format.name

    def oracle(dtype):
        return reference.sparse_attention(
            q, *pools, indices, counts, sink, 128, HEAD_DIM**-0.5, fmt, dtype=dtype
        )

    want, want_lse = oracle(torch.float64)
    low, low_lse = oracle(torch.bfloat16)
    out, lse = (value[rows].cpu().double() for value in got)
    live = want_lse > -math.inf
    assert not out.isnan().any() and torch.equal(live, lse > -math.inf)
    assert (out - want).norm() <= 2 * (low.double() - want).norm()
    assert (lse - want_lse)[live].norm() <= 2 * (low_lse.double() - want_lse)[live].norm()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("tokens", [4, 150])
@pytest.mark.parametrize("heads", [20, 64])
def test_reads_equal_fp64(fmt, tokens, heads):
    args = nasty_reads(tokens, heads, 192, fmt)
    args = on_cuda(args)
    check_read(args, compiled(read)(*args))
    check_read(args, read(*args))


def test_token_counts_share_a_graph_for_few_and_one_for_many():
    """And the first call has a graph of its own, before Dynamo knows that the number changes."""
    step = compiled(read)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for tokens in (8, 5, 17, 64, 200):
        args = on_cuda(nasty_reads(tokens, 64, 640, "fp8_e4m3"))
        check_read(args, step(*args))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs <= 3


def test_max_autotune_gives_the_same_answer():
    args = on_cuda(nasty_reads(6, 64, 640, "fp8_e4m3"))
    check_read(args, compiled(read, mode="max-autotune-no-cudagraphs")(*args))


def test_window_pool_alone_and_dead_rows_full_of_nan():
    q, window, _, indices, _, sink = on_cuda(nasty_reads(150, 64, 128, "fp8_e4m3"))

    def window_only(q, window, indices, sink):
        return sparse_attention(q, window, window, indices, None, sink, 128, HEAD_DIM**-0.5)

    step = compiled(window_only)
    indices[:, ::2] = -1
    indices[indices == 0] = -1
    dead = torch.ones(window.n_slots, dtype=torch.bool, device="cuda")
    dead[indices[indices >= 0]] = False
    assert dead[0]
    clean = step(q, window, indices, sink)
    window.data[dead] = 0x7F
    window.scale[dead] = math.nan
    assert all(map(torch.equal, clean, step(q, window, indices, sink)))


def test_indexer_scores():
    def scores(q, weights, idx, page_rows, request, counts):
        return indexer_scores(q, weights, idx, page_rows, request, counts, 32)

    pool = Pool.empty(640, 128, "bf16")
    store(torch.randn(640, 128), torch.arange(640), pool)
    counts = torch.tensor([0, 1, 31, 32, 33, 1000])
    args = (
        torch.randn(6, 64, 128).bfloat16(),
        torch.randn(6, 64),
        pool,
        torch.randint(0, 20, (3, 5)) * 32,
        torch.tensor([0, 1, 2, 0, 1, 2]),
        counts,
    )
    q, weights, _, *rest = args
    want = reference.indexer_scores(q, weights, pool.data, *rest, 32, dtype=torch.float64)
    low = reference.indexer_scores(q, weights, pool.data, *rest, 32, dtype=torch.float32)
    live = want > -math.inf
    for fn in (compiled(scores), scores):
        got = fn(*on_cuda(args)).cpu()
        assert torch.equal(live, got > -math.inf)
        assert (got - want)[live].abs().max() <= 2 * (low.double() - want)[live].abs().max()


def test_reduce_overhead_records_the_store():
    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.pool = Pool.empty(N_SLOTS, HEAD_DIM, "fp8_e4m3", "cuda")

        def forward(self, rows, slots):
            store(rows, slots, self.pool)
            return rows.float().sum()

    module = Step()
    step = compiled(module, mode="reduce-overhead")
    torch._dynamo.utils.counters.clear()
    want = Pool.empty(N_SLOTS, HEAD_DIM, "fp8_e4m3")
    for first in range(0, 320, 64):
        rows, slots = nasty_rows(64), torch.arange(first, first + 64)
        store(rows, slots, want)
        step(rows.cuda(), slots.cuda())
    assert not torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    assert_same_rows(want, module.pool)


def peak_bytes(fn, *args):
    """Memory that a call takes on top of what is allocated, results included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = fn(*args)
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def test_43_layers_of_one_buffer_are_written_in_place():
    layers, n_slots = 43, 50_000
    args = nasty_rows(64), torch.randperm(n_slots)[:64]
    pools = [
        (
            torch.zeros(layers, n_slots, HEAD_DIM, dtype=torch.uint8, device="cuda"),
            torch.zeros(layers, n_slots, HEAD_DIM // 32, dtype=torch.float16, device="cuda"),
        )
        for _ in range(2)
    ]
    step = compiled(stores_into_layers)
    _, (code,) = run_and_get_code(step, *on_cuda(args), *pools[1])
    eager = peak_bytes(stores_into_layers, *on_cuda(args), *pools[0])
    ours = peak_bytes(step, *on_cuda(args), *pools[1])
    assert all(map(torch.equal, *pools))
    assert not pool_copies(code, pools[1][0], pools[1][0][0])
    held = sum(part.nbytes for part in pools[1])
    assert held + ours <= 1.05 * (held + eager)


def test_stores_and_reads_stay_in_order():
    """Four layers, each twice, 200 calls: every bit is the CPU's."""
    want = torch.zeros(4, 8, 512, dtype=torch.uint8), torch.zeros(4, 8, 16, dtype=torch.float16)
    eager, ours = (tuple(part.cuda() for part in want) for _ in range(2))
    step = compiled(stores_and_reads)
    for call in range(200):
        args = torch.randn(2, HEAD_DIM).bfloat16(), torch.randperm(8)[:2]
        rows = stores_and_reads(*args, *want)
        for fn, pools in ((stores_and_reads, eager), (step, ours)):
            got = fn(*on_cuda(args), *pools)
            assert all(
                torch.equal(left.cpu(), right) for left, right in zip(got, rows, strict=True)
            )
            assert all(map(torch.equal, (part.cpu() for part in pools), want)), call


def test_long_prompts_make_no_parts():
    """32,768 tokens through a graph that four came to first: out and lse, and nothing large."""
    step = compiled(read, dynamic=True)
    few = on_cuda(nasty_reads(4, 64, 640, "fp8_e4m3"))
    check_read(few, step(*few))
    q, window, cmp, indices, counts, sink = few
    tokens = 1 << 15
    repeats = tokens // 4
    many = (
        q.repeat(repeats, 1, 1),
        window,
        cmp,
        indices.repeat(repeats, 1),
        counts.repeat(repeats),
        sink,
    )
    check_read(many, step(*many))
    results = many[0].nbytes + tokens * 64 * 4
    assert peak_bytes(step, *many) <= 1.05 * results
    assert peak_bytes(read, *many) <= 1.05 * results


@pytest.mark.parametrize("tokens", [4, 150])
@pytest.mark.parametrize("heads", [1, 8, 16, 32, 128])
def test_heads_of_any_rank(heads, tokens):
    args = on_cuda(nasty_reads(tokens, heads, 192, "fp8_e4m3"))
    check_read(args, compiled(read)(*args))
    check_read(args, read(*args))


def test_fp32_is_not_rounded_to_tf32():
    """One large feature next to many small ones, whatever matrix products may do elsewhere."""
    q, window, cmp, indices, counts, sink = nasty_reads(4, 16, 192, "bf16")
    q = q.float() * 0.01
    q[..., 0] = 1e3
    for pool in (window, cmp):
        pool.data[:, 0] = 1e-3
    args = q, window, cmp, indices, counts, sink
    pools = window.data, window.scale, cmp.data, cmp.scale

    def oracle(dtype):
        rest = indices, counts, sink, 128, HEAD_DIM**-0.5, "bf16"
        return reference.sparse_attention(q, *pools, *rest, dtype=dtype)

    want, low = oracle(torch.float64)[0], oracle(torch.float32)[0]
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        for fn in (compiled(read), read):
            out = fn(*on_cuda(args))[0].cpu().double()
            assert (out - want).norm() <= 2 * (low.double() - want).norm()
    finally:
        torch.set_float32_matmul_precision(precision)


def test_reads_far_beyond_32_bit_addresses():
    """The last of 65,537 tokens of 64 heads, and rows on both sides of byte 2^31 of a pool."""
    tokens = 65_537
    q, near, _, indices, counts, sink = nasty_reads(4, 64, 132, "fp8_e4m3", len(FAR_SLOTS))
    far = Pool.empty(FAR_SLOTS[-1] + 1, HEAD_DIM, "fp8_e4m3", "cuda")
    far_slots = torch.tensor(FAR_SLOTS)
    far.data[far_slots.cuda()], far.scale[far_slots.cuda()] = near.data.cuda(), near.scale.cuda()
    far_indices = torch.tensor([*FAR_SLOTS, -1], dtype=torch.int32)[indices]
    many_q = torch.zeros(tokens, 64, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    many_q[-4:] = q.cuda()
    many_indices = torch.full((tokens, 132), -1, dtype=torch.int32, device="cuda")
    many_indices[-4:] = far_indices.cuda()
    many_counts = torch.zeros(tokens, dtype=torch.int32, device="cuda")
    many_counts[-4:] = counts.cuda()
    for fn in (compiled(read), read):
        out, lse = fn(many_q, far, far, many_indices, many_counts, sink.cuda())
        check_read((q, near, near, indices, counts, sink), (out[-4:], lse[-4:]))
        assert not out[:-4].any()


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_without_a_slot_write_nothing(fmt, slot_dtype):
    """Guard rows around the pool keep their bytes; eager mode refuses what compiled code skips."""
    slots = torch.tensor([-1, 3, -1, 5, N_SLOTS - 1, N_SLOTS, 2**31 - 1, -(2**31)]).to(slot_dtype)
    rows, live = nasty_rows(len(slots)), slots < N_SLOTS
    want = Pool.empty(N_SLOTS, HEAD_DIM, fmt)
    store(rows[live], slots[live], want)
    pool = pool_between_margins(N_SLOTS, HEAD_DIM, fmt, "cuda")
    compiled(store)(rows.cuda(), slots.cuda(), pool)
    assert margins_are_empty(pool)
    assert_same_rows(want, pool)
    with pytest.raises(IndexError, match="is beyond the pool of 4096 slots"):
        store(rows.cuda(), slots.cuda(), pool)
    slots = torch.tensor([3, 3, *range(6)])
    with pytest.raises(ValueError, match=r"slot 3 is that of rows \[0, 1, 5\]"):
        store(rows.cuda(), slots.to(slot_dtype).cuda(), pool)
    assert_same_rows(want, pool)
