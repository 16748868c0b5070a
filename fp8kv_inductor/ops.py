"""The ``fp8kv::`` operators: schemas, checks, fakes, eager implementations, Python wrappers.

Eager CPU runs plain PyTorch over ``numerics``; eager CUDA launches the hand-callable kernels of
``kernels/``. Under ``torch.compile`` the lowerings replace both.

Shapes: T tokens, H heads, D head_dim, R rope features, B block, N slots, K columns,
HI / DI indexer heads / width, P pages of a request, NI index-key rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8kv_inductor import numerics
from fp8kv_inductor.config import check_device
from fp8kv_inductor.formats import RowFormat, get_format

if TYPE_CHECKING:
    from fp8kv_inductor.pools import Pool

NAMESPACE = "fp8kv"

SCHEMAS = {
    "rope": "(Tensor x, Tensor cos, Tensor sin, bool inverse=False) -> Tensor",
    "act_quant": "(Tensor x, int features, int block=64) -> Tensor",
    "store": ("(Tensor rows, Tensor slots, Tensor(a!) data, Tensor(b!) scale, str fmt) -> ()"),
    "write_rows": (
        "(Tensor codes, Tensor scales, Tensor slots, Tensor(a!) data, Tensor(b!) scale) -> ()"
    ),
    "sparse_attention": (
        "(Tensor q, Tensor window_data, Tensor window_scale, Tensor cmp_data, Tensor cmp_scale, "
        "Tensor indices, Tensor? cmp_counts, Tensor sink, int n_window, float softmax_scale, "
        "str fmt, Tensor? cos=None, Tensor? sin=None) -> (Tensor out, Tensor lse)"
    ),
    "indexer_scores": (
        "(Tensor q, Tensor weights, Tensor idx_data, Tensor page_rows, Tensor request, "
        "Tensor counts, int page_size) -> Tensor"
    ),
    "live_slots": (
        "(Tensor indices, Tensor? cmp_counts, int n_window, SymInt window_slots, "
        "SymInt cmp_slots) -> Tensor"
    ),
    "live_pages": (
        "(Tensor page_rows, Tensor request, Tensor counts, SymInt page_size, SymInt n_keys) "
        "-> Tensor"
    ),
    "sinkhorn": "(Tensor logits, int iterations, float eps) -> Tensor",
}

_library = torch.library.Library(NAMESPACE, "DEF")
for _name, _schema in SCHEMAS.items():
    _library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))

INDEX_DTYPES = (torch.int32, torch.int64)
ROW_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_dtype(name: str, tensor: Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    _check(
        tensor.dtype in allowed,
        f"{name} has dtype {tensor.dtype}; needed: {' or '.join(map(str, allowed))}",
    )


def _check_dim(name: str, tensor: Tensor, *ndims: int) -> None:
    _check(
        tensor.dim() in ndims,
        f"{name} has {tensor.dim()} dimensions {tuple(tensor.shape)}; "
        f"needed: {' or '.join(map(str, ndims))}",
    )


def _check_equal(what: str, left: Any, right: Any) -> None:
    """Sizes must agree. ``torch._check`` also gives dynamic sizes one symbol, so they fuse."""
    torch._check(left == right, lambda: f"{what}: {left} against {right}; they must be equal")


def _check_pool(tier: str, data: Tensor, scale: Tensor, head_dim: Any, fmt: RowFormat) -> None:
    _check_dim(f"{tier}data", data, 2)
    _check_dtype(f"{tier}data of format {fmt.name!r}", data, (fmt.code_dtype,))
    _check_equal(f"{tier}data width and head_dim", data.shape[1], head_dim)
    _check(
        data.stride(1) == 1,
        f"{tier}data rows have element stride {data.stride(1)}; needed: 1 (rows may be padded, "
        "their elements must be neighbours)",
    )
    if not fmt.quantized:
        return
    check_device(fmt, data.device, f"format {fmt.name!r}")
    _check_dim(f"{tier}scale", scale, 2)
    _check_dtype(f"{tier}scale of format {fmt.name!r}", scale, (fmt.scale_dtype,))
    _check_equal(f"{tier}data and {tier}scale slots", data.shape[0], scale.shape[0])
    _check_equal(
        f"{tier}scale width and head_dim / {fmt.block}",
        scale.shape[1],
        fmt.scales_per_row(int(head_dim)),
    )
    _check(scale.stride(1) == 1, f"{tier}scale rows have element stride {scale.stride(1)}, not 1")


def _check_rope(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    _check_dim("x", x, 2, 3)
    _check_dtype("x", x, ROW_DTYPES)
    for name, table in (("cos", cos), ("sin", sin)):
        _check_dim(name, table, 2)
        _check_dtype(name, table, (torch.float32,))
        _check_equal(f"tokens of x and {name}", x.shape[0], table.shape[0])
    _check_equal("widths of cos and sin", cos.shape[1], sin.shape[1])
    _check(
        2 * cos.shape[1] <= x.shape[-1],
        f"cos holds {cos.shape[1]} pairs, but rows of x have {x.shape[-1]} features; "
        "needed: at most half as many pairs",
    )


def _check_act_quant(x: Tensor, features: int, block: int) -> None:
    _check_dim("x", x, 2, 3)
    _check_dtype("x", x, ROW_DTYPES)
    _check(
        block > 0 and block & (block - 1) == 0,
        f"block is {block}; needed: a positive power of two",
    )
    _check(
        0 < features <= x.shape[-1] and features % block == 0,
        f"features is {features} of rows with {x.shape[-1]}; "
        f"needed: a positive multiple of block {block} that is not wider than the row",
    )


def _check_store(rows: Tensor, slots: Tensor, data: Tensor, scale: Tensor, fmt: str) -> RowFormat:
    row_format = get_format(fmt)
    _check_dim("rows", rows, 2)
    _check_dtype("rows", rows, ROW_DTYPES)
    _check_dim("slots", slots, 1)
    _check_dtype("slots", slots, INDEX_DTYPES)
    _check_equal("tokens of rows and slots", rows.shape[0], slots.shape[0])
    _check_pool("", data, scale, rows.shape[1], row_format)
    return row_format


def _check_sparse_attention(
    q: Tensor,
    window_data: Tensor,
    window_scale: Tensor,
    cmp_data: Tensor,
    cmp_scale: Tensor,
    indices: Tensor,
    cmp_counts: Tensor | None,
    sink: Tensor,
    n_window: int,
    fmt: str,
    cos: Tensor | None,
    sin: Tensor | None,
) -> RowFormat:
    row_format = get_format(fmt)
    _check_dim("q", q, 3)
    _check_dtype("q", q, ROW_DTYPES)
    _check_pool("window_", window_data, window_scale, q.shape[2], row_format)
    _check_pool("cmp_", cmp_data, cmp_scale, q.shape[2], row_format)
    _check_dim("indices", indices, 2)
    _check_dtype("indices", indices, INDEX_DTYPES)
    _check_equal("tokens of q and indices", q.shape[0], indices.shape[0])
    torch._check(
        n_window >= 0,
        lambda: f"n_window is {n_window}; needed: 0 or more",
    )
    torch._check(
        n_window <= indices.shape[1],
        lambda: f"n_window is {n_window} of {indices.shape[1]} columns; needed: not more than that",
    )
    if cmp_counts is not None:
        _check_dim("cmp_counts", cmp_counts, 1)
        _check_dtype("cmp_counts", cmp_counts, INDEX_DTYPES)
        _check_equal("tokens of q and cmp_counts", q.shape[0], cmp_counts.shape[0])
    _check_dim("sink", sink, 1)
    _check_dtype("sink", sink, (torch.float32,))
    _check_equal("heads of q and sink", q.shape[1], sink.shape[0])
    _check(
        (cos is None) == (sin is None),
        "one of cos and sin is missing; needed: both, to rotate the output back, or neither",
    )
    if cos is not None and sin is not None:
        _check_rope(q, cos, sin)
    return row_format


def _check_indexer_scores(
    q: Tensor,
    weights: Tensor,
    idx_data: Tensor,
    page_rows: Tensor,
    request: Tensor,
    counts: Tensor,
    page_size: int,
) -> None:
    _check_dim("q", q, 3)
    _check_dtype("q", q, ROW_DTYPES)
    _check_dim("weights", weights, 2)
    _check_dtype("weights", weights, (torch.float32,))
    _check_equal("tokens of q and weights", q.shape[0], weights.shape[0])
    _check_equal("heads of q and weights", q.shape[1], weights.shape[1])
    _check_pool("idx_", idx_data, idx_data, q.shape[2], get_format("bf16"))
    _check_dim("page_rows", page_rows, 2)
    for name, tensor in (("request", request), ("counts", counts)):
        _check_dim(name, tensor, 1)
        _check_equal(f"tokens of q and {name}", q.shape[0], tensor.shape[0])
    for name, tensor in (("page_rows", page_rows), ("request", request), ("counts", counts)):
        _check_dtype(name, tensor, INDEX_DTYPES)
    _check(page_size > 0, f"page_size is {page_size}; needed: 1 or more")


def _check_sinkhorn(logits: Tensor, iterations: int) -> None:
    _check_dim("logits", logits, 3)
    _check_dtype("logits", logits, (torch.float32,))
    _check_equal("rows and columns of logits", logits.shape[1], logits.shape[2])
    _check(iterations > 0, f"iterations is {iterations}; needed: 1 or more")


@torch.library.register_fake(f"{NAMESPACE}::rope", lib=_library)
def _rope_fake(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    _check_rope(x, cos, sin)
    return x.new_empty(x.shape)


@torch.library.register_fake(f"{NAMESPACE}::act_quant", lib=_library)
def _act_quant_fake(x: Tensor, features: int, block: int = 64) -> Tensor:
    _check_act_quant(x, features, block)
    return x.new_empty(x.shape)


@torch.library.register_fake(f"{NAMESPACE}::store", lib=_library)
def _store_fake(rows: Tensor, slots: Tensor, data: Tensor, scale: Tensor, fmt: str) -> None:
    _check_store(rows, slots, data, scale, fmt)


@torch.library.register_fake(f"{NAMESPACE}::write_rows", lib=_library)
def _write_rows_fake(
    codes: Tensor, scales: Tensor, slots: Tensor, data: Tensor, scale: Tensor
) -> None:
    _check_equal("tokens of codes and slots", codes.shape[0], slots.shape[0])
    _check_equal("widths of codes and data", codes.shape[1], data.shape[1])


@torch.library.register_fake(f"{NAMESPACE}::sparse_attention", lib=_library)
def _sparse_attention_fake(
    q: Tensor,
    window_data: Tensor,
    window_scale: Tensor,
    cmp_data: Tensor,
    cmp_scale: Tensor,
    indices: Tensor,
    cmp_counts: Tensor | None,
    sink: Tensor,
    n_window: int,
    softmax_scale: float,
    fmt: str,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    _check_sparse_attention(
        q,
        window_data,
        window_scale,
        cmp_data,
        cmp_scale,
        indices,
        cmp_counts,
        sink,
        n_window,
        fmt,
        cos,
        sin,
    )
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.register_fake(f"{NAMESPACE}::indexer_scores", lib=_library)
def _indexer_scores_fake(
    q: Tensor,
    weights: Tensor,
    idx_data: Tensor,
    page_rows: Tensor,
    request: Tensor,
    counts: Tensor,
    page_size: int,
) -> Tensor:
    _check_indexer_scores(q, weights, idx_data, page_rows, request, counts, page_size)
    return q.new_empty((q.shape[0], page_rows.shape[1] * page_size), dtype=torch.float32)


@torch.library.register_fake(f"{NAMESPACE}::live_slots", lib=_library)
def _live_slots_fake(
    indices: Tensor, cmp_counts: Tensor | None, n_window: int, window_slots: int, cmp_slots: int
) -> Tensor:
    return indices.new_empty(indices.shape, dtype=torch.int64)


@torch.library.register_fake(f"{NAMESPACE}::live_pages", lib=_library)
def _live_pages_fake(
    page_rows: Tensor, request: Tensor, counts: Tensor, page_size: int, n_keys: int
) -> Tensor:
    return page_rows.new_empty((request.shape[0], page_rows.shape[1]), dtype=torch.int64)


@torch.library.register_fake(f"{NAMESPACE}::sinkhorn", lib=_library)
def _sinkhorn_fake(logits: Tensor, iterations: int, eps: float) -> Tensor:
    _check_sinkhorn(logits, iterations)
    return logits.new_empty(logits.shape)


@torch.library.impl(_library, "rope", "CPU")
def _rope_cpu(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    _check_rope(x, cos, sin)
    if x.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return numerics.rope(x, cos, sin, inverse).contiguous()


@torch.library.impl(_library, "act_quant", "CPU")
def _act_quant_cpu(x: Tensor, features: int, block: int = 64) -> Tensor:
    _check_act_quant(x, features, block)
    return numerics.act_quant(x, features, block).contiguous()


def check_slots(slots: Tensor, n_slots: int) -> None:
    """Refuse slots `[T]` that a store cannot mean; negative ones are skipped rows.

    Raises:
        IndexError: a slot lies beyond the pool.
        ValueError: two rows have the same slot.
    """
    ordered = slots.sort().values
    beyond = ordered[-1:] >= n_slots
    twice = (ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)
    if not bool(torch.cat([beyond, twice]).any()):
        return
    if bool(beyond):
        raise IndexError(
            f"slot {int(slots[slots >= n_slots][0])} is beyond the pool of {n_slots} slots; "
            "needed: slots below that, or negative ones for rows to skip"
        )
    slot = int(ordered[1:][twice][0])
    raise ValueError(
        f"slot {slot} is that of rows {(slots == slot).nonzero()[:, 0].tolist()}; "
        "needed: a slot of its own for each row, or negative ones for rows to skip"
    )


@torch.library.impl(_library, "store", "CPU")
def _store_cpu(rows: Tensor, slots: Tensor, data: Tensor, scale: Tensor, fmt: str) -> None:
    row_format = _check_store(rows, slots, data, scale, fmt)
    _write_rows_cpu(*numerics.encode_rows(rows, row_format), slots, data, scale)


@torch.library.impl(_library, "write_rows", "CPU")
def _write_rows_cpu(
    codes: Tensor, scales: Tensor, slots: Tensor, data: Tensor, scale: Tensor
) -> None:
    """Rows that are encoded already go into their slots: the tail of a store on the CPU."""
    check_slots(slots, data.shape[0])
    live = slots >= 0
    live_slots = slots[live].to(torch.int64)
    data[live_slots] = codes[live]
    if scales.shape[1]:
        scale[live_slots] = scales[live]


@torch.library.impl(_library, "live_slots", "CPU")
def _live_slots_cpu(
    indices: Tensor, cmp_counts: Tensor | None, n_window: int, window_slots: int, cmp_slots: int
) -> Tensor:
    """Slots `[T, K]` (int64) of the columns of a read on the CPU, -1 for those that do not exist.

    A column exists if its index is >= 0 and, for compressed columns, below the count.

    Raises:
        IndexError: the slot of a column that exists lies beyond its pool.
    """
    live = indices >= 0
    if cmp_counts is not None:
        column = torch.arange(indices.shape[1], device=indices.device)
        live &= column - n_window < cmp_counts.clamp_min(0).unsqueeze(1)
    slots = indices.to(torch.int64).masked_fill(~live, -1)
    for tier, n_slots, part in (
        ("window", window_slots, slots[:, :n_window]),
        ("cmp", cmp_slots, slots[:, n_window:]),
    ):
        if part.numel() and int(part.max()) >= n_slots:
            raise IndexError(
                f"index {int(part.max())} is beyond the {tier} pool of {n_slots} slots; "
                "needed: indices below that, or negative ones for columns that do not exist"
            )
    return slots


@torch.library.impl(_library, "live_pages", "CPU")
def _live_pages_cpu(
    page_rows: Tensor, request: Tensor, counts: Tensor, page_size: int, n_keys: int
) -> Tensor:
    """First key rows `[T, P]` (int64) of each token's pages on the CPU, -1 for dead pages.

    Raises:
        IndexError: a token with live keys has a request without page rows, or a live key lies
            beyond the pool.
    """
    requests, pages = page_rows.shape
    first_key = torch.arange(pages, device=counts.device) * page_size
    live_keys = (counts.unsqueeze(1) - first_key).clamp(0, page_size)
    reads = counts > 0
    unknown = reads & ((request < 0) | (request >= requests))
    if bool(unknown.any()):
        raise IndexError(
            f"request {int(request[unknown][0])} has no row in page_rows, which has {requests}"
        )
    rows = page_rows.to(torch.int64)[request.masked_fill(~reads, 0)] if requests else live_keys
    bad = (live_keys > 0) & ((rows < 0) | (rows + live_keys > n_keys))
    if bool(bad.any()):
        raise IndexError(
            f"page row {int(rows[bad][0])} with {int(live_keys[bad][0])} live keys lies outside "
            f"the idx pool of {n_keys} rows"
        )
    return rows.masked_fill(live_keys == 0, -1)


CPU_READ_ELEMENTS = 1 << 24
"""Gathered KV elements that the eager CPU read holds at once (64 MiB in fp32)."""


@torch.library.impl(_library, "sparse_attention", "CPU")
def _sparse_attention_cpu(
    q: Tensor,
    window_data: Tensor,
    window_scale: Tensor,
    cmp_data: Tensor,
    cmp_scale: Tensor,
    indices: Tensor,
    cmp_counts: Tensor | None,
    sink: Tensor,
    n_window: int,
    softmax_scale: float,
    fmt: str,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    row_format = _check_sparse_attention(
        q,
        window_data,
        window_scale,
        cmp_data,
        cmp_scale,
        indices,
        cmp_counts,
        sink,
        n_window,
        fmt,
        cos,
        sin,
    )
    tokens, heads, head_dim = q.shape
    out = q.new_empty(q.shape)
    lse = q.new_empty((tokens, heads), dtype=torch.float32)
    slots = _live_slots_cpu(indices, cmp_counts, n_window, window_data.shape[0], cmp_data.shape[0])
    live = slots >= 0

    def gather(data: Tensor, scale: Tensor, part: Tensor) -> Tensor:
        if not data.shape[0]:
            return q.new_zeros((*part.shape, head_dim), dtype=torch.float32)
        part = part.clamp_min(0)
        if not row_format.quantized:
            return data[part].to(torch.float32)
        return numerics.decode_rows(data[part], scale[part], row_format)

    step = max(1, CPU_READ_ELEMENTS // max(1, indices.shape[1] * head_dim))
    for start in range(0, tokens, step):
        rows = slice(start, start + step)
        kv = torch.cat(
            [
                gather(data, scale, slots[rows, part])
                for data, scale, part in (
                    (window_data, window_scale, slice(None, n_window)),
                    (cmp_data, cmp_scale, slice(n_window, None)),
                )
                if indices[:, part].shape[1]
            ]
            or [q.new_empty((q[rows].shape[0], 0, head_dim), dtype=torch.float32)],
            1,
        )
        kv = kv.masked_fill(~live[rows].unsqueeze(-1), 0.0)
        scores = torch.einsum("thd,tkd->thk", q[rows].to(torch.float32), kv) * softmax_scale
        scores = scores.masked_fill(~live[rows].unsqueeze(1), -torch.inf)
        lse[rows] = torch.logsumexp(scores, -1)
        total = torch.logaddexp(lse[rows], sink)
        weights = torch.exp(scores - total.masked_fill(total == -torch.inf, 0.0).unsqueeze(-1))
        out[rows] = torch.einsum("thk,tkd->thd", weights, kv).to(q.dtype)
    if cos is not None and sin is not None:
        out = _rope_cpu(out, cos, sin, inverse=True)
    return out, lse


@torch.library.impl(_library, "indexer_scores", "CPU")
def _indexer_scores_cpu(
    q: Tensor,
    weights: Tensor,
    idx_data: Tensor,
    page_rows: Tensor,
    request: Tensor,
    counts: Tensor,
    page_size: int,
) -> Tensor:
    _check_indexer_scores(q, weights, idx_data, page_rows, request, counts, page_size)
    tokens, pages = q.shape[0], page_rows.shape[1]
    scores = q.new_full((tokens, pages * page_size), -torch.inf, dtype=torch.float32)
    first = _live_pages_cpu(page_rows, request, counts, page_size, idx_data.shape[0])
    for token in range(tokens):
        count = min(int(counts[token]), pages * page_size)
        if count <= 0:
            continue
        rows = first[token, :, None] + torch.arange(page_size, device=q.device)
        rows = rows.flatten()[:count]
        dots = torch.relu(q[token].to(torch.float32) @ idx_data[rows].to(torch.float32).T)
        scores[token, :count] = weights[token] @ dots
    return scores


@torch.library.impl(_library, "sinkhorn", "CPU")
def _sinkhorn_cpu(logits: Tensor, iterations: int, eps: float) -> Tensor:
    _check_sinkhorn(logits, iterations)
    comb = logits.contiguous().softmax(-1).add_(eps)
    comb.div_(comb.sum(-2, keepdim=True).add_(eps))
    for _ in range(iterations - 1):
        comb.div_(comb.sum(-1, keepdim=True).add_(eps))
        comb.div_(comb.sum(-2, keepdim=True).add_(eps))
    return comb


@torch.library.impl(_library, "rope", "CUDA")
def _rope_cuda(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    from fp8kv_inductor.kernels.rope import rope as kernel

    _check_rope(x, cos, sin)
    return kernel(x, cos, sin, inverse)


@torch.library.impl(_library, "act_quant", "CUDA")
def _act_quant_cuda(x: Tensor, features: int, block: int = 64) -> Tensor:
    from fp8kv_inductor.kernels.act_quant import act_quant as kernel

    _check_act_quant(x, features, block)
    return kernel(x, features, block)


@torch.library.impl(_library, "store", "CUDA")
def _store_cuda(rows: Tensor, slots: Tensor, data: Tensor, scale: Tensor, fmt: str) -> None:
    from fp8kv_inductor.kernels.store import store as kernel

    row_format = _check_store(rows, slots, data, scale, fmt)
    if not torch.cuda.is_current_stream_capturing():
        check_slots(slots, data.shape[0])
    kernel(rows, slots, data, scale, row_format)


@torch.library.impl(_library, "sparse_attention", "CUDA")
def _sparse_attention_cuda(
    q: Tensor,
    window_data: Tensor,
    window_scale: Tensor,
    cmp_data: Tensor,
    cmp_scale: Tensor,
    indices: Tensor,
    cmp_counts: Tensor | None,
    sink: Tensor,
    n_window: int,
    softmax_scale: float,
    fmt: str,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    from fp8kv_inductor.kernels.attention import sparse_attention as kernel

    row_format = _check_sparse_attention(
        q,
        window_data,
        window_scale,
        cmp_data,
        cmp_scale,
        indices,
        cmp_counts,
        sink,
        n_window,
        fmt,
        cos,
        sin,
    )
    return kernel(
        q,
        (window_data, window_scale),
        (cmp_data, cmp_scale),
        indices,
        cmp_counts,
        sink,
        n_window,
        softmax_scale,
        row_format,
        None if cos is None or sin is None else (cos, sin),
    )


@torch.library.impl(_library, "indexer_scores", "CUDA")
def _indexer_scores_cuda(
    q: Tensor,
    weights: Tensor,
    idx_data: Tensor,
    page_rows: Tensor,
    request: Tensor,
    counts: Tensor,
    page_size: int,
) -> Tensor:
    from fp8kv_inductor.kernels.indexer import indexer_scores as kernel

    _check_indexer_scores(q, weights, idx_data, page_rows, request, counts, page_size)
    return kernel(q, weights, idx_data, page_rows, request, counts, page_size)


@torch.library.impl(_library, "sinkhorn", "CUDA")
def _sinkhorn_cuda(logits: Tensor, iterations: int, eps: float) -> Tensor:
    from fp8kv_inductor.kernels.sinkhorn import sinkhorn as kernel

    _check_sinkhorn(logits, iterations)
    return kernel(logits, iterations, eps)


def rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last R features of each row, interleaved pairs, in fp32.

    (a, b) -> (a cos - b sin, a sin + b cos); ``inverse`` negates the angle.

    Args:
        x: `[T, D]` or `[T, H, D]`, bf16, fp16 or fp32.
        cos, sin: `[T, R / 2]` fp32.
        inverse: rotate back.

    Returns:
        like ``x``, contiguous, rounded once to its dtype.
    """
    return torch.ops.fp8kv.rope(x, cos, sin, inverse)


