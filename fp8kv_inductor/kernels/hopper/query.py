"""Queries: into shared memory, in the dtype of the rows."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from fp8kv_inductor.kernels.hopper.items import fetch, item_place
from fp8kv_inductor.kernels.hopper.layouts import (
    BLOCK_H,
    HALF,
    OPERAND,
    OPERAND_WORDS,
    VECTORS,
    WORD_VECTORS,
)
from fp8kv_inductor.kernels.hopper.renamed import reinterpret

LINE = gl.constexpr(64)
"""Features in a line of 128 bytes of shared memory; behind a tile of such lines lies the next."""
LINES = gl.constexpr(2 * HALF // LINE)


@gluon.jit
def query_pointers(r, item, first, N: gl.constexpr):
    """Pointers `[BLOCK_H, N]` from feature ``first`` of an item's queries on, and which exist."""
    token, head, _ = item_place(r, item)
    heads = head + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, VECTORS))
    rows = r.q + token.to(gl.int64) * r.stride_q_token + heads.to(gl.int64) * r.stride_q_head
    features = first + gl.arange(0, N, layout=gl.SliceLayout(0, VECTORS))
    return gl.expand_dims(rows, 1) + gl.expand_dims(features, 0), heads < r.N_HEADS


@gluon.jit
def fits_fp16(bits):
    """Whether queries whose largest magnitude has these bf16 bits are precise in fp16: 0, or in
    `[2^-10, 2^16)`."""
    return (bits == 0) | ((bits >= (117 << 7)) & (bits < (143 << 7)))


@gluon.jit
def pairs_to_fp16(pairs, largest):
    """Words of two bf16 as words of two fp16; magnitudes, as bits, no smaller than ``largest``."""
    return gl.inline_asm_elementwise(
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
        [pairs, largest],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def query_to_fp16(s):
    """Convert a query tile from bf16 in place, two lines at a time; threads meet twice for each.

    Returns:
        its largest magnitude, as bf16 bits.
    """
    words = reinterpret(s.q, gl.int32, [LINES // 2, BLOCK_H, LINE], OPERAND_WORDS)
    largest = gl.zeros([BLOCK_H, LINE // 2], gl.int32, layout=WORD_VECTORS)
    for lines in range(LINES // 2):
        pairs = gl.reshape(words.index(lines).load(WORD_VECTORS), [BLOCK_H, 2, LINE // 2])
        first, second = gl.split(gl.permute(pairs, [0, 2, 1]))
        first = gl.convert_layout(first, WORD_VECTORS, assert_trivial=True)
        second = gl.convert_layout(second, WORD_VECTORS, assert_trivial=True)
        first, largest = pairs_to_fp16(first, largest)
        second, largest = pairs_to_fp16(second, largest)
        pairs = gl.reshape(gl.permute(gl.join(first, second), [0, 2, 1]), [BLOCK_H, LINE])
        words.index(lines).store(gl.convert_layout(pairs, WORD_VECTORS, assert_trivial=True))
    return gl.max(gl.max(gl.maximum(largest & 0xFFFF, largest >> 16), 1), 0)


@gluon.jit
def load_query_lines(r, item, first):
    """Features `[first, first + LINE)` of an item's queries, `[BLOCK_H, LINE]` fp32."""
    pointers, live = query_pointers(r, item, first, LINE)
    return gl.load(pointers, mask=gl.expand_dims(live, 1), other=0.0).to(gl.float32)


@gluon.jit
def query_to_scaled_fp16(r, s, item):
    """Queries over a power of two per head, which brings the largest element below 2^15.

    Returns:
        the powers `[BLOCK_H]`.
    """
    largest = gl.zeros([BLOCK_H], gl.float32, layout=gl.SliceLayout(1, VECTORS))
    for line in range(LINES):
        largest = gl.maximum(largest, gl.max(gl.abs(load_query_lines(r, item, line * LINE)), 1))
    exponent = ((largest.to(gl.int32, bitcast=True) >> 23) & 255) - 127 - 14
    exponent = gl.minimum(gl.maximum(exponent, -126), 126)
    inverse = gl.expand_dims(((127 - exponent) << 23).to(gl.float32, bitcast=True), 1)
    target = reinterpret(s.q, gl.float16, [LINES, BLOCK_H, LINE], OPERAND)
    for line in range(LINES):
        x = load_query_lines(r, item, line * LINE) * inverse
        target.index(line).store(x.to(gl.float16))
    return ((127 + exponent) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def bring_query(r, s, item, done):
    """Bring an item's queries into shared memory once those of the item before have been read.

    Args:
        done: items that the program has brought before.
    """
    pointers, live = query_pointers(r, item, 0, HALF)
    target = reinterpret(s.q, gl.bfloat16, [2, BLOCK_H, HALF], OPERAND)
    mbarrier.wait(s.q_free, (done & 1) ^ 1)
    fetch(target.index(0), pointers, live)
    fetch(target.index(1), pointers + HALF, live)
    if r.QUANTIZED:
        async_copy.commit_group()
        async_copy.wait_group(0)
        scale = gl.full([BLOCK_H], 1.0, gl.float32, layout=gl.SliceLayout(1, VECTORS))
        if not fits_fp16(query_to_fp16(s)):
            scale = query_to_scaled_fp16(r, s, item)
        s.q_scale.store(scale)
    else:
        async_copy.mbarrier_arrive(s.q_ready)
    mbarrier.arrive(s.q_ready, count=1)
