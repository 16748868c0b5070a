"""Index scores: which compressed rows a query should read."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def score_tile(
    q,
    stride_q_head,
    weights,
    stride_weight,
    n_heads,
    idx_data,
    stride_idx,
    page_rows,
    stride_request_row,
    stride_page,
    request,
    keys,
    count,
    D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Scores `[BLOCK_N]` fp32 of a token's ``keys``, -inf from ``count`` on.

    A tile beyond the count reads neither queries, pages nor keys. bf16 queries are multiplied in
    bf16 with fp32 sums; others in fp32.

    Args:
        q: the token's queries `[HI, DI]`.
        weights: the token's weights `[HI]`.
        request: where the token's row of ``page_rows`` is written.
        keys: `[BLOCK_N]`, counted from the first key of the request.
    """
    live = keys < count
    scores = tl.full(keys.shape, -float("inf"), tl.float32)
    if tl.max(live.to(tl.int32), 0) > 0:
        heads = tl.arange(0, BLOCK_H)
        features = tl.arange(0, BLOCK_D)
        head_mask = heads < n_heads
        feature_mask = (features < D)[None, :]
        query = tl.load(
            q + (heads.to(tl.int64) * stride_q_head)[:, None] + features[None, :],
            mask=head_mask[:, None] & feature_mask,
            other=0.0,
        )
        if query.dtype != tl.bfloat16:
            query = query.to(tl.float32)
        weight = tl.load(weights + heads.to(tl.int64) * stride_weight, mask=head_mask, other=0.0)
        pages = page_rows + tl.load(request).to(tl.int64) * stride_request_row
        first = tl.load(pages + (keys // PAGE_SIZE).to(tl.int64) * stride_page, mask=live, other=0)
        rows = first.to(tl.int64) + keys % PAGE_SIZE
        key_tile = tl.load(
            idx_data + (rows * stride_idx)[:, None] + features[None, :],
            mask=live[:, None] & feature_mask,
            other=0.0,
        ).to(query.dtype)
        dots = tl.dot(query, tl.trans(key_tile), input_precision="ieee")
        # Not tl.maximum, which would turn the NaN of a live key into 0.
        dots = tl.where(dots < 0.0, 0.0, dots)
        scores = tl.where(live, tl.sum(dots * weight[:, None], 0), scores)
    return scores


@triton.jit(do_not_specialize=["n_keys", "n_heads"])
def indexer_kernel(
    q,
    weights,
    idx_data,
    page_rows,
    request,
    counts,
    out,
    n_keys,
    n_heads,
    stride_q_token,
    stride_q_head,
    stride_weight_token,
    stride_weight_head,
    stride_idx,
    stride_request_row,
    stride_page,
    stride_request,
    stride_count,
    D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (tokens, tiles of BLOCK_N keys): a tile covers as many pages as fit into it."""
    token = tl.program_id(0).to(tl.int64)
    keys = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    scores = score_tile(
        q + token * stride_q_token,
        stride_q_head,
        weights + token * stride_weight_token,
        stride_weight_head,
        n_heads,
        idx_data,
        stride_idx,
        page_rows,
        stride_request_row,
        stride_page,
        request + token * stride_request,
        keys,
        tl.minimum(tl.load(counts + token * stride_count), n_keys),
        D,
        PAGE_SIZE,
        BLOCK_H,
        BLOCK_D,
    )
    tl.store(out + token * n_keys + keys, scores, mask=keys < n_keys)


def keys_per_program(dtype: torch.dtype) -> int:
    """Keys of a tile, for queries of ``dtype``.

    A query tile of V4-Flash, 16 KiB in bf16, is loaded once for them.
    """
    return 64 if dtype == torch.bfloat16 else 16


def indexer_scores(
    q: Tensor,
    weights: Tensor,
    idx_data: Tensor,
    page_rows: Tensor,
    request: Tensor,
    counts: Tensor,
    page_size: int,
) -> Tensor:
    """Index scores; see :func:`fp8kv_inductor.ops.indexer_scores`.

    Args:
        q: `[T, HI, DI]` bf16, fp16 or fp32; queries whose features are not neighbours are copied.
        weights: `[T, HI]` fp32.
        idx_data: `[NI, DI]` bf16; rows may be padded.
        page_rows: `[R, P]` int32 or int64, first key row of each page.
        request: `[T]` int32 or int64.
        counts: `[T]` int32 or int64.
        page_size: key rows per page.

    Returns:
        `[T, P * page_size]` fp32, -inf beyond ``counts``.
    """
    tokens, n_heads, width = q.shape
    n_keys = page_rows.shape[1] * page_size
    out = torch.empty((tokens, n_keys), dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out
    if q.stride(2) != 1:
        q = q.contiguous()
    block_n = keys_per_program(q.dtype)
    with torch.cuda.device_of(q):
        indexer_kernel[(tokens, triton.cdiv(n_keys, block_n))](
            q,
            weights,
            idx_data,
            page_rows,
            request,
            counts,
            out,
            n_keys,
            n_heads,
            q.stride(0),
            q.stride(1),
            weights.stride(0),
            weights.stride(1),
            idx_data.stride(0),
            page_rows.stride(0),
            page_rows.stride(1),
            request.stride(0),
            counts.stride(0),
            D=width,
            PAGE_SIZE=page_size,
            BLOCK_H=max(16, triton.next_power_of_2(n_heads)),
            BLOCK_N=block_n,
            BLOCK_D=max(16, triton.next_power_of_2(width)),
        )
    return out
