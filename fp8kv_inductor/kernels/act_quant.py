"""The model's fp8 round trip of the leading features of each row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8kv_inductor import numerics
from fp8kv_inductor.kernels.block_scale import (
    ceil_log2_ratio,
    e4m3_decode,
    e4m3_encode,
    exp2_int,
    finite_amax,
)
from fp8kv_inductor.kernels.launch import device_limits, row_layout, rows_per_program


@triton.jit(do_not_specialize=["n_rows"])
def act_quant_kernel(
    x,
    out,
    n_rows,
    heads,
    stride_token,
    stride_head,
    D: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
    AMAX_MIN: tl.constexpr,
    EXPONENT_MAX: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program rounds ROWS rows; blocks behind FEATURES pass through with their bits."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    features = tl.arange(0, BLOCK_D)
    inside = (rows < n_rows)[:, None] & (features < D)[None, :]
    offsets = (rows // heads) * stride_token + (rows % heads) * stride_head
    tile = tl.load(x + offsets[:, None] + features[None, :], mask=inside, other=0.0)

    blocks = tl.reshape(tile.to(tl.float32), [ROWS, BLOCK_D // BLOCK, BLOCK])
    amax = tl.maximum(finite_amax(blocks), AMAX_MIN)
    exponent = tl.minimum(ceil_log2_ratio(amax), EXPONENT_MAX)
    codes = e4m3_encode(blocks * exp2_int(-exponent)[:, :, None], ROUND_FIRST)
    rounded = e4m3_decode(codes) * exp2_int(exponent)[:, :, None]
    rounded = tl.reshape(rounded, [ROWS, BLOCK_D]).to(tile.dtype)
    result = tl.where((features < FEATURES)[None, :], rounded, tile)
    tl.store(out + (rows * D)[:, None] + features[None, :], result, mask=inside)


def act_quant(x: Tensor, features: int, block: int = 64) -> Tensor:
    """fp8 round trip of the first ``features`` of each row (``numerics.act_quant``).

    Args:
        x: `[T, D]` or `[T, H, D]`, bf16, fp16 or fp32, any strides.
        features: leading features to round, a multiple of ``block``.
        block: elements per scale, a power of two.

    Returns:
        like ``x``, contiguous.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    layout = row_layout(x)
    block_d = triton.next_power_of_2(x.shape[-1])
    rows = rows_per_program(block_d)
    with torch.cuda.device_of(x):
        act_quant_kernel[(triton.cdiv(layout.n_rows, rows),)](
            layout.x,
            out,
            layout.n_rows,
            layout.heads,
            layout.stride_token,
            layout.stride_head,
            D=x.shape[-1],
            FEATURES=features,
            BLOCK=block,
            AMAX_MIN=numerics.ACT_QUANT_AMAX_MIN,
            EXPONENT_MAX=numerics.act_quant_exponent_max(x.dtype),
            ROUND_FIRST=device_limits(x.device).e4m3_rounds_twice,
            ROWS=rows,
            BLOCK_D=block_d,
        )
    return out
