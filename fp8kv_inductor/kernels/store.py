"""Encode rows and scatter them into a pool: codes and scales in one kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8kv_inductor import formats, numerics
from fp8kv_inductor.formats import RowFormat
from fp8kv_inductor.kernels.block_scale import (
    E4M3_MAX,
    ceil_log2_ratio,
    e4m3_encode,
    exp2_int,
    finite_amax,
)
from fp8kv_inductor.kernels.launch import device_limits, row_layout, rows_per_program

SCALE_EXPONENT_MIN = tl.constexpr(formats.SCALE_EXPONENT_MIN)
SCALE_EXPONENT_MAX = tl.constexpr(formats.SCALE_EXPONENT_MAX)
SCALE_MIN = tl.constexpr(2.0**formats.SCALE_EXPONENT_MIN)
SCALE_MAX = tl.constexpr(2.0**formats.SCALE_EXPONENT_MAX)
SCALE_BIAS = tl.constexpr(numerics.FP32_BIAS)


@triton.jit(do_not_specialize=["n_rows", "n_slots"])
def store_kernel(
    rows,
    slots,
    data,
    scale,
    n_rows,
    n_slots,
    stride_row,
    stride_slots,
    stride_data,
    stride_scale,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    POW2: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program encodes ROWS rows and writes those whose slot lies inside the pool.

    BLOCK is 0 for formats that hold the values themselves.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + row * stride_slots, mask=row < n_rows, other=-1).to(tl.int64)
    live = (slot >= 0) & (slot < n_slots)
    features = tl.arange(0, BLOCK_D)
    written = live[:, None] & (features < D)[None, :]
    tile = tl.load(rows + (row * stride_row)[:, None] + features[None, :], mask=written, other=0.0)
    target = data + (slot * stride_data)[:, None] + features[None, :]
    if BLOCK == 0:
        tl.store(target, tile.to(data.dtype.element_ty), mask=written)
    else:
        N_BLOCKS: tl.constexpr = BLOCK_D // BLOCK
        blocks = tl.reshape(tile.to(tl.float32), [ROWS, N_BLOCKS, BLOCK])
        amax = finite_amax(blocks)
        if POW2:
            exponent = ceil_log2_ratio(amax)
            exponent = tl.minimum(tl.maximum(exponent, SCALE_EXPONENT_MIN), SCALE_EXPONENT_MAX)
            scaled = blocks * exp2_int(-exponent)[:, :, None]
            if scale.dtype.element_ty == tl.uint8:
                scales = (exponent + SCALE_BIAS).to(tl.uint8)
            else:
                scales = exp2_int(exponent).to(scale.dtype.element_ty)
        else:
            bounded = tl.minimum(tl.maximum(tl.div_rn(amax, E4M3_MAX), SCALE_MIN), SCALE_MAX)
            scales = bounded.to(scale.dtype.element_ty)
            divisor = tl.broadcast_to(scales.to(tl.float32)[:, :, None], [ROWS, N_BLOCKS, BLOCK])
            scaled = tl.div_rn(blocks, divisor)
        codes = tl.reshape(e4m3_encode(scaled, ROUND_FIRST), [ROWS, BLOCK_D])
        tl.store(target, codes, mask=written)
        index = tl.arange(0, N_BLOCKS)
        tl.store(
            scale + (slot * stride_scale)[:, None] + index[None, :],
            scales,
            mask=live[:, None] & (index * BLOCK < D)[None, :],
        )


def store(rows: Tensor, slots: Tensor, data: Tensor, scale: Tensor, row_format: RowFormat) -> None:
    """Encode rows (``numerics.encode_rows``) and write them into a pool, in place.

    Rows with a slot below 0 or at ``N`` and beyond are skipped.

    Args:
        rows: `[T, D]`, bf16, fp16 or fp32, any strides.
        slots: `[T]` int32 or int64, any stride.
        data: `[N, D]` in ``row_format.code_dtype``; rows may be padded.
        scale: `[N, D / B]` in ``row_format.scale_dtype``; rows may be padded. Not touched by
            formats without scales.
        row_format: how a row lies in the pool.
    """
    if rows.numel() == 0 or data.shape[0] == 0:
        return
    layout = row_layout(rows)
    block_d = triton.next_power_of_2(rows.shape[1])
    rows_per_tile = rows_per_program(block_d)
    with torch.cuda.device_of(rows):
        store_kernel[(triton.cdiv(layout.n_rows, rows_per_tile),)](
            layout.x,
            slots,
            data,
            scale,
            layout.n_rows,
            data.shape[0],
            layout.stride_token,
            slots.stride(0),
            data.stride(0),
            scale.stride(0) if row_format.quantized else 0,
            D=rows.shape[1],
            BLOCK=row_format.block,
            POW2=row_format.rule == "pow2",
            ROUND_FIRST=device_limits(rows.device).e4m3_rounds_twice,
            ROWS=rows_per_tile,
            BLOCK_D=block_d,
        )
