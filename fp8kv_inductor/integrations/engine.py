"""The calls through which an inference engine uses its attention kernels, over our operators.

Engines such as FreeToken and SGLang keep buffers, page tables, schedulers and graph capture to
themselves and call an attention backend with *global slots*, rows of a layer's buffers. They keep
all that, wrap each buffer once as a ``Pool`` (nothing is copied, strided views included), and
replace their kernels by these functions::

    row_format = CacheConfig.resolve(model, "fp8_e4m3").kv_format
    window = Pool(window_codes[layer], window_scales[layer], row_format)    # engine's own buffers
    cmp = Pool(cmp_codes[layer], cmp_scales[layer], row_format)

    store_window(window, rows, full_to_window[out_loc])                     # [b, m, d], [b, m]
    scatter_compressed(cmp, closed_rows, closed_slots)                      # slot -1: still open
    out, lse = attend(q, window, cmp, window_slots, cmp_slots, counts, sink, scale)

Each is one operator and some views: called eagerly it launches the hand-callable kernel, inside a
function under ``torch.compile`` it fuses with the engine's own norm, rope and projections. All of
them may be captured in a CUDA graph; slots, counts and rows live at the addresses that the engine
captured. ``examples/engine_backend.py`` is a small engine with them, from end to end.

Shapes: b requests, m tokens of each (1 in decode, more with speculation or in chunks), h heads, d
head_dim, W window columns, K compressed columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8kv_inductor import ops
from fp8kv_inductor.budget import PoolPlan
from fp8kv_inductor.config import CacheConfig
from fp8kv_inductor.pools import Pool


def store_window(pool: Pool, rows: Tensor, slots: Tensor) -> None:
    """Write the KV rows of new tokens, normalised and rotated, into the window pool.

    Args:
        pool: window pool of the layer.
        rows: `[b, m, d]` or `[T, d]`, bf16, fp16 or fp32.
        slots: `[b, m]` or `[T]`, int32 or int64; -1 skips a row, other slots are distinct.

    Raises:
        ValueError: shapes that do not belong together.
        IndexError: a slot beyond the pool (CPU and eager mode).
    """
    _check(
        "slots",
        slots,
        tuple(rows.shape[:-1]),
        f"one slot for each row of rows {tuple(rows.shape)}",
    )
    ops.store(rows.reshape(-1, rows.shape[-1]), slots.reshape(-1), pool)


def scatter_compressed(pool: Pool, rows: Tensor, slots: Tensor) -> None:
    """Write compressed rows of the groups that closed in this step into the compressed pool.

    A captured step hands over a row for every group that may close; slot -1 skips those that did
    not. Arguments and errors as those of :func:`store_window`; index keys go the same way, into
    their bf16 pool.
    """
    store_window(pool, rows, slots)


def attend(
    q: Tensor,
    window: Pool,
    cmp: Pool | None,
    window_slots: Tensor,
    cmp_slots: Tensor | None,
    counts: Tensor | None,
    sink: Tensor,
    softmax_scale: float,
    angles: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of every query over the pool rows in its own list, K and V being the same row.

    Args:
        q: `[b, m, h, d]`, bf16, fp16 or fp32.
        window: window pool.
        cmp: compressed pool of the same format, None for layers without.
        window_slots: `[b, m, W]` int32 or int64, -1 for none.
        cmp_slots: `[b, m, K]` of the same dtype, -1 for none; None without ``cmp``.
        counts: `[b, m]` live compressed columns of each query, in device memory: a captured step
            has the static width K and does the work of the counts. None for all of them.
        sink: `[h]` fp32, natural log; -inf for none.
        softmax_scale: factor of the dot products.
        angles: cos and sin `[b, m, r / 2]` fp32 that the output's last r features are rotated back
            by; None leaves them.

    Returns:
        out `[b, m, h, d]` like ``q``, and lse `[b, m, h]` fp32, natural log, without the sink: what
        an engine needs to merge parts of a context that other ranks attended to.

    Raises:
        ValueError: shapes or formats that do not belong together.
    """
    if q.dim() != 4:
        raise ValueError(f"found q {tuple(q.shape)}; needed: [b, m, h, d]")
    tokens = tuple(q.shape[:2])
    if (cmp is None) != (cmp_slots is None):
        raise ValueError(
            "found one of cmp and cmp_slots; needed: both, or neither for a layer without "
            "compressed rows"
        )
    for name, tensor, dims in (
        ("window_slots", window_slots, 3),
        ("cmp_slots", cmp_slots, 3),
        ("counts", counts, 2),
        *((name, angle, 3) for name, angle in zip(("cos", "sin"), angles or (), strict=False)),
    ):
        if tensor is not None:
            needed = f"{list(tokens)} of q {tuple(q.shape)} first" + ", a width last" * (dims - 2)
            _check(name, tensor, tokens, needed, dims)
    slots = window_slots if cmp_slots is None else torch.cat([window_slots, cmp_slots], -1)
    out, lse = ops.sparse_attention(
        q.flatten(0, 1),
        window,
        window if cmp is None else cmp,
        slots.flatten(0, 1),
        None if counts is None else counts.flatten(),
        sink,
        window_slots.shape[-1],
        softmax_scale,
        None if angles is None else (angles[0].flatten(0, 1), angles[1].flatten(0, 1)),
    )
    return out.unflatten(0, tokens), lse.unflatten(0, tokens)


def kv_cost(cache: CacheConfig, pages: int = 1, window_pages: int = 0) -> int:
    """Bytes of all layers' pools for so many pages, for the engine's own memory planner.

    The bytes are linear in both numbers and are those that ``KVPools`` allocates: the planner's
    cost of one more full-history page is ``kv_cost(cache)``, that of one more window page
    ``kv_cost(cache, 0, 1)``.

    Args:
        cache: the resolved cache mode.
        pages: full-history pages of ``cache.page_size`` tokens: compressed rows and index keys.
        window_pages: window pages: window rows and compressor states.
    """
    return PoolPlan(cache, pages, window_pages).nbytes


def _check(
    name: str, tensor: Tensor, leading: tuple[int, ...], needed: str, dims: int | None = None
) -> None:
    if tensor.shape[: len(leading)] != leading or tensor.dim() != (dims or len(leading)):
        raise ValueError(f"found {name} {tuple(tensor.shape)}; needed: {needed}")
