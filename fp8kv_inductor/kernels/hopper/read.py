"""The kernel, what it can be launched with, and its launch."""

# Records get their constructors from a decorator, which mypy does not see.
# mypy: disable-error-code="call-arg"

from collections.abc import Sequence

import torch
import triton
import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fp8kv_inductor.formats import RowFormat
from fp8kv_inductor.kernels.hopper.arguments import Read, Rows, Shared
from fp8kv_inductor.kernels.hopper.gather import gather_plain, gather_quantized
from fp8kv_inductor.kernels.hopper.halves import LOG2_E, left_plain, left_quantized, right_half
from fp8kv_inductor.kernels.hopper.layouts import (
    BLOCK,
    BLOCK_H,
    CMP,
    HALF,
    HEAD_DIM,
    N_BLOCKS,
    OPERAND,
    OPERAND_BLOCK,
    PLAIN,
    PLAIN_2D,
    RAW,
    TILE,
    VECTOR_BYTES,
)
from fp8kv_inductor.kernels.hopper.places import BARRIERS, PLACES
from fp8kv_inductor.kernels.launch import ReadArguments, device_limits

GROUP_WARPS = 4
MAX_REGISTERS = 168
"""Per thread, on average: a third of the register file for each group, in steps of eight."""
RIGHT_REGISTERS = 168
GATHER_REGISTERS = 96
"""What ``right`` and ``gather`` need; ``left`` gets the rest."""
OUT_BLOCK = [1, BLOCK_H.value, HALF.value]
"""What is stored at a time of outputs `[T, H, D]`."""
MOST_SHARES = 4
"""Programs that divide the heads of a part among them."""


