"""The group that gathers rows, tile by tile, and dequantizes them."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from fp8kv_inductor.kernels.hopper.items import (
    fetch,
    first_tile,
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
from fp8kv_inductor.kernels.hopper.places import (
    PLACES,
    Q_PLACE,
    fill,
    fill_by_copies,
    wait_empty,
)
from fp8kv_inductor.kernels.hopper.query import step_behind
from fp8kv_inductor.kernels.hopper.renamed import reinterpret


@gluon.jit
def dequantize(codes, scales, exponent):
    """Codes `[32, 64]` words times their scales `[32, 8]` and 2^-exponent, as words of two fp16."""
    codes = gl.convert_layout(gl.reshape(codes, [32, 8, 2, 4]), CHUNK_BLOCKS, assert_trivial=True)
    scales = scales.load(gl.SliceLayout(2, gl.SliceLayout(3, CHUNK_BLOCKS)))
    if scales.dtype == gl.uint8:
        # The exponent field of an fp32 number; a dead row's 0 stays 0, small ones get subnormal.
        scales = (scales.to(gl.int32) << 23).to(gl.float32, bitcast=True).to(gl.float16)
    down = ((15 - exponent) << 10).to(gl.int16).to(gl.float16, bitcast=True)
    factors = (scales * down).to(gl.int16, bitcast=True)
    factors = gl.expand_dims(gl.expand_dims(factors, 2), 3)
    low, high = gl.inline_asm_elementwise(
        """{
            .reg .b16 a, b;
            .reg .b32 c, d, twice;
            mov.b32 {a, b}, $2;
            mov.b32 twice, {$3, $3};
            cvt.rn.f16x2.e4m3x2 c, a;
            cvt.rn.f16x2.e4m3x2 d, b;
            mul.rn.f16x2 $0, c, twice;
            mul.rn.f16x2 $1, d, twice;
        }""",
        "=&r,=&r,r,h",
        [codes, factors],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    return gl.reshape(gl.join(low, high), [32, 128])


@gluon.jit
def put_exponents(target, scales):
    """By how much the largest scale of 4 x 16 rows exceeds ``SAFE_SCALE_EXPONENT``, or less than 0.

    One number per warp: the warps need not meet for it.
    """
    scales = scales.load(SCALES)
    if scales.dtype == gl.uint8:
        bits = scales.to(gl.int32)
    else:
        bits = scales.to(gl.int16, bitcast=True).to(gl.int32)
    largest = gl.max(gl.reshape(bits, [4, TILE * N_BLOCKS // 4]), 1)
    exponents = largest - 127 if scales.dtype == gl.uint8 else (largest >> 10) - 15
    target.store(exponents - SAFE_SCALE_EXPONENT)


@gluon.jit
def tile_exponent(exponents):
    """The largest of what ``put_exponents`` put."""
    return gl.max(exponents.load(EXPONENTS), 0)


@gluon.jit
def chunk(r, rows, column, FIRST: gl.constexpr):
    """Pointers to the left half of 32 rows of a tile, and which of them are live `[32]`."""
    rows = rows.slice(FIRST, 32).load(gl.SliceLayout(1, CHUNK))
    pointers = row_pointers(r, rows, column, HALF // 4, False, CHUNK)
    return pointers, rows >= 0


@gluon.jit
def load_codes(pointers, live):
    """Codes `[32, 64]` words of a chunk; zeros in dead rows."""
    return gl.load(pointers, mask=gl.expand_dims(live, 1), other=0, cache_modifier=".cg")


@gluon.jit
def gather_quantized(r, s, raw_first, raw_second, raw_scales):
    """Rows of every tile, dequantized, in chunks of 32 rows x half a row.

    The codes of the next tile are on their way from the moment when those of this one have been
    taken: the right halves to registers, the left ones to shared memory, neither of which has room
    for both.
    """
    SCALE_COPY: gl.constexpr = SCALES_U8 if raw_scales.dtype == gl.uint8 else SCALES
    ROWS: gl.constexpr = gl.SliceLayout(1, SCALE_COPY)
    WORDS: gl.constexpr = HALF // 4
    left = reinterpret(s.left, gl.int32, [PLACES, TILE, HALF // 2], OPERAND_WORDS)
    right = reinterpret(s.right, gl.int32, [PLACES, TILE, HALF // 2], OPERAND_WORDS)

    item = gl.program_id(0)
    column, end, rows = first_tile(r, item, ROWS)
    count = load_count(r, item + gl.num_programs(0))
    s.rows.index(0).store(rows)
    pointers = row_pointers(r, rows, column, N_BLOCKS, True, SCALE_COPY)
    fetch(raw_scales.index(0), pointers, rows >= 0)
    async_copy.commit_group()
    first_pointers, first_live = chunk(r, s.rows.index(0), column, 0)
    second_pointers, second_live = chunk(r, s.rows.index(0), column, 32)
    first = load_codes(first_pointers + WORDS, first_live)
    second = load_codes(second_pointers + WORDS, second_live)
    fetch(raw_first, first_pointers, first_live)
    async_copy.commit_group()
    fetch(raw_second, second_pointers, second_live)
    async_copy.commit_group()
    ahead, ahead_column, end, count = next_tile(r, item, column, end, count)
    ahead_rows = load_rows(r, ahead, ahead_column, end, ROWS)
    async_copy.wait_group(2)
    put_exponents(s.exponents.index(0), raw_scales.index(0))
    it = 0
    step = 0
    place = 0
    q_place = Q_PLACE
    while item < r.n_items:
        scales, next_scales = raw_scales.index(it & 1), raw_scales.index((it & 1) ^ 1)
        # left is at most one tile behind: what it reads of that tile stays.
        next_rows = s.rows.index((it + 1) & 3)
        next_rows.store(ahead_rows)
        exponent = gl.maximum(tile_exponent(s.exponents.index(it & 3)), 0)
        pointers = row_pointers(r, ahead_rows, ahead_column, N_BLOCKS, True, SCALE_COPY)
        fetch(next_scales, pointers, ahead_rows >= 0)
        async_copy.commit_group()
        # Two tiles ahead: nobody waits for these loads in this iteration.
        later, later_column, end, count = next_tile(r, ahead, ahead_column, end, count)
        later_rows = load_rows(r, later, later_column, end, ROWS)

        wait_empty(s.empty_right, step)
        part = scales.slice(0, 32).slice(8, 8, dim=1)
        right.index(place).slice(0, 32).store(dequantize(first, part, exponent))
        first_pointers, first_live = chunk(r, next_rows, ahead_column, 0)
        first = load_codes(first_pointers + WORDS, first_live)
        part = scales.slice(32, 32).slice(8, 8, dim=1)
        right.index(place).slice(32, 32).store(dequantize(second, part, exponent))
        second_pointers, second_live = chunk(r, next_rows, ahead_column, 32)
        second = load_codes(second_pointers + WORDS, second_live)
        fill(s.full_right, step)

        async_copy.wait_group(2)
        codes = raw_first.load(CHUNK)
        fetch(raw_first, first_pointers, first_live)
        async_copy.commit_group()
        wait_empty(s.empty_left, step)
        part = scales.slice(0, 32).slice(0, 8, dim=1)
        left.index(place).slice(0, 32).store(dequantize(codes, part, exponent))
        async_copy.wait_group(2)
        codes = raw_second.load(CHUNK)
        fetch(raw_second, second_pointers, second_live)
        async_copy.commit_group()
        part = scales.slice(32, 32).slice(0, 8, dim=1)
        left.index(place).slice(32, 32).store(dequantize(codes, part, exponent))
        fill(s.full_left, step)

        async_copy.wait_group(2)
        put_exponents(s.exponents.index((it + 1) & 3), next_scales)
        q_place, place, step = step_behind(r, s, item, ahead, q_place, place, step)
        item = ahead
        ahead = later
        ahead_column = later_column
        # Something has to be computed from what was loaded while no newer load is on its way: a
        # copy would be made in the next iteration and wait for that one's loads, too.
        ahead_rows = gl.maximum(later_rows, -1)
        it += 1
    async_copy.wait_group(0)


@gluon.jit
def gather_plain(r, s):
    """bf16 rows of every tile, straight into the ring; a barrier counts the copies that arrived."""
    ROWS: gl.constexpr = gl.SliceLayout(1, VECTORS)
    item = gl.program_id(0)
    column, end, rows = first_tile(r, item, ROWS)
    count = load_count(r, item + gl.num_programs(0))
    it = 0
    step = 0
    place = 0
    q_place = Q_PLACE
    while item < r.n_items:
        ahead, ahead_column, end, count = next_tile(r, item, column, end, count)
        ahead_rows = load_rows(r, ahead, ahead_column, end, ROWS)
        pointers = row_pointers(r, rows, column, HALF, False, VECTORS)
        wait_empty(s.empty_left, step)
        s.rows.index(it & 3).store(rows)
        fetch(s.left.index(place), pointers, rows >= 0)
        fill_by_copies(s.full_left, step)
        wait_empty(s.empty_right, step)
        fetch(s.right.index(place), pointers + HALF, rows >= 0)
        fill_by_copies(s.full_right, step)
        q_place, place, step = step_behind(r, s, item, ahead, q_place, place, step)
        item = ahead
        column = ahead_column
        rows = ahead_rows
        it += 1
    async_copy.commit_group()
    async_copy.wait_group(0)
