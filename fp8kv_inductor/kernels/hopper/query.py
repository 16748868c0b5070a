"""Queries: into shared memory, and from bf16 to the dtype of the rows."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
)

from fp8kv_inductor.kernels.hopper.items import fetch, item_place
from fp8kv_inductor.kernels.hopper.layouts import (
    ACC,
    BLOCK_H,
    HALF,
    OPERAND,
    OPERAND_WORDS,
    QUERY_WORDS,
    SCORES,
    VECTORS,
)
from fp8kv_inductor.kernels.hopper.renamed import group_barrier, reinterpret


@gluon.jit
def query_rows(r, item, LAYOUT: gl.constexpr):
    """Pointers to an item's queries `[BLOCK_H]`, and which of them exist."""
    token, head, _ = item_place(r, item)
    heads = head + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, LAYOUT))
    rows = r.q + token.to(gl.int64) * r.stride_q_token + heads.to(gl.int64) * r.stride_q_head
    return rows, (heads < r.N_HEADS) & (item < r.n_items)


@gluon.jit
def fetch_query(r, half, item, first):
    """Start copying half of the features of an item's queries; none past the last item."""
    rows, live = query_rows(r, item, VECTORS)
    features = first + gl.arange(0, HALF, layout=gl.SliceLayout(0, VECTORS))
    fetch(half, gl.expand_dims(rows, 1) + gl.expand_dims(features, 0), live)
    async_copy.commit_group()


@gluon.jit
def query_to_fp16(half):
    """Convert half of a query tile from bf16 in place; returns its largest magnitude as bits."""
    words = reinterpret(half, gl.int32, [BLOCK_H, HALF // 2], OPERAND_WORDS)
    largest = gl.zeros([BLOCK_H, 32], gl.int32, layout=QUERY_WORDS)
    for chunk in gl.static_range(HALF // 64):
        part = words.slice(chunk * 32, 32, dim=1)
        pairs, largest = gl.inline_asm_elementwise(
            """{
                .reg .b32 t;
                .reg .f32 x, y;
                shl.b32 t, $2, 16;
                mov.b32 x, t;
                and.b32 t, $2, 0xffff0000;
                mov.b32 y, t;
                cvt.rn.f16x2.f32 $0, y, x;
                and.b32 t, $2, 0x7fff7fff;
                max.u16x2 $1, t, $3;
            }""",
            "=&r,=&r,r,r",
            [part.load(QUERY_WORDS), largest],
            dtype=(gl.int32, gl.int32),
            is_pure=True,
            pack=1,
        )
        part.store(pairs)
    return gl.max(gl.max(gl.maximum(largest & 0xFFFF, largest >> 16), 1), 0)


@gluon.jit
def fits_fp16(bits):
    """Whether queries whose largest magnitude has these bf16 bits are precise in fp16: 0, or in
    `[2^-10, 2^16)`."""
    return (bits == 0) | ((bits >= (117 << 7)) & (bits < (143 << 7)))


@gluon.jit
def load_query_chunk(r, item, first):
    """Features `[first, first + 64)` of an item's queries, `[BLOCK_H, 64]` fp32."""
    rows, live = query_rows(r, item, VECTORS)
    features = first + gl.arange(0, 64, layout=gl.SliceLayout(0, VECTORS))
    pointers = gl.expand_dims(rows, 1) + gl.expand_dims(features, 0)
    return gl.load(pointers, mask=gl.expand_dims(live, 1), other=0.0).to(gl.float32)


@gluon.jit
def query_to_scaled_fp16(r, s, item):
    """Queries over a power of two per head, which brings the largest element below 2^15.

    Returns:
        the powers `[BLOCK_H]`.
    """
    largest = gl.zeros([BLOCK_H], gl.float32, layout=gl.SliceLayout(1, VECTORS))
    for first in range(0, HALF * 2, 64):
        chunk = load_query_chunk(r, item, first)
        largest = gl.maximum(largest, gl.max(gl.abs(chunk), 1))
    exponent = ((largest.to(gl.int32, bitcast=True) >> 23) & 255) - 127 - 14
    exponent = gl.minimum(gl.maximum(exponent, -126), 126)
    inverse = ((127 - exponent) << 23).to(gl.float32, bitcast=True)
    for chunk in gl.static_range(HALF // 64):
        x = load_query_chunk(r, item, chunk * 64) * gl.expand_dims(inverse, 1)
        s.q_left.slice(chunk * 64, 64, dim=1).store(x.to(gl.float16))
        x = load_query_chunk(r, item, HALF + chunk * 64) * gl.expand_dims(inverse, 1)
        s.q_right.slice(chunk * 64, 64, dim=1).store(x.to(gl.float16))
    return ((127 + exponent) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def prepare_query(r, s, item, done):
    """Wait for an item's queries and bring them into the dtype of the rows.

    Returns:
        what to multiply scores with `[BLOCK_H]` to get base-2 logits.
    """
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    scale = gl.full([BLOCK_H], 1.0, gl.float32, layout=ROW) * r.to_base_2
    async_copy.wait_group(0)
    if r.QUANTIZED:
        largest = query_to_fp16(reinterpret(s.q_left, gl.bfloat16, [BLOCK_H, HALF], OPERAND))
    mbarrier.wait(s.q_ready, done & 1)
    if r.QUANTIZED:
        right_largest = gl.max(s.q_largest.load(ROW), 0)
        if not (fits_fp16(largest) & fits_fp16(right_largest)):
            scale *= gl.convert_layout(query_to_scaled_fp16(r, s, item), ROW)
    fence_async_shared()
    group_barrier()
    return scale


@gluon.jit
def prepare_right_query(r, s):
    """The same for the right half of the features, which ``prepare_query`` waits for."""
    async_copy.wait_group(0)
    if r.QUANTIZED:
        largest = query_to_fp16(reinterpret(s.q_right, gl.bfloat16, [BLOCK_H, HALF], OPERAND))
        s.q_largest.store(gl.full([1], largest, gl.int32, layout=gl.SliceLayout(1, ACC)))
    group_barrier()
    mbarrier.arrive(s.q_ready, count=1)
