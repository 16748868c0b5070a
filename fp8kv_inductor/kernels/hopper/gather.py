"""The way of rows into the ring, tile by tile: the group that gathers, and what ``right`` does."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
)

from fp8kv_inductor.kernels.hopper.items import (
    fetch,
    item_columns,
    load_count,
    load_rows,
    next_tile,
    row_pointers,
)
from fp8kv_inductor.kernels.hopper.layouts import (
    BLOCK,
    CHUNK,
    CHUNK_BLOCKS,
    CHUNK_ROWS,
    CHUNK_SCALES,
    EXPONENTS,
    HALF,
    N_BLOCKS,
    OPERAND_WORDS,
    SAFE_SCALE_EXPONENT,
    SCALES,
    SCALES_U8,
    TILE,
    VECTORS,
)


@gluon.jit
def in_blocks(words):
    """Codes of a chunk `[32, 64]` words as `[32, 8, 2, 4]`: row, block, half block, word."""
    words = gl.reshape(words, [CHUNK_ROWS, N_BLOCKS // 2, 2, BLOCK // 8])
    return gl.convert_layout(words, CHUNK_BLOCKS, assert_trivial=True)


@gluon.jit
def dequantize(words, scales, exponent):
    """Rows of a chunk times 2^-exponent.

    Args:
        words: what ``in_blocks`` gives.
        scales: `[32, 8]` in CHUNK_SCALES.

    Returns:
        `[32, 128]` words of two fp16 each.
    """
    if scales.dtype == gl.uint8:
        # From the exponent field of fp32 to that of fp16; a dead row's 0 stays 0.
        scales = (gl.maximum(scales.to(gl.int32) - 112, 0) << 10).to(gl.int16)
        scales = scales.to(gl.float16, bitcast=True)
    down = ((15 - exponent) << 10).to(gl.int16).to(gl.float16, bitcast=True)
    twice = (scales * down).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    twice = gl.expand_dims(gl.expand_dims(twice * 0x10001, 2), 3)
    low, high = gl.inline_asm_elementwise(
        """{
            .reg .b16 a, b;
            .reg .b32 c, d;
            mov.b32 {a, b}, $2;
            cvt.rn.f16x2.e4m3x2 c, a;
            cvt.rn.f16x2.e4m3x2 d, b;
            mul.rn.f16x2 $0, c, $3;
            mul.rn.f16x2 $1, d, $3;
        }""",
        "=&r,=&r,r,r",
        [words, twice],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    return gl.reshape(gl.join(low, high), [CHUNK_ROWS, HALF // 2])


@gluon.jit
def put_rows(s, it, rows, column):
    """Leave for the other groups where the rows of tile ``it`` are."""
    s.rows.index(it & 3).store(rows)
    s.columns.index(it & 3).store(gl.full([1], column, gl.int32, layout=rows.type.layout))


@gluon.jit
def put_exponents(target, scales):
    """By how much the largest scale of each of 4 x 16 rows exceeds ``SAFE_SCALE_EXPONENT``.

    One number per warp: the warps need not meet for it.
    """
    scales = scales.load(SCALES)
    if scales.dtype == gl.uint8:
        bits = scales.to(gl.int32)
    else:
        bits = scales.to(gl.int16, bitcast=True).to(gl.int32)
    largest = gl.max(gl.reshape(bits, [4, TILE * N_BLOCKS // 4]), 1)
    exponents = largest - 127 if scales.dtype == gl.uint8 else (largest >> 10) - 15
    target.store(gl.maximum(exponents - SAFE_SCALE_EXPONENT, 0))


@gluon.jit
def tile_exponent(exponents):
    """The largest of what ``put_exponents`` put."""
    return gl.max(exponents.load(EXPONENTS), 0)


@gluon.jit
def gather_left(r, s, raw_first, raw_second, raw_scales):
    """The left half of the rows of every tile, dequantized; two chunks in flight.

    What ``right`` needs to know of a tile is there before the tile in front of it is full: where
    its rows are two tiles ahead, their exponent one. Scales come one chunk earlier than the codes
    that they belong to.
    """
    SCALE_COPY: gl.constexpr = SCALES_U8 if raw_scales.dtype == gl.uint8 else SCALES
    ROWS: gl.constexpr = gl.SliceLayout(1, SCALE_COPY)
    ROW: gl.constexpr = gl.SliceLayout(1, CHUNK)
    WORDS: gl.constexpr = HALF // 4
    ring = s.rows_left._reinterpret(gl.int32, [2, TILE, HALF // 2], OPERAND_WORDS)

    item = gl.program_id(0)
    column, end = item_columns(r, item, load_count(r, item))
    count = load_count(r, item + gl.num_programs(0))
    rows = load_rows(r, item, column, end, TILE, ROWS)
    ahead, ahead_column, end, count = next_tile(r, item, column, end, count)
    ahead_rows = load_rows(r, ahead, ahead_column, end, TILE, ROWS)
    later, later_column, end, count = next_tile(r, ahead, ahead_column, end, count)
    later_rows = load_rows(r, later, later_column, end, TILE, ROWS)
    put_rows(s, 0, rows, column)
    put_rows(s, 1, ahead_rows, ahead_column)
    mbarrier.arrive(s.started.index(0), count=1)
    pointers = row_pointers(r, rows, column, 0, N_BLOCKS, True, SCALE_COPY)
    fetch(raw_scales.index(0), pointers, rows >= 0)
    chunk = s.rows.index(0).slice(0, CHUNK_ROWS).load(ROW)
    fetch(raw_first, row_pointers(r, chunk, column, 0, WORDS, False, CHUNK), chunk >= 0)
    async_copy.commit_group()
    chunk = s.rows.index(0).slice(CHUNK_ROWS, CHUNK_ROWS).load(ROW)
    fetch(raw_second, row_pointers(r, chunk, column, 0, WORDS, False, CHUNK), chunk >= 0)
    pointers = row_pointers(r, ahead_rows, ahead_column, 0, N_BLOCKS, True, SCALE_COPY)
    fetch(raw_scales.index(1), pointers, ahead_rows >= 0)
    async_copy.commit_group()
    async_copy.wait_group(1)
    put_exponents(s.exponents.index(0), raw_scales.index(0))
    mbarrier.arrive(s.started.index(1), count=1)
    it = 0
    while item < r.n_items:
        slot = it & 1
        tile = ring.index(slot)
        next_rows = s.rows.index((it + 1) & 3)
        left_scales = raw_scales.index(slot).slice(0, N_BLOCKS // 2, dim=1)
        exponent = tile_exponent(s.exponents.index(it & 3))
        # Three tiles ahead, and put down an iteration later: nobody waits for these loads.
        last, last_column, end, count = next_tile(r, later, later_column, end, count)
        last_rows = load_rows(r, last, last_column, end, TILE, ROWS)

        chunk = next_rows.slice(0, CHUNK_ROWS).load(ROW)
        pointers = row_pointers(r, chunk, ahead_column, 0, WORDS, False, CHUNK)
        async_copy.wait_group(1)
        words = in_blocks(raw_first.load(CHUNK))
        scales = left_scales.slice(0, CHUNK_ROWS).load(CHUNK_SCALES)
        fetch(raw_first, pointers, chunk >= 0)
        async_copy.commit_group()
        mbarrier.wait(s.empty_left.index(slot), ((it >> 1) & 1) ^ 1)
        tile.slice(0, CHUNK_ROWS).store(dequantize(words, scales, exponent))
        # Now left has used what it reads of the tile two back, so its places are free.
        put_rows(s, it + 2, later_rows, later_column)

        chunk = next_rows.slice(CHUNK_ROWS, CHUNK_ROWS).load(ROW)
        pointers = row_pointers(r, chunk, ahead_column, 0, WORDS, False, CHUNK)
        async_copy.wait_group(1)
        words = in_blocks(raw_second.load(CHUNK))
        scales = left_scales.slice(CHUNK_ROWS, CHUNK_ROWS).load(CHUNK_SCALES)
        fetch(raw_second, pointers, chunk >= 0)
        pointers = row_pointers(r, later_rows, later_column, 0, N_BLOCKS, True, SCALE_COPY)
        fetch(raw_scales.index(slot), pointers, later_rows >= 0)
        async_copy.commit_group()
        put_exponents(s.exponents.index((it + 1) & 3), raw_scales.index(slot ^ 1))
        tile.slice(CHUNK_ROWS, CHUNK_ROWS).store(dequantize(words, scales, exponent))
        mbarrier.arrive(s.full_left.index(slot), count=1)
        item = ahead
        ahead = later
        ahead_column = later_column
        later = last
        later_column = last_column
        later_rows = last_rows
        it += 1
    async_copy.wait_group(0)


@gluon.jit
def load_right_chunk(r, s, it, FIRST: gl.constexpr):
    """Codes and scales of the right half of 32 rows of tile ``it``, from row FIRST on."""
    HALF_BLOCKS: gl.constexpr = N_BLOCKS // 2
    column = gl.max(s.columns.index(it & 3).load(EXPONENTS), 0)
    rows = s.rows.index(it & 3).slice(FIRST, CHUNK_ROWS)
    chunk = rows.load(gl.SliceLayout(1, CHUNK))
    pointers = row_pointers(r, chunk, column, HALF // 4, HALF // 4, False, CHUNK)
    words = gl.load(pointers, mask=gl.expand_dims(chunk >= 0, 1), other=0)
    chunk = rows.load(gl.SliceLayout(1, CHUNK_SCALES))
    pointers = row_pointers(r, chunk, column, HALF_BLOCKS, HALF_BLOCKS, True, CHUNK_SCALES)
    return words, gl.load(pointers, mask=gl.expand_dims(chunk >= 0, 1), other=0)


@gluon.jit
def load_right(r, s, it):
    """Start loading the right half of tile ``it`` into registers."""
    first, first_scales = load_right_chunk(r, s, it, 0)
    second, second_scales = load_right_chunk(r, s, it, CHUNK_ROWS)
    return first, first_scales, second, second_scales


@gluon.jit
def put_right(s, loaded, it):
    """Dequantize what ``load_right`` loaded, and put it into the ring."""
    tile = s.rows_right._reinterpret(gl.int32, [2, TILE, HALF // 2], OPERAND_WORDS).index(it & 1)
    exponent = tile_exponent(s.exponents.index(it & 3))
    first, first_scales, second, second_scales = loaded
    tile.slice(0, CHUNK_ROWS).store(dequantize(in_blocks(first), first_scales, exponent))
    rows = dequantize(in_blocks(second), second_scales, exponent)
    tile.slice(CHUNK_ROWS, CHUNK_ROWS).store(rows)
    # Before the next loads start: it waits for all that are outstanding.
    fence_async_shared()
    mbarrier.arrive(s.full_right.index(it & 1), count=1)


@gluon.jit
def gather_plain(r, s):
    """bf16 rows of every tile, straight into the ring; a barrier counts the copies that arrived."""
    ROWS: gl.constexpr = gl.SliceLayout(1, VECTORS)
    item = gl.program_id(0)
    column, end = item_columns(r, item, load_count(r, item))
    count = load_count(r, item + gl.num_programs(0))
    rows = load_rows(r, item, column, end, TILE, ROWS)
    it = 0
    while item < r.n_items:
        slot = it & 1
        phase = ((it >> 1) & 1) ^ 1
        ahead, ahead_column, end, count = next_tile(r, item, column, end, count)
        ahead_rows = load_rows(r, ahead, ahead_column, end, TILE, ROWS)
        pointers = row_pointers(r, rows, column, 0, HALF, False, VECTORS)
        mbarrier.wait(s.empty_left.index(slot), phase)
        s.rows.index(it & 3).store(rows)
        fetch(s.rows_left.index(slot), pointers, rows >= 0)
        async_copy.mbarrier_arrive(s.full_left.index(slot))
        mbarrier.arrive(s.full_left.index(slot), count=1)
        mbarrier.wait(s.empty_right.index(slot), phase)
        fetch(s.rows_right.index(slot), pointers + HALF, rows >= 0)
        async_copy.mbarrier_arrive(s.full_right.index(slot))
        mbarrier.arrive(s.full_right.index(slot), count=1)
        item = ahead
        column = ahead_column
        rows = ahead_rows
        it += 1
    async_copy.commit_group()
    async_copy.wait_group(0)
