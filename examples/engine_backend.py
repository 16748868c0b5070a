"""A small engine that keeps its buffers, slots and schedule, and has no attention kernels.

    python examples/engine_backend.py

One ratio-128 layer of decode: window rows, one compressed row per 128 tokens, and a read of both.
"""

import torch
from torch import Tensor

from fp8kv_inductor import CacheConfig, Pool, numerics
from fp8kv_inductor.integrations.engine import attend, kv_cost, scatter_compressed, store_window
from fp8kv_inductor.model_config import TINY

BATCH, LAYERS, WINDOW, RATIO, BLOCKS = 2, 3, 128, 128, 4


class Engine:
    """What an engine has: buffers of all layers, and which slots belong to which request."""

    def __init__(self, kv_cache_dtype: str, layer: int) -> None:
        self.cache = CacheConfig.resolve(TINY, kv_cache_dtype, device="cpu")
        head_dim, row_format = TINY.head_dim, self.cache.kv_format

        def buffers(rows: int) -> Pool:
            data = torch.zeros(LAYERS, rows, head_dim, dtype=row_format.code_dtype)
            scales = row_format.scales_per_row(head_dim)
            scale = torch.zeros(LAYERS, rows, scales, dtype=row_format.scale_dtype)
            return Pool(data[layer], scale[layer], row_format)  # A view: nothing is copied.

        self.window, self.cmp = buffers(BATCH * WINDOW), buffers(BATCH * BLOCKS)
        self.window_first = torch.arange(BATCH)[:, None] * WINDOW
        self.cmp_slots = torch.arange(BATCH * BLOCKS).view(BATCH, 1, BLOCKS)

    def step(self, q: Tensor, row: Tensor, pooled: Tensor, position: int) -> Tensor:
        """One token of each request: `q` `[b, 1, h, d]`, `row` and `pooled` `[b, 1, d]`."""
        store_window(self.window, row, self.window_first + position % WINDOW)
        block = position // RATIO
        closes = (position + 1) % RATIO == 0
        closed = self.cmp_slots[..., block] if closes else torch.full((BATCH, 1), -1)
        scatter_compressed(self.cmp, pooled, closed)
        column = torch.arange(WINDOW)
        live = torch.where(column <= position, self.window_first + column, -1).unsqueeze(1)
        counts = torch.full((BATCH, 1), (position + 1) // RATIO)
        scale = TINY.softmax_scale
        sink = torch.zeros(TINY.n_heads)
        out, _ = attend(q, self.window, self.cmp, live, self.cmp_slots, counts, sink, scale)
        return out


def main() -> None:
    torch.manual_seed(0)
    steps, heads, head_dim = 140, TINY.n_heads, TINY.head_dim
    q = torch.randn(steps, BATCH, 1, heads, head_dim, dtype=torch.bfloat16)
    rows = torch.randn(steps, BATCH, 1, head_dim, dtype=torch.bfloat16)
    rows = numerics.act_quant(rows, head_dim)  # The model rounds rows itself.
    outs = {}
    for mode in ("auto", "fp8_e4m3"):
        engine = Engine(mode, layer=1)
        outs[mode] = [
            engine.step(q[t], rows[t], rows[max(0, t - RATIO + 1)], t) for t in range(steps)
        ]
        page = kv_cost(engine.cache) + kv_cost(engine.cache, 0, 1)
        print(f"{mode:>10}: {page} bytes for a page of {engine.cache.page_size} tokens")
    assert all(torch.equal(a, b) for a, b in zip(outs["auto"], outs["fp8_e4m3"], strict=True))
    print(f"{steps} steps of {BATCH} requests: fp8 rows give the bits that bf16 rows give")


if __name__ == "__main__":
    main()
