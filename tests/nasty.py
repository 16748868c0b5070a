"""Inputs with everything that can go wrong, and chains that are defined to the bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fp8kv_inductor import FORMATS, Pool, act_quant, reference, rope, store
from fp8kv_inductor.chains import MODEL
from fp8kv_inductor.formats import E4M3_MAX

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


def _blocks(values: Tensor, amax: float) -> Tensor:
    """fp32 rows that hold ``values`` 31 to a block, whose largest magnitude is ``amax``."""
    missing = -values.numel() % (31 * HEAD_DIM // 32)
    values = torch.cat([values.flatten(), values.new_zeros(missing)]).view(-1, 31)
    return torch.cat([values, torch.full((values.shape[0], 1), amax)], 1).view(-1, HEAD_DIM)


def _ties() -> Tensor:
    """The midpoints of e4m3 and their fp32 neighbours, both signs, in blocks of scale 1."""
    codes = reference.E4M3_VALUES[: reference.E4M3_NAN].float()
    ties = (codes[1:] + codes[:-1]) / 2
    reported = torch.tensor([400.199585, 272.156555, 136.002075, 1.0625001])
    near = torch.cat([ties.nextafter(ties * 0), ties, ties.nextafter(ties * 2), reported])
    return _blocks(torch.cat([near, -near]), E4M3_MAX)


def _quotients_on_ties() -> Tensor:
    """x / scale on a midpoint, for scales of the amax rule that are no powers of two."""
    codes = reference.E4M3_VALUES[: reference.E4M3_NAN].float()
    ties = (codes[1:] + codes[:-1]) / 2
    scales = [1.0, 0.75, 1.2998046875, 0.0333251953125]
    return torch.cat([_blocks(ties * scale, E4M3_MAX * scale) for scale in scales])


def _magnitudes(*sizes: float) -> Tensor:
    """A row per size: its blocks alternate between that size alone and random smaller values."""
    rows = (torch.rand(len(sizes), HEAD_DIM) * 2 - 1).unflatten(1, (-1, 32))
    rows[:, ::2] = torch.tensor([1.0, -1.0]).repeat(16)
    rows[..., 0] = 1.0
    return rows.flatten(1) * torch.tensor(sizes).unsqueeze(1)


def _one_value_in_a_block(*values: float) -> Tensor:
    """A row per value, which stands alone in the second block, and twice in the last."""
    rows = torch.randn(len(values), HEAD_DIM)
    for row, value in zip(rows, values, strict=True):
        row[40] = row[-1] = row[-7] = value
    return rows


def _zeros() -> Tensor:
    """A row of zeros, one of negative zeros, one with a single block of zeros."""
    rows = torch.randn(3, HEAD_DIM)
    rows[0], rows[1], rows[2, 96:128] = 0.0, -0.0, 0.0
    return rows


def reported_rows() -> dict[int, Tensor]:
    """fp32 rows `[T, D]` that other software got wrong, by the number of tests/README.md's table.

    All but those of 8 are finite.
    """
    return {
        1: _ties(),
        2: _quotients_on_ties(),
        3: torch.randn(8, HEAD_DIM).bfloat16().float(),
        4: _one_value_in_a_block(449.0, 463.9, 464.0, 480.0, 1e4, torch.finfo(torch.bfloat16).max),
        5: _zeros(),
        6: _magnitudes(2.9e7, 2.94e7, 1e30),
        7: _magnitudes(1e-30, 1e-6, 1.33e-5, 2.7e-5, 4e-5, 1e-4, 0.0273, 0.0274),
        8: _one_value_in_a_block(math.nan, math.inf, -math.inf),
    }


REPORTED = tuple(reported_rows())


def check_reported_bytes(
    faults: Iterable[int], fmt: str, write: Callable[..., Any], device: str = "cpu"
) -> None:
    """``write(rows, slots, pool)`` gives the bytes of the oracle; only NaN becomes NaN."""
    rows = torch.cat([reported_rows()[fault] for fault in faults])
    slots = torch.arange(rows.shape[0])
    want = Pool.empty(rows.shape[0], HEAD_DIM, fmt)
    pool = Pool.empty(rows.shape[0], HEAD_DIM, fmt, device)
    reference.store(rows, slots, want.data, want.scale, fmt)
    write(rows.to(device), slots.to(device), pool)
    pool = pool.cpu()
    assert all(map(torch.equal, pool_bytes(pool), pool_bytes(want)))
    if pool.format.quantized:
        assert torch.equal(pool.data & 0x7F == reference.E4M3_NAN, rows.isnan())
        assert not pool.scale.float().isnan().any() and not pool.scale.float().isinf().any()


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
    sink[:2] = torch.tensor([-math.inf, math.inf])[:heads]
    return torch.randn(tokens, heads, HEAD_DIM).bfloat16(), *pools, indices, counts, sink


def stores_into_layers(rows: Tensor, slots: Tensor, data: Tensor, scale: Tensor) -> None:
    """A store into each layer of `[L, N, D]` codes and their scales."""
    for layer in range(data.shape[0]):
        torch.ops.fp8kv.store(rows * (layer + 1), slots, data[layer], scale[layer], "fp8_e4m3")


def stores_and_reads(row, slot, data, scale):
    """Through each layer of pools twice: store a row, read what the slot holds, go on with that.

    One live column without a sink has weight 1, so that whatever computes a read gives the row.
    Rows are `[T, D]`, slots `[T]`; the results are those of all reads.
    """
    results, sink = [], row.new_full((1,), -math.inf, dtype=torch.float32)
    for again in range(2):
        for layer in range(data.shape[0]):
            pool = data[layer], scale[layer]
            torch.ops.fp8kv.store(row, slot, *pool, "fp8_e4m3")
            indices = slot.unsqueeze(1)
            row = torch.ops.fp8kv.sparse_attention(
                row.unsqueeze(1), *pool, *pool, indices, None, sink, 1 - again, 0.1, "fp8_e4m3"
            )[0].squeeze(1)
            row = row.flip(-1) * 0.5
            results.append(row)
    return results


FAR_SLOTS = (0, (1 << 22) - 1, 1 << 22, (1 << 22) + 255)
"""Slots on both sides of byte 2^31 of a pool, and its last one."""


def far_pool(fmt: str) -> Pool:
    """A pool of 2.1 GB of codes in the CPU's memory, which takes only the pages that are used."""
    row_format, n_slots = FORMATS[fmt], FAR_SLOTS[-1] + 1
    shapes = (n_slots, HEAD_DIM), (n_slots, row_format.scales_per_row(HEAD_DIM))
    dtypes = row_format.code_dtype, row_format.scale_dtype
    # Of all ways to zeros only this one asks the system for pages that are zero already.
    parts = [
        torch.from_numpy(np.zeros((n, width * dtype.itemsize), np.uint8)).view(dtype)
        for (n, width), dtype in zip(shapes, dtypes, strict=True)
    ]
    return Pool(*parts, row_format)


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
