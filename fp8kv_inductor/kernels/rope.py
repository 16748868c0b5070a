"""Rotary embedding of the last features of each row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8kv_inductor.kernels.launch import row_layout, rows_per_program

ROPE_OPTIONS = {"enable_fp_fusion": False}
"""Compiler options of ``rope_kernel``: every product is a rounding of its own, as the definition
has it. (``libdevice.mul_rn`` would keep products out of an fma too, but flushes subnormals.)"""


@triton.jit(do_not_specialize=["n_rows"])
def rope_kernel(
    x,
    cos,
    sin,
    out,
    n_rows,
    heads,
    stride_token,
    stride_head,
    stride_cos,
    stride_sin,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    INVERSE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program rotates ROWS rows. To be launched with ROPE_OPTIONS.

    The tile is read as pairs. Pairs end where the row ends, so a row of odd length begins one
    element late in the tile.
    """
    PADDING: tl.constexpr = D % 2
    FIRST_PAIR: tl.constexpr = (D + PADDING) // 2 - PAIRS
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    features = tl.arange(0, BLOCK_D) - PADDING
    inside = (rows < n_rows)[:, None] & ((features >= 0) & (features < D))[None, :]
    tokens = rows // heads
    offsets = tokens * stride_token + (rows % heads) * stride_head
    tile = tl.load(x + offsets[:, None] + features[None, :], mask=inside, other=0.0)

    pairs = tl.arange(0, BLOCK_D // 2) - FIRST_PAIR
    rotated = (rows < n_rows)[:, None] & ((pairs >= 0) & (pairs < PAIRS))[None, :]
    c = tl.load(cos + (tokens * stride_cos)[:, None] + pairs[None, :], mask=rotated, other=1.0)
    s = tl.load(sin + (tokens * stride_sin)[:, None] + pairs[None, :], mask=rotated, other=0.0)
    if INVERSE:
        # Not -s, which Triton computes as 0 - s: that loses the sign of zero.
        s = s * -1.0
    even, odd = tl.split(tl.reshape(tile.to(tl.float32), [ROWS, BLOCK_D // 2, 2]))
    new_even = even * c - odd * s
    new_odd = even * s + odd * c
    turned = tl.reshape(tl.join(new_even, new_odd), [ROWS, BLOCK_D]).to(tile.dtype)
    # Features in front of the pairs keep their bits, whatever they are.
    result = tl.where((features >= D - 2 * PAIRS)[None, :], turned, tile)
    tl.store(out + (rows * D)[:, None] + features[None, :], result, mask=inside)


def rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last R features of each row (``numerics.rope``).

    Args:
        x: `[T, D]` or `[T, H, D]`, bf16, fp16 or fp32, any strides.
        cos, sin: `[T, R / 2]` fp32.
        inverse: rotate by the negative angles.

    Returns:
        like ``x``, contiguous.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    layout = row_layout(x)
    cos, sin = row_layout(cos).x, row_layout(sin).x
    head_dim = x.shape[-1]
    block_d = max(2, triton.next_power_of_2(head_dim + head_dim % 2))
    rows = rows_per_program(block_d)
    with torch.cuda.device_of(x):
        rope_kernel[(triton.cdiv(layout.n_rows, rows),)](
            layout.x,
            cos,
            sin,
            out,
            layout.n_rows,
            layout.heads,
            layout.stride_token,
            layout.stride_head,
            cos.stride(0),
            sin.stride(0),
            D=head_dim,
            PAIRS=cos.shape[1],
            INVERSE=inverse,
            ROWS=rows,
            BLOCK_D=block_d,
            **ROPE_OPTIONS,
        )
    return out
