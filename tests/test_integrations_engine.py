"""The engine's calls: contracts of shapes and dtypes, and the numbers of the operators' oracle."""

import pytest
import torch

from fp8kv_inductor.budget import PoolPlan
from fp8kv_inductor.config import CacheConfig
from fp8kv_inductor.formats import get_format
from fp8kv_inductor.integrations.engine import attend, kv_cost, scatter_compressed, store_window
from fp8kv_inductor.model_config import TINY
from fp8kv_inductor.numerics import decode_rows, encode_rows
from fp8kv_inductor.pools import KVPools, Pool

pytestmark = pytest.mark.usefixtures("one_thread")

B, M, H, D, W, K, R = 3, 2, 4, 128, 8, 12, 64
FORMATS = ("bf16", "fp8_e4m3")


def pools(fmt):
    """Window and compressed pool of an engine: layers of its own, larger buffers."""
    row_format = get_format(fmt)
    found = []
    for n_slots in (64, 96):
        rows = torch.randn(2, n_slots, D)
        data, scale = (part.contiguous() for part in encode_rows(rows, row_format))
        found.append(Pool(data[1], scale[1], row_format))
    return found


def slots(width, n_slots, dtype):
    chosen = torch.stack([torch.randperm(n_slots)[:width] for _ in range(B * M)])
    return chosen.masked_fill(torch.rand(chosen.shape) < 0.2, -1).view(B, M, width).to(dtype)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("call", [store_window, scatter_compressed])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_store(fmt, call, index_dtype, dtype):
    pool, _ = pools(fmt)
    rows = torch.randn(B, M, 2 * D, dtype=dtype)[..., D:]
    where = torch.tensor([[3, -1], [63, 0], [-1, 17]], dtype=index_dtype)
    data, scale = pool.data.clone(), pool.scale.clone()
    expected = encode_rows(rows[where >= 0], pool.format)
    data[where[where >= 0].long()], scale[where[where >= 0].long()] = expected
    call(pool, rows, where)
    assert torch.equal(pool.data, data)
    assert torch.equal(pool.scale, scale)
    call(pool, rows.flatten(0, 1), where.flatten())
    assert torch.equal(pool.data, data)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("compressed", [False, True])
def test_attend(fmt, index_dtype, rotated, compressed):
    window, cmp = pools(fmt)
    q, sink = torch.randn(B, M, H, D), torch.randn(H)
    window_slots, cmp_slots = slots(W, 64, index_dtype), slots(K, 96, index_dtype)
    counts = torch.randint(0, K + 1, (B, M), dtype=index_dtype)
    turns = torch.rand(B, M, R // 2) * 6
    angles = (turns.cos(), turns.sin()) if rotated else None
    if not compressed:
        cmp, cmp_slots, counts = None, None, None
    out, lse = attend(q, window, cmp, window_slots, cmp_slots, counts, sink, D**-0.5, angles)
    assert out.shape == (B, M, H, D) and out.dtype == q.dtype
    assert lse.shape == (B, M, H) and lse.dtype == torch.float32

    exact, low = (
        oracle(q, window, cmp, window_slots, cmp_slots, counts, sink, angles, dtype)
        for dtype in (torch.float64, torch.float32)
    )
    for found, right, rough in zip((out, lse), exact, low, strict=True):
        assert (found - right).abs().max() <= 2 * (rough - right).abs().max()


def oracle(q, window, cmp, window_slots, cmp_slots, counts, sink, angles, dtype):
    """Query by query, over the rows of its live columns."""
    outs, lses = [], []
    for i in range(B):
        for j in range(M):
            live = [(window, slot) for slot in window_slots[i, j].tolist()]
            if cmp is not None:
                live += [(cmp, slot) for slot in cmp_slots[i, j, : int(counts[i, j])].tolist()]
            rows = [
                decode_rows(pool.data[slot], pool.scale[slot], pool.format)
                for pool, slot in live
                if slot >= 0
            ]
            rows = torch.stack(rows).to(dtype)
            scores = q[i, j].to(dtype) @ rows.T * D**-0.5
            lse = scores.logsumexp(-1)
            total = torch.logaddexp(lse, sink.to(dtype))
            out = (scores - total.unsqueeze(-1)).exp() @ rows
            if angles is not None:
                turn = torch.complex(*(angle[i, j].to(dtype) for angle in angles)).conj()
                pairs = torch.view_as_complex(out[:, -R:].unflatten(-1, (-1, 2)).contiguous())
                out = torch.cat([out[:, :-R], torch.view_as_real(pairs * turn).flatten(-2)], -1)
            outs.append(out)
            lses.append(lse)
    return torch.stack(outs).view(B, M, H, D), torch.stack(lses).view(B, M, H)


def test_shapes_that_do_not_belong_together():
    window, cmp = pools("fp8_e4m3")
    bf16, _ = pools("bf16")
    q, sink = torch.randn(B, M, H, D), torch.zeros(H)
    window_slots, cmp_slots = slots(W, 64, torch.int64), slots(K, 96, torch.int64)
    counts = torch.zeros(B, M, dtype=torch.int64)
    right = (q, window, cmp, window_slots, cmp_slots, counts, sink, 1.0)
    attend(*right)
    angle = torch.zeros(B, R // 2)
    for place, wrong, message in (
        (0, q[0], r"found q \(2, 4, 128\); needed: \[b, m, h, d\]"),
        (2, None, "needed: both, or neither"),
        (2, bf16, "one read takes one format"),
        (3, window_slots[:2], r"found window_slots \(2, 2, 8\); needed: \[3, 2\] of q"),
        (3, window_slots[0], "found window_slots"),
        (4, cmp_slots[:, :1], "found cmp_slots"),
        (5, counts[0], "found counts"),
        (5, counts.float(), "counts has dtype torch.float32; needed"),
        (6, sink.double(), "sink has dtype"),
        (8, (angle, angle), "found cos"),
    ):
        arguments = [*right, None]
        arguments[place] = wrong
        with pytest.raises(ValueError, match=message):
            attend(*arguments)
    for rows, where in (
        (torch.randn(B, M, D), torch.zeros(B, dtype=torch.int64)),
        (torch.randn(B, D), torch.zeros(B, M, dtype=torch.int64)),
    ):
        with pytest.raises(ValueError, match=r"found slots .*one slot for each row"):
            store_window(window, rows, where)
    with pytest.raises(IndexError):
        store_window(window, torch.randn(1, D), torch.tensor([64]))


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_cost_is_what_the_pools_take(kv_cache_dtype):
    cache = CacheConfig.resolve(TINY, kv_cache_dtype, "cpu")
    assert kv_cost(cache, 7, 3) == KVPools(PoolPlan(cache, 7, 3)).nbytes()
    assert kv_cost(cache, 7, 3) == 7 * kv_cost(cache) + 3 * kv_cost(cache, 0, 1)