@gluon.jit(
    do_not_specialize=[
        "stride_window_data",
        "stride_window_scale",
        "stride_cmp_data",
        "stride_cmp_scale",
        "stride_index_token",
        "stride_index_column",
        "stride_count",
        "stride_sink",
        "stride_cos",
        "stride_sin",
        "n_columns",
        "n_items",
    ]
)
def read_kernel(
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
    out_blocks,
    lse,
    to_base_2,
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
    n_columns,
    n_items,
    N_HEADS: gl.constexpr,
    N_WINDOW: gl.constexpr,
    SPLITS: gl.constexpr,
    QUANTIZED: gl.constexpr,
    HAS_COUNTS: gl.constexpr,
    ROPE_PAIRS: gl.constexpr,
    RIGHT_REGISTERS: gl.constexpr,
    GATHER_REGISTERS: gl.constexpr,
):
    """Grid (programs, shares of the heads of a part): persistent; see the package's docstring."""
    r = Read(
        q,
        stride_q_token,
        stride_q_head,
        Rows(window_data, window_scale, stride_window_data, stride_window_scale),
        Rows(cmp_data, cmp_scale, stride_cmp_data, stride_cmp_scale),
        indices,
        stride_index_token,
        stride_index_column,
        counts,
        stride_count,
        sink,
        stride_sink,
        cos,
        sin,
        stride_cos,
        stride_sin,
        out,
        out_blocks,
        lse,
        to_base_2,
        n_columns,
        n_items,
        N_HEADS,
        N_WINDOW,
        N_WINDOW % TILE == 0,
        SPLITS,
        QUANTIZED,
        HAS_COUNTS,
        ROPE_PAIRS,
    )
    FLOAT: gl.constexpr = gl.float16 if QUANTIZED else gl.bfloat16
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    s = Shared(
        gl.allocate_shared_memory(gl.int32, [4], PLAIN),
        gl.allocate_shared_memory(gl.int32, [4], PLAIN),
        gl.allocate_shared_memory(FLOAT, [PLACES, TILE, HALF], OPERAND),
        gl.allocate_shared_memory(FLOAT, [PLACES, TILE, HALF], OPERAND),
        gl.allocate_shared_memory(gl.int32, [4, TILE], PLAIN),
        gl.allocate_shared_memory(gl.int32, [4, 4], PLAIN),
        gl.allocate_shared_memory(FLOAT, [BLOCK_H, TILE], OPERAND),
        gl.allocate_shared_memory(gl.float32, [BLOCK_H], PLAIN),
        gl.allocate_shared_memory(gl.int32, [2, 4], PLAIN),
        gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        gl.allocate_shared_memory(gl.int64, [1], BARRIER),
    )
    for i in gl.static_range(BARRIERS):
        mbarrier.init(s.full_left.index(i), count=1)
        mbarrier.init(s.full_right.index(i), count=1)
        mbarrier.init(s.empty_left.index(i), count=1)
        mbarrier.init(s.empty_right.index(i), count=1)
    mbarrier.init(s.q_right, count=1)
    mbarrier.init(s.p_full, count=1)
    mbarrier.init(s.p_empty, count=1)
    # Launched while the kernel before still runs: what that wrote is there from here on.
    gdc_wait()
    gdc_launch_dependents()
    if QUANTIZED:
        raw_first = gl.allocate_shared_memory(gl.int32, [32, HALF // 4], RAW)
        raw_second = gl.allocate_shared_memory(gl.int32, [32, HALF // 4], RAW)
        raw_scales = gl.allocate_shared_memory(
            window_scale.dtype.element_ty, [2, TILE, N_BLOCKS], PLAIN_2D
        )
        gl.warp_specialize(
            [
                (left_quantized, (r, s)),
                (right_half, (r, s)),
                (gather_quantized, (r, s, raw_first, raw_second, raw_scales)),
            ],
            [gl.num_warps(), gl.num_warps()],
            [RIGHT_REGISTERS, GATHER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [(left_plain, (r, s)), (right_half, (r, s)), (gather_plain, (r, s))],
            [gl.num_warps(), gl.num_warps()],
            [RIGHT_REGISTERS, GATHER_REGISTERS],
        )


def takes_rows(
    head_dim: int,
    dtype: torch.dtype,
    row_format: RowFormat,
    softmax_scale: float,
    rope_pairs: int,
) -> bool:
    """Whether the layouts are made for such queries and rows.

    Args:
        head_dim, dtype: of the queries.
        row_format: of the pools.
        softmax_scale: must be positive, because a tile's maximum is scaled after it is found.
        rope_pairs: R / 2, all in the right half; 0 for no rotation.
    """
    return (
        head_dim == HEAD_DIM
        and dtype == torch.bfloat16
        and row_format.block in (0, BLOCK)
        and softmax_scale > 0
        and 2 * rope_pairs <= HALF.value
    )


def takes_tensors(q: Tensor, pools: Sequence[Tensor], indices: Tensor) -> bool:
    """Whether rows start at multiples of VECTOR_BYTES, and offsets fit into 32 bits.

    Args:
        q: `[T, H, D]`.
        pools: data and, of quantized rows, scales, `[N, ...]`.
        indices: `[T, K]`.
    """
    vector = VECTOR_BYTES.value
    aligned = q.stride(2) == 1 and all(
        part.data_ptr() % vector == 0
        and all(stride * part.itemsize % vector == 0 for stride in strides)
        for part, strides in ((q, q.stride()[:2]), *((pool, pool.stride()[:1]) for pool in pools))
    )
    return (
        aligned
        and indices.shape[1] * indices.stride(1) < 1 << 31
        and all(pool.shape[0] <= CMP.value for pool in pools)
        and all(pool.shape[0] * pool.stride(0) * pool.itemsize < vector << 32 for pool in pools)
    )


def launch(read: ReadArguments, splits: int, out: Tensor, lse: Tensor) -> None:
    """Fill ``out`` and ``lse``; see ``kernels.attention.read_into``."""
    q, window, cmp, indices, cmp_counts, sink, angles, n_window, softmax_scale, row_format = read
    tokens, n_heads, _ = q.shape
    n_items = tokens * triton.cdiv(n_heads, BLOCK_H.value) * splits
    sm_count = device_limits(q.device).sm_count
    shares = 1
    while splits > 1 and shares < MOST_SHARES and 2 * shares * n_items <= sm_count:
        shares *= 2
    quantized = row_format.quantized
    if quantized:
        pools = [part for data, scale in (window, cmp) for part in (data.view(torch.int32), scale)]
    else:
        # Without scales, whose pointers are never followed.
        pools = [data for data, _ in (window, cmp) for _ in range(2)]
    cos, sin = (sink, sink) if angles is None else angles
    # Parts, which are not stored by blocks, need a descriptor all the same: of anything that fits.
    stored = out if splits == 1 else out.view(q.dtype)[:, :, 0]
    out_blocks = TensorDescriptor.from_tensor(stored, OUT_BLOCK, OPERAND_BLOCK.value)
    with torch.cuda.device_of(q):
        read_kernel[(min(n_items, sm_count), shares)](
            q,
            *pools,
            indices,
            indices if cmp_counts is None else cmp_counts,
            sink,
            cos,
            sin,
            out,
            out_blocks,
            lse,
            softmax_scale * LOG2_E.value,
            q.stride(0),
            q.stride(1),
            *(pool.stride(0) * pool.itemsize // VECTOR_BYTES.value for pool in pools),
            indices.stride(0),
            indices.stride(1),
            0 if cmp_counts is None else cmp_counts.stride(0),
            sink.stride(0),
            cos.stride(0),
            sin.stride(0),
            indices.shape[1],
            n_items,
            N_HEADS=n_heads,
            N_WINDOW=n_window,
            SPLITS=splits,
            QUANTIZED=quantized,
            HAS_COUNTS=cmp_counts is not None,
            ROPE_PAIRS=0 if angles is None else cos.shape[1],
            RIGHT_REGISTERS=RIGHT_REGISTERS,
            GATHER_REGISTERS=GATHER_REGISTERS,
            num_warps=GROUP_WARPS,
            launch_pdl=True,
            maxnreg=MAX_REGISTERS,
        )