def act_quant(x: Tensor, features: int, block: int = 64) -> Tensor:
    """fp8 round trip of the first ``features`` of each row (:func:`numerics.act_quant`).

    Args:
        x: `[T, D]` or `[T, H, D]`, bf16, fp16 or fp32.
        features: leading features to round, a multiple of ``block``.
        block: elements per scale, a power of two.
    """
    return torch.ops.fp8kv.act_quant(x, features, block)


def store(rows: Tensor, slots: Tensor, pool: Pool) -> None:
    """Encode rows and write them into a pool, in place.

    Args:
        rows: `[T, D]`, bf16, fp16 or fp32.
        slots: `[T]` int32 or int64, distinct. A negative slot skips its row.
        pool: where to write.

    On the CPU and in eager mode, outside of captures, slots are checked. Compiled CUDA code skips
    a row whose slot lies beyond the pool, and may mix rows that have the same slot.

    Raises:
        IndexError: a slot lies beyond the pool.
        ValueError: two rows have the same slot.
    """
    torch.ops.fp8kv.store(rows, slots, pool.data, pool.scale, pool.format.name)


def sparse_attention(
    q: Tensor,
    window: Pool,
    cmp: Pool,
    indices: Tensor,
    cmp_counts: Tensor | None,
    sink: Tensor,
    n_window: int,
    softmax_scale: float,
    angles: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of every query over its own list of pool rows, K and V being the same row.

    A column exists if its index is >= 0 and, for compressed columns, below the count; bytes behind
    other columns cannot change the result. The sink adds exp(sink) to the denominator only. A row
    with no live column gives 0 and lse = -inf.

    Args:
        q: `[T, H, D]`.
        window: pool of the first ``n_window`` columns.
        cmp: pool of the other columns, same format.
        indices: `[T, K]` int32 or int64 slots, -1 for none.
        cmp_counts: `[T]` live compressed columns, or None for all.
        sink: `[H]` fp32, natural log; -inf for none.
        n_window: number of window columns.
        softmax_scale: factor of the dot products.
        angles: cos and sin `[T, R / 2]` fp32 that the output is rotated back by, as by
            ``rope(out, *angles, inverse=True)``; a compiled graph finds that call by itself.

    Returns:
        out like ``q`` and lse `[T, H]` fp32, natural log, without the sink.
    """
    if window.format != cmp.format:
        raise ValueError(
            f"window rows are {window.format.name!r}, compressed rows {cmp.format.name!r}; "
            "one read takes one format: quantize both pools or neither"
        )
    return torch.ops.fp8kv.sparse_attention(
        q,
        window.data,
        window.scale,
        cmp.data,
        cmp.scale,
        indices,
        cmp_counts,
        sink,
        n_window,
        softmax_scale,
        window.format.name,
        *(angles or ()),
    )


def indexer_scores(
    q: Tensor,
    weights: Tensor,
    idx: Pool,
    page_rows: Tensor,
    request: Tensor,
    counts: Tensor,
    page_size: int,
) -> Tensor:
    """Index score of every compressed row: sum over heads of weight * relu(q . key).

    Args:
        q: `[T, HI, DI]`.
        weights: `[T, HI]` fp32.
        idx: bf16 pool of index keys, `[NI, DI]`.
        page_rows: `[R, P]` first key row of each page of a request.
        request: `[T]` row of ``page_rows`` that a token reads.
        counts: `[T]` live keys.
        page_size: key rows per page.

    Returns:
        `[T, P * page_size]` fp32, -inf beyond ``counts``; dead pages are not read.
    """
    return torch.ops.fp8kv.indexer_scores(
        q, weights, idx.data, page_rows, request, counts, page_size
    )


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Doubly stochastic matrices: softmax over rows, then rows and columns normalised in turn.

    comb = softmax(logits, -1) + eps, divided by its column sums + eps; then ``iterations - 1``
    rounds of division by row sums + eps and by column sums + eps. An operator because a compiler
    sees a hundred dependent steps here, and makes half as many kernels of them.

    Args:
        logits: `[T, C, C]` fp32.
        iterations: rounds.
        eps: added to the softmax and to every sum.

    Returns:
        `[T, C, C]` fp32, contiguous.
    """
    return torch.ops.fp8kv.sinkhorn(logits, iterations, eps)
