"""The group that gathers rows, tile by tile, and dequantizes them."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from fp8kv_inductor.kernels.hopper.items import (
    fetch,
    item_columns,
    load_count,
    load_rows,
    next_tile,
    row_pointers,
)
from fp8kv_inductor.kernels.hopper.layouts import (
    CHUNK,
    CHUNK_BLOCKS,
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
from fp8kv_inductor.kernels.hopper.renamed import reinterpret


@gluon.jit
def take(raw, scales):
    """Codes `[32, 8, 2, 4]` words and scales `[32, 8]` of a chunk, into registers."""
    words = gl.reshape(raw.load(CHUNK), [32, 8, 2, 4])
    words = gl.convert_layout(words, CHUNK_BLOCKS, assert_trivial=True)
    return words, scales.load(gl.SliceLayout(2, gl.SliceLayout(3, CHUNK_BLOCKS)))


@gluon.jit
def dequantize(words, scales, exponent):
    """What ``take`` gives, times 2^-exponent, as `[32, 128]` words of two fp16 each."""
    if scales.dtype == gl.uint8:
        # The exponent field of an fp32 number; a dead row's 0 stays 0, small ones get subnormal.
        scales = (scales.to(gl.int32) << 23).to(gl.float32, bitcast=True).to(gl.float16)
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
    return gl.reshape(gl.join(low, high), [32, 128])


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
def gather_quantized(r, s, raw_first, raw_second, raw_scales):
    """Rows of every tile, dequantized; chunks of 32 rows x half a row, two in flight.

    Scales come one chunk earlier than the codes that they belong to.
    """
    SCALE_COPY: gl.constexpr = SCALES_U8 if raw_scales.dtype == gl.uint8 else SCALES
    ROWS: gl.constexpr = gl.SliceLayout(1, SCALE_COPY)
    CHUNK_ROWS: gl.constexpr = gl.SliceLayout(1, CHUNK)
    WORDS: gl.constexpr = HALF // 4
    left = reinterpret(s.rows_left, gl.int32, [2, TILE, HALF // 2], OPERAND_WORDS)
    right = reinterpret(s.rows_right, gl.int32, [2, TILE, HALF // 2], OPERAND_WORDS)

    item = gl.program_id(0)
    column, end = item_columns(r, item, load_count(r, item))
    rows = load_rows(r, item, column, end, 0, TILE, ROWS)
    first_rows = load_rows(r, item, column, end, 0, 32, CHUNK_ROWS)
    second_rows = load_rows(r, item, column, end, 32, 32, CHUNK_ROWS)
    count = load_count(r, item + gl.num_programs(0))
    ahead, ahead_column, end, count = next_tile(r, item, column, end, count)
    ahead_rows = load_rows(r, ahead, ahead_column, end, 0, TILE, ROWS)
    ahead_first_rows = load_rows(r, ahead, ahead_column, end, 0, 32, CHUNK_ROWS)
    ahead_second_rows = load_rows(r, ahead, ahead_column, end, 32, 32, CHUNK_ROWS)
    pointers = row_pointers(r, rows, column, 0, N_BLOCKS, True, SCALE_COPY)
    fetch(raw_scales.index(0), pointers, rows >= 0)
    pointers = row_pointers(r, first_rows, column, 0, WORDS, False, CHUNK)
    fetch(raw_first, pointers, first_rows >= 0)
    async_copy.commit_group()
    pointers = row_pointers(r, second_rows, column, 0, WORDS, False, CHUNK)
    fetch(raw_second, pointers, second_rows >= 0)
    async_copy.commit_group()
    s.rows.index(0).store(rows)
    async_copy.wait_group(1)
    put_exponents(s.exponents.index(0), raw_scales.index(0))
    it = 0
    while item < r.n_items:
        slot = it & 1
        phase = ((it >> 1) & 1) ^ 1
        scales, next_scales = raw_scales.index(slot), raw_scales.index(slot ^ 1)
        exponent = tile_exponent(s.exponents.index(it & 3))
        # Two tiles ahead: nobody waits for these loads in this iteration.
        later, later_column, end, count = next_tile(r, ahead, ahead_column, end, count)
        later_rows = load_rows(r, later, later_column, end, 0, TILE, ROWS)
        later_first_rows = load_rows(r, later, later_column, end, 0, 32, CHUNK_ROWS)
        later_second_rows = load_rows(r, later, later_column, end, 32, 32, CHUNK_ROWS)

        async_copy.wait_group(1)
        words, chunk_scales = take(raw_first, scales.slice(0, 32).slice(0, 8, dim=1))
        pointers = row_pointers(r, first_rows, column, WORDS, WORDS, False, CHUNK)
        fetch(raw_first, pointers, first_rows >= 0)
        pointers = row_pointers(r, ahead_rows, ahead_column, 0, N_BLOCKS, True, SCALE_COPY)
        fetch(next_scales, pointers, ahead_rows >= 0)
        async_copy.commit_group()
        mbarrier.wait(s.empty_left.index(slot), phase)
        left.index(slot).slice(0, 32).store(dequantize(words, chunk_scales, exponent))

        async_copy.wait_group(1)
        words, chunk_scales = take(raw_second, scales.slice(32, 32).slice(0, 8, dim=1))
        pointers = row_pointers(r, second_rows, column, WORDS, WORDS, False, CHUNK)
        fetch(raw_second, pointers, second_rows >= 0)
        async_copy.commit_group()
        left.index(slot).slice(32, 32).store(dequantize(words, chunk_scales, exponent))
        mbarrier.arrive(s.full_left.index(slot), count=1)

        async_copy.wait_group(1)
        words, chunk_scales = take(raw_first, scales.slice(0, 32).slice(8, 8, dim=1))
        pointers = row_pointers(r, ahead_first_rows, ahead_column, 0, WORDS, False, CHUNK)
        fetch(raw_first, pointers, ahead_first_rows >= 0)
        async_copy.commit_group()
        # left is at most one tile behind: what it reads of that tile stays.
        s.rows.index((it + 1) & 3).store(ahead_rows)
        put_exponents(s.exponents.index((it + 1) & 3), next_scales)
        mbarrier.wait(s.empty_right.index(slot), phase)
        right.index(slot).slice(0, 32).store(dequantize(words, chunk_scales, exponent))

        async_copy.wait_group(1)
        words, chunk_scales = take(raw_second, scales.slice(32, 32).slice(8, 8, dim=1))
        pointers = row_pointers(r, ahead_second_rows, ahead_column, 0, WORDS, False, CHUNK)
        fetch(raw_second, pointers, ahead_second_rows >= 0)
        async_copy.commit_group()
        right.index(slot).slice(32, 32).store(dequantize(words, chunk_scales, exponent))
        mbarrier.arrive(s.full_right.index(slot), count=1)
        item = ahead
        column = ahead_column
        first_rows = ahead_first_rows
        second_rows = ahead_second_rows
        ahead = later
        ahead_column = later_column
        # Something has to be computed from what was loaded while no newer load is on its way: a
        # copy would be made in the next iteration and wait for that one's loads, too.
        ahead_rows = gl.maximum(later_rows, -1)
        ahead_first_rows = gl.maximum(later_first_rows, -1)
        ahead_second_rows = gl.maximum(later_second_rows, -1)
        it += 1
    async_copy.wait_group(0)


@gluon.jit
def gather_plain(r, s):
    """bf16 rows of every tile, straight into the ring; a barrier counts the copies that arrived."""
    ROWS: gl.constexpr = gl.SliceLayout(1, VECTORS)
    item = gl.program_id(0)
    column, end = item_columns(r, item, load_count(r, item))
    count = load_count(r, item + gl.num_programs(0))
    rows = load_rows(r, item, column, end, 0, TILE, ROWS)
    it = 0
    while item < r.n_items:
        slot = it & 1
        phase = ((it >> 1) & 1) ^ 1
        ahead, ahead_column, end, count = next_tile(r, item, column, end, count)
        ahead_rows = load_rows(r, ahead, ahead_column, end, 0, TILE, ROWS)
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
