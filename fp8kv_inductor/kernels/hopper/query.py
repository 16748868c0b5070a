"""Queries: into shared memory, in the dtype of the rows."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from fp8kv_inductor.kernels.hopper.items import fetch, item_place, zero
from fp8kv_inductor.kernels.hopper.layouts import (
    BLOCK_H,
    EXPONENTS,
    FOLDED_WORDS,
    HALF,
    OPERAND,
    OPERAND_WORDS,
    VECTORS,
    WORD_VECTORS,
)
from fp8kv_inductor.kernels.hopper.places import PLACES, fill_by_copies, other_place, wait_empty
from fp8kv_inductor.kernels.hopper.renamed import reinterpret

LINE = gl.constexpr(64)
"""Features in a line of 128 bytes of shared memory; behind a tile of such lines lies the next."""
LINES = gl.constexpr(HALF // LINE)
"""Of half a query."""


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
def pairs_to_fp16(pairs):
    """Words of two bf16 as words of two fp16."""
    return gl.inline_asm_elementwise(
        """{
            .reg .b32 t;
            .reg .f32 x, y;
            shl.b32 t, $1, 16;
            mov.b32 x, t;
            and.b32 t, $1, 0xffff0000;
            mov.b32 y, t;
            cvt.rn.f16x2.f32 $0, y, x;
        }""",
        "=r,r",
        [pairs],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def larger(first, second):
    """Of words of two magnitudes, as bits, the larger ones."""
    return gl.inline_asm_elementwise(
        "max.u16x2 $0, $1, $2;", "=r,r,r", [first, second], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def fold(words):
    """The larger magnitudes of neighbours: half as many columns."""
    first, second = gl.split(gl.reshape(words, [BLOCK_H, words.shape[1] // 2, 2]))
    return larger(first, second)


@gluon.jit
def words_to_fp16(words):
    """Convert words in shared memory from bf16; gives a fourth as many, of their magnitudes."""
    pairs = words.load(WORD_VECTORS)
    words.store(pairs_to_fp16(pairs))
    return fold(fold(pairs & 0x7FFF7FFF))


@gluon.jit
def put_largest(target, largest):
    """Store the largest of the magnitudes that each warp has."""
    largest = gl.maximum(largest & 0xFFFF, largest >> 16)
    # Row 16 i + 4 w + j is with warp w.
    COLUMNS: gl.constexpr = largest.shape[1]
    by_warp = gl.permute(gl.reshape(largest, [4, 4, 4, COLUMNS]), [1, 0, 2, 3])
    target.store(gl.max(gl.reshape(by_warp, [4, BLOCK_H // 4 * COLUMNS]), 1))


@gluon.jit
def half_to_fp16(half, place, target, item):
    """Convert half of an item's queries from bf16 in place, line by line.

    Args:
        target: gets the largest magnitude of each warp, as bf16 bits.
        item: any number of which the compiler does not know whether it is small.
    """
    lines = reinterpret(half, gl.int32, [PLACES * LINES, BLOCK_H, LINE // 2], OPERAND_WORDS)
    largest = gl.zeros([BLOCK_H, LINE // 8], gl.int32, layout=FOLDED_WORDS)
    # Not unrolled: what runs once in an item comes from far away, instruction by instruction.
    for line in range(LINES + zero(item)):
        found = words_to_fp16(lines.index(place * LINES + line))
        largest = larger(largest, gl.convert_layout(found, FOLDED_WORDS, assert_trivial=True))
    put_largest(target, largest)


@gluon.jit
def power_of_two(exponent):
    """2^exponent in fp32, for exponents in `[-126, 127]`."""
    return ((127 + exponent) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def load_query_lines(r, item, first):
    """Features `[first, first + LINE)` of an item's queries, `[BLOCK_H, LINE]` fp32."""
    pointers, live = query_pointers(r, item, first, LINE)
    return gl.load(pointers, mask=gl.expand_dims(live, 1), other=0.0).to(gl.float32)


@gluon.jit
def half_to_scaled_fp16(r, half, place, item, inverse, FIRST: gl.constexpr):
    """Features from FIRST on of an item's queries times ``inverse`` `[BLOCK_H, 1]`."""
    target = reinterpret(half, gl.float16, [PLACES * LINES, BLOCK_H, LINE], OPERAND)
    for line in range(LINES + zero(item)):
        x = load_query_lines(r, item, FIRST + line * LINE) * inverse
        target.index(place * LINES + line).store(x.to(gl.float16))


@gluon.jit
def query_to_scaled_fp16(r, s, item, place):
    """Queries over a power of two per head, which brings the largest element below 2^15.

    Returns:
        the powers `[BLOCK_H]`.
    """
    largest = gl.zeros([BLOCK_H], gl.float32, layout=gl.SliceLayout(1, VECTORS))
    # Not to be unrolled: code that seldom runs would push the rest out of the cache.
    for line in range(2 * LINES + zero(item)):
        largest = gl.maximum(largest, gl.max(gl.abs(load_query_lines(r, item, line * LINE)), 1))
    exponent = ((largest.to(gl.int32, bitcast=True) >> 23) & 255) - 127 - 14
    exponent = gl.minimum(gl.maximum(exponent, -126), 126)
    inverse = gl.expand_dims(power_of_two(-exponent), 1)
    half_to_scaled_fp16(r, s.left, place, item, inverse, 0)
    half_to_scaled_fp16(r, s.right, place, item, inverse, HALF)
    return power_of_two(exponent)


@gluon.jit
def fetch_query_half(r, half, item, place, FIRST: gl.constexpr):
    """Start copying features from FIRST on of an item's queries into a place."""
    pointers, live = query_pointers(r, item, FIRST, HALF)
    target = reinterpret(half, gl.bfloat16, [PLACES, BLOCK_H, HALF], OPERAND)
    fetch(target.index(place), pointers, live)


@gluon.jit
def query_scale(r, s, item, place, LAYOUT: gl.constexpr):
    """What the queries of each head have been divided by `[BLOCK_H]`; mostly 1."""
    scale = gl.full([BLOCK_H], 1.0, gl.float32, layout=LAYOUT)
    largest = gl.maximum(s.largest_left.load(EXPONENTS), s.largest_right.load(EXPONENTS))
    if not fits_fp16(gl.max(largest, 0)):
        scale = gl.convert_layout(query_to_scaled_fp16(r, s, item, place), LAYOUT)
    return scale


@gluon.jit
def bring_query_half(r, half, full, empty, item, place, step, FIRST: gl.constexpr):
    """Start copying features from FIRST on of an item's queries into a place that has to be free.

    Args:
        half, full, empty: left or right, and its barriers.
    """
    wait_empty(empty, step)
    fetch_query_half(r, half, item, place, FIRST)
    fill_by_copies(full, step)


@gluon.jit
def step_behind(r, s, item, next_item, q_place, place, step):
    """The step behind a tile of an item, and its places; brings queries if it is for ``next_item``.

    Returns:
        place of the queries, place of the next tile, step of the next tile.
    """
    place = other_place(q_place, place)
    step += 1
    if (next_item != item) & (next_item < r.n_items):
        # The half first whose place is free first.
        if r.QUANTIZED:
            bring_query_half(r, s.right, s.full_right, s.empty_right, next_item, place, step, HALF)
            bring_query_half(r, s.left, s.full_left, s.empty_left, next_item, place, step, 0)
        else:
            bring_query_half(r, s.left, s.full_left, s.empty_left, next_item, place, step, 0)
            bring_query_half(r, s.right, s.full_right, s.empty_right, next_item, place, step, HALF)
        q_place, place = place, q_place
        step += 1
    return q_place, place, step
