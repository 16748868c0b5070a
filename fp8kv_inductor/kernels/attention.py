"""Attention of every query over its own list of pool rows, K and V being the same row.

Two ways through the same mathematics: *prefill*, one program per token and block of heads, and
*split-k*, where several programs share the columns of a token and a second kernel combines their
partial results. The functions above the kernels use nothing but ``tl``, their arguments and each
other, so that their source can be pasted into a template.

Names: BLOCK_H heads, BLOCK_K columns, BLOCK_D features of a tile (D padded to a power of two); D
head_dim; BLOCK elements per scale, 0 for rows without scales. ``window`` and ``cmp`` are tuples
(data pointer, scale pointer, row stride of data, row stride of scale).
"""

import importlib
import warnings
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8kv_inductor.formats import RowFormat
from fp8kv_inductor.kernels.launch import ReadArguments, device_limits, row_layout
from fp8kv_inductor.kernels.rope import rope


@triton.jit
def load_rows(
    window,
    cmp,
    slots,
    in_window,
    live,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Gather and dequantize the rows `[BLOCK_K, BLOCK_D]` of one tile of columns.

    Columns that are not ``live``, and features beyond D, are not read and come out as zeros.
    """
    slots = slots.to(tl.int64)
    features = tl.arange(0, BLOCK_D)
    data_rows = tl.where(in_window, window[0], cmp[0])
    data_rows += slots * tl.where(in_window, window[2], cmp[2])
    rows = tl.load(
        data_rows[:, None] + features[None, :],
        mask=live[:, None] & (features < D)[None, :],
        other=0,
    )
    if BLOCK > 0:
        N_BLOCKS: tl.constexpr = BLOCK_D // BLOCK
        blocks = tl.arange(0, N_BLOCKS)
        scale_rows = tl.where(in_window, window[1], cmp[1])
        scale_rows += slots * tl.where(in_window, window[3], cmp[3])
        scales = tl.load(
            scale_rows[:, None] + blocks[None, :],
            mask=live[:, None] & (blocks * BLOCK < D)[None, :],
            other=0,
        )
        if scales.dtype == tl.uint8:
            # A one-byte scale is the exponent field of an fp32 number.
            scales = (scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        values = rows.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        values = tl.reshape(values, [slots.shape[0], N_BLOCKS, BLOCK])
        values = values * scales.to(tl.float32)[:, :, None]
        rows = tl.reshape(values, [slots.shape[0], BLOCK_D])
    return rows.to(DTYPE)


@triton.jit
def column_stop(count, n_window, n_columns):
    """First column that does not exist: counts are clamped to `[0, n_columns - n_window]`."""
    return n_window + tl.minimum(tl.maximum(count, 0), n_columns - n_window).to(tl.int32)


@triton.jit
def split_range(split, stop, SPLITS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns `[start, stop)` of one of SPLITS equal parts of the live columns, in whole tiles."""
    width = tl.cdiv(tl.cdiv(stop, BLOCK_K), SPLITS) * BLOCK_K
    start = split * width
    return start, tl.minimum(start + width, stop)


@triton.jit
def attend(
    q,
    window,
    cmp,
    indices,
    stride_column,
    n_window,
    start,
    stop,
    softmax_scale,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Online softmax over the columns `[start, stop)` of one token.

    Args:
        q: `[BLOCK_H, BLOCK_D]` in the dtype of the dot products.
        indices: the token's row of slots.

    Returns:
        acc `[BLOCK_H, BLOCK_D]` fp32, the sum of p * row; m `[BLOCK_H]`, the maximum of the scores
        in base 2, -inf if no column was live; l `[BLOCK_H]`, the sum of p = 2^(score - m).
    """
    BLOCK_H: tl.constexpr = q.shape[0]
    BLOCK_D: tl.constexpr = q.shape[1]
    to_base_2 = softmax_scale * 1.4426950408889634
    m = tl.full([BLOCK_H], -float("inf"), tl.float32)
    l = tl.zeros([BLOCK_H], tl.float32)  # noqa: E741
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for first in tl.range(start, stop, BLOCK_K, num_stages=STAGES):
        columns = first + tl.arange(0, BLOCK_K)
        offsets = columns.to(tl.int64) * stride_column
        slots = tl.load(indices + offsets, mask=columns < stop, other=-1)
        live = slots >= 0
        rows = load_rows(window, cmp, slots, columns < n_window, live, D, BLOCK_D, BLOCK, q.dtype)
        scores = tl.dot(q, tl.trans(rows), input_precision="ieee") * to_base_2
        scores = tl.where(live[None, :], scores, -float("inf"))
        new_m = tl.maximum(m, tl.max(scores, 1))
        # While nothing was live, -inf - -inf must not become NaN.
        shift = tl.where(new_m == -float("inf"), 0.0, new_m)
        p = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(m - shift)
        l = l * rescale + tl.sum(p, 1)  # noqa: E741
        acc = tl.dot(p.to(q.dtype), rows, acc * rescale[:, None], input_precision="ieee")
        m = new_m
    return acc, m, l


@triton.jit
def finish(acc, m, l, sink):  # noqa: E741
    """Normalise what ``attend`` returns.

    Args:
        sink: `[BLOCK_H]` natural log of what is added to the denominator.

    Returns:
        out `[BLOCK_H, BLOCK_D]` fp32 and lse `[BLOCK_H]`, natural log, without the sink.
    """
    sink_2 = sink * 1.4426950408889634
    top = tl.maximum(m, sink_2)
    shift = tl.where(top == -float("inf"), 0.0, top)
    weight = tl.exp2(m - shift)
    total = l * weight + tl.exp2(sink_2 - shift)
    # Nothing live and no sink: 0 / 0. An infinite sink: inf - inf. Both rows are zero.
    empty = (total == 0.0) | (sink_2 == float("inf"))
    out = acc * tl.where(empty, 0.0, weight / total)[:, None]
    return out, (m + tl.log2(l)) * 0.6931471805599453


@triton.jit
def rotate_back(x, cos, sin, DTYPE: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr):
    """Inverse rope of the last 2 * PAIRS of D features of an output tile, interleaved pairs.

    Args:
        x: `[BLOCK_H, BLOCK_D]` fp32, rounded to DTYPE first, as between two operators.
        cos, sin: the token's angles `[PAIRS]`.
    """
    N_PAIRS: tl.constexpr = x.shape[1] // 2
    even, odd = tl.split(tl.reshape(x.to(DTYPE).to(tl.float32), [x.shape[0], N_PAIRS, 2]))
    pair = tl.arange(0, N_PAIRS) - (D // 2 - PAIRS)
    tail = (pair >= 0) & (pair < PAIRS)
    cos = tl.load(cos + pair, mask=tail, other=1.0)[None, :]
    sin = tl.load(sin + pair, mask=tail, other=0.0)[None, :]
    turned_even = tl.where(tail[None, :], even * cos + odd * sin, even)
    turned_odd = tl.where(tail[None, :], odd * cos - even * sin, odd)
    return tl.reshape(tl.join(turned_even, turned_odd), [x.shape[0], x.shape[1]])


@triton.jit
def as_part(result, DTYPE: tl.constexpr):
    """A part `[BLOCK_H, BLOCK_D]` in DTYPE, over a power of two per head, and those `[BLOCK_H]`.

    fp16 has the precision that the sum of parts needs, but not the range.
    """
    if tl.float32 == DTYPE:
        exponent = tl.zeros([result.shape[0]], tl.int32)
    else:
        largest = tl.max(tl.abs(result), 1)
        exponent = ((largest.to(tl.int32, bitcast=True) >> 23) & 255) - 127 - 14
        exponent = tl.minimum(tl.maximum(exponent, -126), 126)
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    power = ((127 + exponent) << 23).to(tl.float32, bitcast=True)
    return (result * inverse[:, None]).to(DTYPE), power


@triton.jit
def load_query(q, heads, n_heads, stride_head, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Query tile `[BLOCK_H, BLOCK_D]` in the dtype of the dot products.

    bf16 queries stay bf16. fp16 has too small a range for a row's values, so fp16 is computed in
    fp32, like fp32 itself.
    """
    features = tl.arange(0, BLOCK_D)
    tile = tl.load(
        q + (heads.to(tl.int64) * stride_head)[:, None] + features[None, :],
        mask=(heads < n_heads)[:, None] & (features < D)[None, :],
        other=0.0,
    )
    if tile.dtype != tl.bfloat16:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def live_stop(counts, token, stride_count, n_window, n_columns):
    """``column_stop`` of a token; all columns without counts."""
    if counts is None:
        return n_columns
    else:
        return column_stop(tl.load(counts + token * stride_count), n_window, n_columns)


@triton.jit(do_not_specialize=["n_window", "n_columns", "n_heads"])
def prefill_kernel(
    q,
    window_data,
    window_scale,
    cmp_data,
    cmp_scale,
    indices,
    counts,
    sink,
    cos,
    sin,
    out,
    lse,
    softmax_scale,
    n_window,
    n_columns,
    n_heads,
    stride_q_token,
    stride_q_head,
    stride_window_data,
    stride_window_scale,
    stride_cmp_data,
    stride_cmp_scale,
    stride_index_token,
    stride_index_column,
    stride_count,
    stride_sink,
    stride_cos,
    stride_sin,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (tokens, blocks of heads): one program reads all columns of its token."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    query = load_query(q + token * stride_q_token, heads, n_heads, stride_q_head, D, BLOCK_D)
    acc, m, l = attend(  # noqa: E741
        query,
        (window_data, window_scale, stride_window_data, stride_window_scale),
        (cmp_data, cmp_scale, stride_cmp_data, stride_cmp_scale),
        indices + token * stride_index_token,
        stride_index_column,
        n_window,
        0,
        live_stop(counts, token, stride_count, n_window, n_columns),
        softmax_scale,
        D,
        BLOCK,
        BLOCK_K,
        STAGES,
    )
    head_mask = heads < n_heads
    head_sink = tl.load(sink + heads * stride_sink, mask=head_mask, other=0.0)
    result, result_lse = finish(acc, m, l, head_sink)
    if PAIRS > 0:
        cos += token * stride_cos
        sin += token * stride_sin
        result = rotate_back(result, cos, sin, out.dtype.element_ty, D, PAIRS)
    features = tl.arange(0, BLOCK_D)
    row = token * n_heads + heads
    tl.store(
        out + (row * D)[:, None] + features[None, :],
        result.to(out.dtype.element_ty),
        mask=head_mask[:, None] & (features < D)[None, :],
    )
    tl.store(lse + row, result_lse, mask=head_mask)


@triton.jit(do_not_specialize=["n_window", "n_columns", "n_heads"])
def split_kernel(
    q,
    window_data,
    window_scale,
    cmp_data,
    cmp_scale,
    indices,
    counts,
    partial_out,
    partial_lse,
    softmax_scale,
    n_window,
    n_columns,
    n_heads,
    stride_q_token,
    stride_q_head,
    stride_window_data,
    stride_window_scale,
    stride_cmp_data,
    stride_cmp_scale,
    stride_index_token,
    stride_index_column,
    stride_count,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (tokens, blocks of heads, SPLITS): one program reads one part of the live columns.

    The live columns are divided, not the width of the list: work stays balanced when counts are
    far below the width that a captured graph was built for.
    """
    token = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    query = load_query(q + token * stride_q_token, heads, n_heads, stride_q_head, D, BLOCK_D)
    live = live_stop(counts, token, stride_count, n_window, n_columns)
    start, stop = split_range(split, live, SPLITS, BLOCK_K)
    acc, m, l = attend(  # noqa: E741
        query,
        (window_data, window_scale, stride_window_data, stride_window_scale),
        (cmp_data, cmp_scale, stride_cmp_data, stride_cmp_scale),
        indices + token * stride_index_token,
        stride_index_column,
        n_window,
        start,
        stop,
        softmax_scale,
        D,
        BLOCK,
        BLOCK_K,
        STAGES,
    )
    result, result_lse = finish(acc, m, l, tl.full([BLOCK_H], -float("inf"), tl.float32))
    part, power = as_part(result, partial_out.dtype.element_ty)
    features = tl.arange(0, BLOCK_D)
    head_mask = heads < n_heads
    row = (token * n_heads + heads) * SPLITS + split
    tl.store(
        partial_out + (row * D)[:, None] + features[None, :],
        part,
        mask=head_mask[:, None] & (features < D)[None, :],
    )
    tl.store(partial_lse + row * 2, result_lse, mask=head_mask)
    tl.store(partial_lse + row * 2 + 1, power, mask=head_mask)


@triton.jit
def combine_kernel(
    partial_out,
    partial_lse,
    sink,
    out,
    lse,
    n_heads,
    stride_sink,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (tokens, heads, blocks of features): weighted sum of the SPLITS partial results.

    It is ``finish`` over the splits: a partial result counts like a row with score ``lse``.
    """
    row = tl.program_id(0).to(tl.int64) * n_heads + tl.program_id(1)
    splits = tl.arange(0, BLOCK_S)
    features = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    part_lse = partial_lse + (row * SPLITS + splits) * 2
    scores = tl.load(part_lse, mask=splits < SPLITS, other=-float("inf"))
    powers = tl.load(part_lse + 1, mask=splits < SPLITS, other=0.0)
    scores = scores * 1.4426950408889634
    partial = tl.load(
        partial_out + ((row * SPLITS + splits) * D)[:, None] + features[None, :],
        mask=(splits < SPLITS)[:, None] & (features < D)[None, :],
        other=0.0,
    )
    m = tl.max(scores, 0)
    shift = tl.where(m == -float("inf"), 0.0, m)
    p = tl.exp2(scores - shift)
    acc = tl.sum(partial * (p * powers)[:, None], 0)
    head_sink = tl.load(sink + tl.program_id(1) * stride_sink)
    result, result_lse = finish(
        acc[None, :],
        tl.full([1], 0.0, tl.float32) + m,
        tl.full([1], 0.0, tl.float32) + tl.sum(p, 0),
        tl.full([1], 0.0, tl.float32) + head_sink,
    )
    tl.store(
        out + row * D + features[None, :],
        result.to(out.dtype.element_ty),
        mask=(features < D)[None, :],
    )
    if tl.program_id(2) == 0:
        tl.store(lse + row + tl.arange(0, 1), result_lse)


def combine_warps(dtype: torch.dtype) -> int:
    """Warps of a combination of parts of ``dtype``.

    Their threads hold 512 features in vectors of 16 bytes: each its features of every part, so that
    parts are added up within a thread.
    """
    return dtype.itemsize


class ReadConfig(NamedTuple):
    """Tile of a read: BLOCK_H heads times BLOCK_K columns, and how it is compiled."""

    block_h: int
    block_k: int
    num_warps: int
    num_stages: int


def choose_read_config(
    n_heads: int, head_dim: int, dtype: torch.dtype, shared_bytes: int
) -> ReadConfig:
    """The tile of a read that fits into ``shared_bytes`` of shared memory.

    A row is dequantized once for all heads of a tile, so tiles are as high as the heads and the
    memory allow: the fp32 accumulator passes through shared memory on its way to the output, and
    queries and rows need less than that. 32 columns and eight warps are the largest tile of 64
    heads times 512 features that spills no registers on sm_90.

    Args:
        n_heads: H.
        head_dim: D.
        dtype: of the queries; others than bf16 are computed in fp32, without tensor cores.
        shared_bytes: limit of the device.
    """
    block_d = triton.next_power_of_2(head_dim)
    num_warps = 8 if block_d > 256 else 4
    if dtype != torch.bfloat16:
        return ReadConfig(block_h=16, block_k=16, num_warps=num_warps, num_stages=1)
    block_h = min(64, max(16, triton.next_power_of_2(n_heads)))
    while block_h > 16 and block_h * block_d * torch.float32.itemsize > shared_bytes:
        block_h //= 2
    return ReadConfig(block_h, block_k=32, num_warps=num_warps, num_stages=2)


SPLIT_COLUMNS = 64
"""Fewest columns that are worth a program of their own."""


def choose_splits(tokens: int, head_blocks: int, columns: int, sm_count: int) -> int:
    """Number of column ranges per token that fills the GPU once, each of SPLIT_COLUMNS or more.

    Args:
        tokens: T.
        head_blocks: blocks of heads per token.
        columns: K, the width of the index list.
        sm_count: streaming multiprocessors of the device.
    """
    idle_factor = sm_count // max(1, tokens * head_blocks)
    parts = triton.cdiv(columns, SPLIT_COLUMNS)
    if idle_factor <= 1 or parts <= 1:
        return 1
    return triton.cdiv(parts, triton.cdiv(parts, min(idle_factor, parts)))


def part_dtype(dtype: torch.dtype, row_format: RowFormat) -> torch.dtype:
    """Of the parts of a read: queries of ``dtype``, rows of ``row_format``.

    Half the bytes of fp32 where the block scales bound them; a few queries wait for their parts to
    be written.
    """
    return torch.float16 if dtype == torch.bfloat16 and row_format.quantized else torch.float32


COMBINE_TILE_ELEMENTS = 8192
"""Elements of a combine tile: 64 fp32 registers per thread of four warps."""


HOPPER = (9, 0)
"""Compute capability that ``kernels/hopper`` is for: wgmma exists there alone."""


@cache
def hopper_read() -> Any:
    """The module of the read for sm_90; None where triton has no Gluon that it knows."""
    try:
        return importlib.import_module("fp8kv_inductor.kernels.hopper.read")
    except (ImportError, AttributeError):
        return None


_compile_errors: list[str] = []
"""Why this triton cannot compile the read for sm_90: from the first on, it is not tried again.

Texts, because an exception holds on to the frames, and so to the tensors, of the read that failed.
"""


def hopper_read_for(capability: tuple[int, int]) -> Any:
    """``hopper_read`` for a GPU of this capability, None for others and after an error."""
    return hopper_read() if capability == HOPPER and not _compile_errors else None


def _takes_hopper(read: ReadArguments) -> Any:
    """The module of the read for sm_90 if that takes this one, else None."""
    q, fmt = read.q, read.row_format
    if q.device.type != "cuda":
        return None
    hopper = hopper_read_for(torch.cuda.get_device_capability(q.device))
    pools = (*read.window, *read.cmp) if fmt.quantized else (read.window[0], read.cmp[0])
    pairs = 0 if read.angles is None else read.angles[0].shape[1]
    takes = (
        hopper is not None
        and hopper.takes_rows(q.shape[2], q.dtype, fmt, read.softmax_scale, pairs)
        and hopper.takes_tensors(q, pools, read.indices)
    )
    return hopper if takes else None


def _launch_hopper(hopper: Any, read: ReadArguments, splits: int, out: Tensor, lse: Tensor) -> bool:
    """Launch the read for sm_90; False, with a warning, if this triton cannot compile it."""
    try:
        hopper.launch(read, splits, out, lse)
    except (triton.CompilationError, RuntimeError) as error:
        # Errors of triton's compiler passes are plain RuntimeErrors, as those of CUDA are.
        if not isinstance(error, triton.CompilationError) and "PassManager" not in str(error):
            raise
        _compile_errors.append(str(error))
        warnings.warn(
            f"triton {triton.__version__} cannot compile the read for sm_90; reads take the "
            "portable kernel from now on, right but slower",
            stacklevel=2,
        )
        return False
    return True


def read_into(read: ReadArguments, splits: int, out: Tensor, lse: Tensor) -> None:
    """Fill ``out`` and ``lse`` by the best kernel for the device: the read but for the combination.

    Args:
        read: what to compute.
        splits: column ranges per token. With more than one, ``out`` are the parts `[T, H, S, D]`
            in ``part_dtype``, without the sink and not rotated, and ``lse`` is `[T, H, S, 2]`: that
            of the part, and the power of two that the part has to be multiplied with.
        out, lse: contiguous.
    """
    angles = None
    if splits == 1 and read.angles is not None:
        angles = (row_layout(read.angles[0]).x, row_layout(read.angles[1]).x)
    read = read._replace(angles=angles)
    if (hopper := _takes_hopper(read)) and _launch_hopper(hopper, read, splits, out, lse):
        return
    q, window, cmp, indices, cmp_counts, sink, _, n_window, softmax_scale, row_format = read
    if q.stride(2) != 1:
        q = q.contiguous()
    tokens, n_heads, head_dim = q.shape
    config = choose_read_config(n_heads, head_dim, q.dtype, device_limits(q.device).shared_bytes)
    head_blocks = triton.cdiv(n_heads, config.block_h)
    pools = (*window, *cmp)
    sizes = (softmax_scale, n_window, indices.shape[1], n_heads)
    strides = (
        q.stride(0),
        q.stride(1),
        *(pool.stride(0) for pool in pools),
        indices.stride(0),
        indices.stride(1),
        0 if cmp_counts is None else cmp_counts.stride(0),
    )
    options = {
        "D": head_dim,
        "BLOCK": row_format.block,
        "BLOCK_H": config.block_h,
        "BLOCK_K": config.block_k,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "STAGES": config.num_stages,
        "num_warps": config.num_warps,
    }
    with torch.cuda.device_of(q):
        if splits > 1:
            split_kernel[(tokens, head_blocks, splits)](
                q,
                *pools,
                indices,
                cmp_counts,
                out,
                lse,
                *sizes,
                *strides,
                SPLITS=splits,
                **options,
            )
            return
        # Pairs begin at an odd feature of an odd row: not a matter of neighbours in a tile.
        fused = head_dim % 2 == 0
        cos, sin = angles if angles is not None and fused else (None, None)
        prefill_kernel[(tokens, head_blocks)](
            q,
            *pools,
            indices,
            cmp_counts,
            sink,
            cos,
            sin,
            out,
            lse,
            *sizes,
            *strides,
            sink.stride(0),
            0 if cos is None else cos.stride(0),
            0 if sin is None else sin.stride(0),
            PAIRS=0 if cos is None else cos.shape[1],
            **options,
        )
    if angles is not None and not fused:
        out.copy_(rope(out, *angles, True))


def read_splits(
    tokens: int, n_heads: int, head_dim: int, dtype: torch.dtype, columns: int, device: torch.device
) -> int:
    """Number of column ranges per token for such a read on ``device``."""
    limits = device_limits(device)
    config = choose_read_config(n_heads, head_dim, dtype, limits.shared_bytes)
    return choose_splits(tokens, triton.cdiv(n_heads, config.block_h), columns, limits.sm_count)


def sparse_attention(
    q: Tensor,
    window: tuple[Tensor, Tensor],
    cmp: tuple[Tensor, Tensor],
    indices: Tensor,
    cmp_counts: Tensor | None,
    sink: Tensor,
    n_window: int,
    softmax_scale: float,
    row_format: RowFormat,
    angles: tuple[Tensor, Tensor] | None = None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over pool rows; see :func:`fp8kv_inductor.ops.sparse_attention`.

    Args:
        q: `[T, H, D]` bf16, fp16 or fp32. Strides are free, but queries whose features are not
            neighbours are copied.
        window, cmp: data `[N, D]` and scale `[N, D / B]` of a pool; rows may be padded.
        indices: `[T, K]` int32 or int64, any strides.
        cmp_counts: `[T]` int32 or int64, or None.
        sink: `[H]` fp32.
        n_window: columns of the window pool.
        softmax_scale: factor of the dot products.
        row_format: of both pools.
        angles: cos and sin `[T, R / 2]` fp32 that the output is rotated back by, or None.
        splits: column ranges per token; 1 is the prefill kernel. Chosen from the shapes and the
            device if None.

    Returns:
        out `[T, H, D]` in the dtype of ``q`` and lse `[T, H]` fp32.
    """
    tokens, n_heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((tokens, n_heads), dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    if splits is None:
        splits = read_splits(tokens, n_heads, head_dim, q.dtype, indices.shape[1], q.device)
    parts = out, lse
    if splits > 1:
        part_shape = (tokens, n_heads, splits)
        parts = (
            torch.empty(
                (*part_shape, head_dim), dtype=part_dtype(q.dtype, row_format), device=q.device
            ),
            torch.empty((*part_shape, 2), dtype=torch.float32, device=q.device),
        )
    read = ReadArguments(
        q,
        window,
        cmp,
        indices,
        cmp_counts,
        sink,
        angles,
        n_window,
        softmax_scale,
        row_format,
    )
    read_into(read, splits, *parts)
    if splits == 1:
        return out, lse
    block_s = triton.next_power_of_2(splits)
    block_d = triton.next_power_of_2(head_dim)
    combine_d = min(block_d, max(16, COMBINE_TILE_ELEMENTS // block_s))
    with torch.cuda.device_of(q):
        combine_kernel[(tokens, n_heads, triton.cdiv(head_dim, combine_d))](
            *parts,
            sink,
            out,
            lse,
            n_heads,
            sink.stride(0),
            D=head_dim,
            SPLITS=splits,
            BLOCK_S=block_s,
            BLOCK_D=combine_d,
            num_warps=combine_warps(parts[0].dtype),
        )
    return (out if angles is None else rope(out, *angles, True)), lse
