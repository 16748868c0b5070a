"""Pieces of a DSV4 layer as users write them, with inputs, to show and to check generated code."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fp8kv_inductor.budget import PoolPlan
from fp8kv_inductor.config import PAGE_SIZE, CacheConfig
from fp8kv_inductor.model_config import OVERLAP_RATIO, V4_FLASH
from fp8kv_inductor.models.deepseek_v4.attention import Attention
from fp8kv_inductor.models.deepseek_v4.rotary import Rotary
from fp8kv_inductor.models.deepseek_v4.step import prepare
from fp8kv_inductor.ops import act_quant, rope, sparse_attention, store
from fp8kv_inductor.pools import LayerPools, Pool
from fp8kv_inductor.slots import StepBatch

MODEL = V4_FLASH
N_SLOTS = 5003
"""Slots of the pools; a prime, so that no other tensor has the size of a pool."""

Chain = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function of one graph and arguments on the CPU to trace it with."""


def rms_norm(x: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    """RMS norm `[..., D]` in fp32, rounded to bf16."""
    x = x.float()
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + MODEL.norm_eps)
    return (x * scale * weight).to(torch.bfloat16)


def store_chain(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, pool: Pool
) -> None:
    """norm -> rope -> act_quant -> store of kv rows `[T, D]`."""
    row = rope(rms_norm(x, weight), cos, sin)
    store(act_quant(row, MODEL.nope_head_dim), slots, pool)


def q_chain(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Norm of every head -> rope, `[T, H, D]`."""
    return rope(rms_norm(q), cos, sin)


def compressor_chain(
    kv: Tensor,
    score: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    pool: Pool,
) -> None:
    """Softmax pooling of `[G, L, D]` in plain code -> norm -> rope -> act_quant -> store."""
    store_chain((score.softmax(1) * kv).sum(1), weight, cos, sin, slots, pool)


def read(
    q: Tensor, window: Pool, cmp: Pool, indices: Tensor, counts: Tensor, sink: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention of `[T, H, D]` queries over window and compressed rows."""
    return sparse_attention(
        q, window, cmp, indices, counts, sink, MODEL.window_size, MODEL.softmax_scale
    )


def angles(tokens: int) -> tuple[Tensor, Tensor]:
    """Random cos and sin, `[T, R / 2]`."""
    theta = torch.rand(tokens, MODEL.rope_head_dim // 2) * 2 * math.pi
    return theta.cos(), theta.sin()


def store_inputs(tokens: int, fmt: str) -> tuple[Any, ...]:
    """Arguments of :func:`store_chain`."""
    pool = Pool.empty(N_SLOTS, MODEL.head_dim, fmt)
    rows = torch.randn(tokens, MODEL.head_dim).bfloat16()
    slots = torch.arange(tokens) % N_SLOTS
    return rows, torch.rand(MODEL.head_dim) + 0.5, *angles(tokens), slots, pool


def compressor_inputs(groups: int, fmt: str) -> tuple[Any, ...]:
    """Arguments of :func:`compressor_chain`: groups of the overlapping ratio."""
    ring = MODEL.state_ring(OVERLAP_RATIO)
    kv, score = torch.randn(2, groups, ring, MODEL.head_dim)
    return kv, score, *store_inputs(groups, fmt)[1:]


def read_inputs(tokens: int, fmt: str) -> tuple[Any, ...]:
    """Arguments of :func:`read`: a full window and all compressed rows of the indexer."""
    window, cmp = (Pool.empty(N_SLOTS, MODEL.head_dim, fmt) for _ in range(2))
    columns = MODEL.window_size + MODEL.index_topk
    indices = torch.randint(0, N_SLOTS, (tokens, columns), dtype=torch.int32)
    counts = torch.full((tokens,), MODEL.index_topk, dtype=torch.int32)
    q = torch.randn(tokens, MODEL.n_heads, MODEL.head_dim).bfloat16()
    return q, window, cmp, indices, counts, torch.zeros(MODEL.n_heads)


class DecodeLayer(nn.Module):
    """The attention part of a V4-Flash layer in a decode step, by default one with indexer."""

    def __init__(self, fmt: str, ratio: int = OVERLAP_RATIO) -> None:
        super().__init__()
        mode = "auto" if fmt == "bf16" else fmt
        cache = CacheConfig.resolve(MODEL, mode, "cpu")
        layer = MODEL.compress_ratios.index(ratio)
        # Primes, like N_SLOTS.
        plan = PoolPlan(cache, num_pages=7, window_pages=5)
        shapes = [shape for shape in plan.shapes if shape.layer == layer]
        self.pools = LayerPools(
            {s.tier: Pool.empty(s.n_slots, s.width, s.row_format) for s in shapes}
        )
        self.attention = Attention(MODEL, ratio, torch.bfloat16, rounding=True)
        self.rotary = Rotary(MODEL)

    def forward(self, x: Tensor, batch: StepBatch) -> Tensor:
        """`[T, dim]` to `[T, dim]`; what layers share is part of the graph."""
        return self.attention(x, prepare(batch, MODEL, self.rotary), self.pools)


def decode_inputs(tokens: int) -> tuple[Tensor, StepBatch]:
    """One token each of ``tokens`` requests."""
    pages = MODEL.index_topk * OVERLAP_RATIO // PAGE_SIZE
    table = torch.zeros(tokens, pages, dtype=torch.int64)
    each = torch.arange(tokens)
    nothing = torch.zeros(tokens, dtype=torch.int64)
    batch = StepBatch(
        tokens=nothing,
        positions=torch.full((tokens,), PAGE_SIZE),
        request=each,
        offset=nothing,
        remaining=nothing,
        page_table=table,
        window_table=table.clone(),
        closing={ratio: each for ratio in MODEL.ratios},
        last=each,
    )
    return torch.zeros(tokens, MODEL.dim, dtype=torch.bfloat16), batch


CHAINS: dict[str, Callable[[int, str], Chain]] = {
    "store-chain": lambda rows, fmt: (store_chain, store_inputs(rows, fmt)),
    "q-chain": lambda rows, fmt: (
        q_chain,
        (torch.randn(rows, MODEL.n_heads, MODEL.head_dim).bfloat16(), *angles(rows)),
    ),
    "compressor-chain": lambda rows, fmt: (compressor_chain, compressor_inputs(rows, fmt)),
    "read-decode": lambda rows, fmt: (read, read_inputs(rows, fmt)),
    "read-prefill": lambda rows, fmt: (read, read_inputs(max(rows, 1024), fmt)),
    "decode-layer": lambda rows, fmt: (DecodeLayer(fmt), decode_inputs(rows)),
}
"""Name -> function and inputs for a number of rows and a row format."""
