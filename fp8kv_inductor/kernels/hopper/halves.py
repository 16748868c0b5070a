"""The two groups that compute: scores, weights and the two halves of the output."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fp8kv_inductor.kernels.hopper.gather import tile_exponent
from fp8kv_inductor.kernels.hopper.items import item_place, item_tiles, load_count
from fp8kv_inductor.kernels.hopper.layouts import ACC, BLOCK_H, HALF, OUT, SCORES, TILE
from fp8kv_inductor.kernels.hopper.query import fetch_query, prepare_query, prepare_right_query

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
MINUS_INF = gl.constexpr(-float("inf"))


@gluon.jit
def first_half_scores(s, slot, phase):
    """Start scores over the left features, once they are there.

    The proxy fence sits behind the wait, not in ``gather``: it compiles to a barrier that waits for
    all outstanding loads of the thread.
    """
    scores = gl.zeros([BLOCK_H, TILE], gl.float32, layout=SCORES)
    mbarrier.wait(s.full_left.index(slot), phase)
    fence_async_shared()
    rows = s.rows_left.index(slot).permute([1, 0])
    return warpgroup_mma(s.q_left, rows, scores, use_acc=False, is_async=True)


@gluon.jit
def second_half_scores(s, scores, slot, phase):
    """Add the scores over the right features."""
    mbarrier.wait(s.full_right.index(slot), phase)
    fence_async_shared()
    return warpgroup_mma(s.q_right, s.rows_right.index(slot).permute([1, 0]), scores, is_async=True)


@gluon.jit
def softmax(r, s, scores, m, l, scale, it):  # noqa: E741
    """Weights of a tile, in base 2, and the running maximum and sum.

    Returns:
        p `[BLOCK_H, TILE]` times 2^exponent of the tile; what to multiply accumulators with; m; l.
    """
    rows = s.rows.index(it & 3).load(gl.SliceLayout(0, SCORES))
    scores = gl.where(gl.expand_dims(rows >= 0, 0), scores, MINUS_INF)
    exponent = 0.0
    if r.QUANTIZED:
        exponent = tile_exponent(s.exponents.index(it & 3)).to(gl.float32)
        scale *= gl.exp2(exponent)
    new_m = gl.maximum(m, gl.max(scores, 1) * scale)
    # While nothing was live, -inf - -inf must not become NaN.
    shift = gl.where(new_m == MINUS_INF, 0.0, new_m)
    p = gl.exp2(scores * gl.expand_dims(scale, 1) - gl.expand_dims(shift - exponent, 1))
    rescale = gl.exp2(m - shift)
    l = l * rescale + gl.sum(p, 1) * gl.exp2(-exponent)  # noqa: E741
    return p.to(s.p.dtype), rescale, new_m, l


@gluon.jit
def send(s, p, rescale, sent):
    """Hand P and the factors to ``right``."""
    mbarrier.wait(s.p_empty, (sent & 1) ^ 1)
    s.p.store(p)
    s.factor.store(rescale)
    fence_async_shared()
    mbarrier.arrive(s.p_full, count=1)


@gluon.jit
def normalize(r, m, l, heads):  # noqa: E741
    """What to multiply the accumulator with, and the natural log of the sum; see ``finish``."""
    if r.SPLITS == 1:
        sink = gl.load(r.sink + heads * r.stride_sink, mask=heads < r.N_HEADS, other=0.0) * LOG2_E
    else:
        sink = gl.full_like(m, MINUS_INF)
    top = gl.maximum(m, sink)
    shift = gl.where(top == MINUS_INF, 0.0, top)
    weight = gl.exp2(m - shift)
    total = l * weight + gl.exp2(sink - shift)
    empty = (total == 0.0) | (sink == -MINUS_INF)
    return gl.where(empty, 0.0, weight / total), (m + gl.log2(l)) * LN_2


@gluon.jit
def rotate_back(r, x, token):
    """Inverse rope of the last 2 * ROPE_PAIRS features of `[BLOCK_H, HALF]`, interleaved pairs."""
    x = x.to(r.out.dtype.element_ty).to(gl.float32)
    even, odd = gl.split(gl.reshape(x, [BLOCK_H, HALF // 2, 2]))
    pair = gl.arange(0, HALF // 2, layout=gl.SliceLayout(0, even.type.layout))
    pair -= HALF // 2 - r.ROPE_PAIRS
    cos = gl.load(r.cos + token.to(gl.int64) * r.stride_cos + pair, mask=pair >= 0, other=1.0)
    sin = gl.load(r.sin + token.to(gl.int64) * r.stride_sin + pair, mask=pair >= 0, other=0.0)
    cos, sin = gl.expand_dims(cos, 0), gl.expand_dims(sin, 0)
    tail = gl.expand_dims(pair >= 0, 0)
    turned_even = gl.where(tail, even * cos + odd * sin, even)
    turned_odd = gl.where(tail, odd * cos - even * sin, odd)
    x = gl.reshape(gl.join(turned_even, turned_odd), [BLOCK_H, HALF])
    return gl.convert_layout(x, ACC, assert_trivial=True)


@gluon.jit
def finish_half(r, acc, factor, item, FIRST: gl.constexpr):
    """Half of the features of an item's output, normalised and in the output's dtype."""
    x = acc * gl.expand_dims(factor, 1)
    if r.ROPE_PAIRS > 0 and FIRST > 0:
        token, _, _ = item_place(r, item)
        x = rotate_back(r, x, token)
    LAYOUT: gl.constexpr = OUT if r.out.dtype.element_ty == gl.bfloat16 else ACC
    return gl.convert_layout(x.to(r.out.dtype.element_ty), LAYOUT)


@gluon.jit
def store_half(r, x, item, FIRST: gl.constexpr):
    """Write what ``finish_half`` gives; nothing past the last item."""
    LAYOUT: gl.constexpr = x.type.layout
    token, head, split = item_place(r, item)
    heads = gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, LAYOUT))
    features = FIRST + gl.arange(0, HALF, layout=gl.SliceLayout(0, LAYOUT))
    row = ((token.to(gl.int64) * r.N_HEADS + head) * r.SPLITS + split) * (2 * HALF)
    offsets = gl.expand_dims(heads * (r.SPLITS * 2 * HALF), 1) + gl.expand_dims(features, 0)
    exists = (heads < r.N_HEADS - head) & (item < r.n_items)
    gl.store(r.out + row + offsets, x, mask=gl.expand_dims(exists, 1))


@gluon.jit
def weigh(r, s, scores, acc, m, l, scale, it, sent):  # noqa: E741
    """Turn the scores of a tile into weights, hand them to ``right``, and start acc += P rows.

    Returns:
        the accumulator under way; m; l.
    """
    p, rescale, m, l = softmax(r, s, scores, m, l, scale, it)  # noqa: E741
    send(s, p, rescale, sent)
    acc *= gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, ACC)), 1)
    return warpgroup_mma(s.p, s.rows_left.index(it & 1), acc, is_async=True), m, l


@gluon.jit
def left_half(r, s):
    """Scores, softmax, and the left half of the output."""
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    ACC_ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    item = gl.program_id(0)
    fetch_query(r, s.q_left, item, 0)
    count = load_count(r, item)
    it = 0
    sent = 0
    done = 0
    # The output of the item before: it is written while the first scores are on their way.
    x = gl.zeros([BLOCK_H, HALF], gl.bfloat16, layout=OUT)
    last_item = r.n_items
    while item < r.n_items:
        slot = it & 1
        phase = (it >> 1) & 1
        scale = prepare_query(r, s, item, done)
        started = second_half_scores(s, first_half_scores(s, slot, phase), slot, phase)
        if r.SPLITS == 1:
            store_half(r, x, last_item, 0)
        scores = warpgroup_mma_wait(0, deps=[started])
        tiles = item_tiles(r, item, count)
        token, head, split = item_place(r, item)
        next_item = item + gl.num_programs(0)
        count = load_count(r, next_item)
        m = gl.full([BLOCK_H], MINUS_INF, gl.float32, layout=ROW)
        l = gl.zeros([BLOCK_H], gl.float32, layout=ROW)  # noqa: E741
        acc = gl.zeros([BLOCK_H, HALF], gl.float32, layout=ACC)
        for _ in range(tiles - 1):
            slot = it & 1
            weighted, m, l = weigh(r, s, scores, acc, m, l, scale, it, sent)  # noqa: E741
            sent += 1
            it += 1
            phase = (it >> 1) & 1
            started = first_half_scores(s, slot ^ 1, phase)
            # Give the ring slot back as soon as its last reader here is through.
            acc = warpgroup_mma_wait(1, deps=[weighted])
            mbarrier.arrive(s.empty_left.index(slot), count=1)
            started = second_half_scores(s, started, slot ^ 1, phase)
            scores = warpgroup_mma_wait(0, deps=[started])
        slot = it & 1
        fetch_query(r, s.q_left, next_item, 0)
        weighted, m, l = weigh(r, s, scores, acc, m, l, scale, it, sent)  # noqa: E741
        sent += 1
        heads = head + gl.arange(0, BLOCK_H, layout=ROW)
        factor, lse = normalize(r, m, l, heads)
        mbarrier.wait(s.p_empty, (sent & 1) ^ 1)
        s.factor.store(factor)
        mbarrier.arrive(s.p_full, count=1)
        sent += 1
        row = (token.to(gl.int64) * r.N_HEADS + heads) * r.SPLITS + split
        gl.store(r.lse + row, lse, mask=heads < r.N_HEADS)
        acc = warpgroup_mma_wait(0, deps=[weighted])
        mbarrier.arrive(s.empty_left.index(slot), count=1)
        finished = finish_half(r, acc, gl.convert_layout(factor, ACC_ROW), item, 0)
        if r.SPLITS == 1:
            x = finished
        else:
            store_half(r, finished, item, 0)
        it += 1
        done += 1
        last_item = item
        item = next_item
    if r.SPLITS == 1:
        store_half(r, x, last_item, 0)
    async_copy.wait_group(0)


@gluon.jit
def right_half(r, s):
    """The right half of the queries and of the output."""
    ACC_ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    item = gl.program_id(0)
    fetch_query(r, s.q_right, item, HALF)
    count = load_count(r, item)
    it = 0
    received = 0
    x = gl.zeros([BLOCK_H, HALF], gl.bfloat16, layout=OUT)
    last_item = r.n_items
    if not r.QUANTIZED:
        prepare_right_query(r, s)
    while item < r.n_items:
        if r.QUANTIZED:
            prepare_right_query(r, s)
        if r.SPLITS == 1:
            store_half(r, x, last_item, HALF)
        tiles = item_tiles(r, item, count)
        next_item = item + gl.num_programs(0)
        count = load_count(r, next_item)
        acc = gl.zeros([BLOCK_H, HALF], gl.float32, layout=ACC)
        for tile in range(tiles):
            slot = it & 1
            mbarrier.wait(s.p_full, received & 1)
            if tile == tiles - 1:
                # The scores of the last tile are done, so the query has been read.
                fetch_query(r, s.q_right, next_item, HALF)
            acc *= gl.expand_dims(s.factor.load(ACC_ROW), 1)
            weighted = warpgroup_mma(s.p, s.rows_right.index(slot), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[weighted])
            mbarrier.arrive(s.empty_right.index(slot), count=1)
            mbarrier.arrive(s.p_empty, count=1)
            it += 1
            received += 1
        if not r.QUANTIZED:
            # left waits for it. A query that has to be converted needs the accumulator's registers.
            prepare_right_query(r, s)
        mbarrier.wait(s.p_full, received & 1)
        factor = s.factor.load(ACC_ROW)
        mbarrier.arrive(s.p_empty, count=1)
        received += 1
        finished = finish_half(r, acc, factor, item, HALF)
        if r.SPLITS == 1:
            x = finished
        else:
            store_half(r, finished, item, HALF)
        last_item = item
        item = next_item
    if r.SPLITS == 1:
        store_half(r, x, last_item, HALF)
    async_copy.wait_group(0)
