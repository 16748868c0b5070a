"""CUDA graphs around store and read: what a capture fixes, and what may change at a replay."""

import copy
import math

import pytest
import torch
from nasty import HEAD_DIM, nasty_reads, nasty_rows, pool_bytes
from test_lowerings_gpu import check_read, compiled, on_cuda

from fp8kv_inductor import Pool, store
from fp8kv_inductor.chains import read

pytestmark = pytest.mark.gpu

TOKENS, HEADS, COLUMNS, N_SLOTS = 64, 64, 640, 4096


def step(rows, slots, q, window, cmp, indices, counts, sink):
    store(rows, slots, window)
    return read(q, window, cmp, indices, counts, sink)


def captured(fn, *args):
    """``fn(*args)`` as a CUDA graph, and its result."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            fn(*args)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = fn(*args)
    return graph, result


@pytest.fixture(params=["eager", "compiled"])
def replay(request):
    """A step captured with dummy rows: no slot, no column, no count."""
    fn = compiled(step) if request.param == "compiled" else step
    args = on_cuda(nasty_reads(TOKENS, HEADS, COLUMNS, "fp8_e4m3", N_SLOTS))
    _, window, _, indices, counts, _ = args
    rows = torch.zeros(TOKENS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    slots = torch.full((TOKENS,), -1, device="cuda")
    live_indices, before = indices.clone(), [part.clone() for part in pool_bytes(window)]
    indices.fill_(-1)
    counts.zero_()
    graph, result = captured(fn, rows, slots, *args)
    graph.replay()
    assert all(map(torch.equal, before, pool_bytes(window)))
    assert not result[0].any() and (result[1] == -math.inf).all()

    def run(live, count):
        want = copy.deepcopy(window).cpu()
        new_rows, new_slots = nasty_rows(TOKENS), torch.randperm(N_SLOTS)[:TOKENS]
        new_slots[live:] = -1
        store(new_rows, new_slots, want)
        rows.copy_(new_rows)
        slots.copy_(new_slots)
        indices.copy_(live_indices)
        # Rows that hold NaN are not to be read.
        stored = torch.isin(live_indices, slots) & (live_indices >= 0)
        indices.masked_fill_(stored, -1)
        indices[live:] = -1
        counts.fill_(count)
        counts[live:] = 0
        graph.replay()
        assert all(map(torch.equal, pool_bytes(want), pool_bytes(copy.deepcopy(window).cpu())))
        check_read(args, result)
        assert not result[0][live:].any() and (result[1][live:] == -math.inf).all()

    return run


@pytest.mark.parametrize("live", [1, 33, 64])
@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 512, 100_000])
def test_live_rows_and_counts_differ_from_the_capture(replay, live, count):
    replay(live, count)


def test_pools_as_marked_arguments_are_recorded():
    """Plain tensors as arguments, whose addresses the caller promises to keep."""

    def loose(rows, slots, data, scale):
        torch.ops.fp8kv.store(rows, slots, data, scale, "fp8_e4m3")
        return rows.float().sum()

    pool = Pool.empty(N_SLOTS, HEAD_DIM, "fp8_e4m3", "cuda")
    want = Pool.empty(N_SLOTS, HEAD_DIM, "fp8_e4m3")
    for part in (pool.data, pool.scale):
        torch._dynamo.mark_static_address(part)
    fn = compiled(loose, mode="reduce-overhead")
    torch._dynamo.utils.counters.clear()
    for first in range(0, 320, 64):
        rows, slots = nasty_rows(64), torch.arange(first, first + 64)
        store(rows, slots, want)
        fn(rows.cuda(), slots.cuda(), pool.data, pool.scale)
    assert not torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    assert all(map(torch.equal, pool_bytes(want), pool_bytes(pool.cpu())))


def test_the_next_replay_overwrites_an_output():
    """The rule of every CUDA graph: clone what has to outlive the next step."""
    fn = compiled(read, mode="reduce-overhead")
    args = on_cuda(nasty_reads(TOKENS, HEADS, COLUMNS, "fp8_e4m3"))
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        fn(*args)
    torch.compiler.cudagraph_mark_step_begin()
    out, lse = fn(*args)
    kept = out.clone(), lse.clone()
    torch.compiler.cudagraph_mark_step_begin()
    fn(args[0] * 2, *args[1:])
    check_read(args, kept)
    try:
        overwritten = not torch.equal(out, kept[0])
    except RuntimeError as error:
        # While graphs are still being recorded, torch says so.
        overwritten = "overwritten by a subsequent run" in str(error)
    assert overwritten


def test_first_call_inside_a_capture():
    """It works, or an error says that a call has to come first."""
    args = on_cuda(nasty_reads(TOKENS, HEADS, COLUMNS, "fp8_e4m3"))
    fn = compiled(read)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            result = fn(*args)
    except Exception as error:
        assert "captur" in str(error)
        return
    graph.replay()
    check_read(args, result)
