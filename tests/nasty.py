"""Inputs with everything that can go wrong, and chains that are defined to the bit."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fp8kv_inductor import Pool, act_quant, rope, store
from fp8kv_inductor.chains import MODEL

HEAD_DIM = MODEL.head_dim
BF16_SPECIALS = (math.nan, math.inf, -math.inf, 3.38e38, -3.38e38, 0.0, -0.0, 1e-40, -1e-40)


def row_ops(x, cos, sin, slots, pool):
    """The operators alone: everything in it is defined to the bit."""
    row = act_quant(rope(x, cos, sin), MODEL.nope_head_dim)
    store(row, slots, pool)
    return row


def nasty_rows(tokens: int, width: int = HEAD_DIM) -> Tensor:
    """bf16 rows over the whole range of scales, with zero, infinite and NaN elements and blocks."""
    exponents = torch.randint(-40, 30, (tokens, width // 32)).repeat_interleave(32, 1)
    rows = (torch.randn(tokens, width) * torch.exp2(exponents.float())).bfloat16()
    for i, special in enumerate(BF16_SPECIALS):
        rows[i % tokens, 7 * i] = special
        rows[(i + 1) % tokens, 64 + 32 * i : 96 + 32 * i] = special
    return rows


def nasty_reads(tokens: int, heads: int, columns: int, fmt: str, n_slots: int = 307):
    """Queries over two filled pools; some columns, one row and one pair of sinks are extreme."""
    pools = []
    for n in (n_slots, n_slots + 7):
        pool = Pool.empty(n, HEAD_DIM, fmt)
        store(torch.randn(n, HEAD_DIM), torch.arange(n), pool)
        pools.append(pool)
    indices = torch.randint(0, n_slots, (tokens, columns), dtype=torch.int32)
    indices[0, :40] = -1
    indices[1] = -1
    indices[2, ::3] = -1
    counts = torch.full((tokens,), 33, dtype=torch.int32)
    counts[:4] = torch.tensor([0, 5, 64, 1000])
    sink = torch.randn(heads)
    sink[:2] = torch.tensor([-math.inf, math.inf])
    return torch.randn(tokens, heads, HEAD_DIM).bfloat16(), *pools, indices, counts, sink


def pool_bytes(pool: Pool) -> tuple[Tensor, Tensor]:
    """Data and scales as uint8, to compare for equality.

    Rows without codes keep NaN, but which NaN is up to the hardware's casts.
    """
    data = pool.data
    if not pool.format.quantized:
        data = data.nan_to_num(nan=1.0, posinf=math.inf, neginf=-math.inf)
    return data.view(torch.uint8), pool.scale.view(torch.uint8)


def same(left: Tensor, right: Tensor) -> bool:
    """Equal bits, signs of zero included, but any NaN equals any other."""
    return torch.equal(left.nan_to_num(nan=9.0), right.nan_to_num(nan=9.0)) and torch.equal(
        left.signbit() & ~left.isnan(), right.signbit() & ~right.isnan()
    )
