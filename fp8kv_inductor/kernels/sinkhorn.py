"""Sinkhorn's normalisation of small matrices, all rounds in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

MATRICES = 32
"""Matrices per program: one warp, a matrix of 4 x 4 per thread."""


@triton.jit(do_not_specialize=["n"])
def sinkhorn_kernel(
    logits,
    out,
    n,
    ROUNDS: tl.constexpr,
    EPS: tl.constexpr,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program normalises BLOCK contiguous matrices."""
    matrix = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None, None]
    row = tl.arange(0, BLOCK_C)[None, :, None]
    column = tl.arange(0, BLOCK_C)[None, None, :]
    inside = (row < C) & (column < C)
    offset = (matrix * C + row) * C + column
    x = tl.load(logits + offset, mask=inside & (matrix < n), other=0.0)
    x = tl.exp(x - tl.max(tl.where(inside, x, float("-inf")), 2, keep_dims=True))
    x = tl.where(inside, x, 0.0)
    comb = tl.where(inside, x / tl.sum(x, 2, keep_dims=True) + EPS, 0.0)
    comb = comb / (tl.sum(comb, 1, keep_dims=True) + EPS)
    for _ in range(ROUNDS - 1):
        comb = comb / (tl.sum(comb, 2, keep_dims=True) + EPS)
        comb = comb / (tl.sum(comb, 1, keep_dims=True) + EPS)
    tl.store(out + offset, comb, mask=inside & (matrix < n))


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Doubly stochastic `[T, C, C]` fp32 from logits of the same shape (``ops.sinkhorn``)."""
    logits = logits.contiguous()
    out = torch.empty_like(logits)
    n, size = logits.shape[0], logits.shape[1]
    if out.numel() == 0:
        return out
    sinkhorn_kernel[(triton.cdiv(n, MATRICES),)](
        logits,
        out,
        n,
        ROUNDS=iterations,
        EPS=eps,
        C=size,
        BLOCK_C=triton.next_power_of_2(size),
        BLOCK=MATRICES,
        num_warps=1,
    )
    return out
