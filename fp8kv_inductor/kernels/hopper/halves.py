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
from fp8kv_inductor.kernels.hopper.layouts import (
    ACC,
    BLOCK_H,
    HALF,
    OUT,
    SCORES,
    TILE,
    WEIGHTS_OPERAND,
)
from fp8kv_inductor.kernels.hopper.query import (
    await_query,
    fetch_query,
    group_barrier,
    prepare_query,
)

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
MINUS_INF = gl.constexpr(-float("inf"))


@gluon.jit
def parts(s, HALF_INDEX: gl.constexpr):
    """Queries, ring of rows and its barriers of one half of the features."""
    if HALF_INDEX == 0:
        return s.q_left.index(0), s.rows_left, s.empty_left
    else:
        return s.q_right.index(0), s.rows_right, s.empty_right


@gluon.jit
def start_scores(s, it):
    """Start the scores of a tile, once its rows are there.

    The proxy fence sits behind the wait, not in ``gather``: it compiles to a barrier that waits for
    all outstanding loads of the thread.
    """
    slot = it & 1
    phase = (it >> 1) & 1
    scores = gl.zeros([BLOCK_H, TILE], gl.float32, layout=SCORES)
    mbarrier.wait(s.full_left.index(slot), phase)
    mbarrier.wait(s.full_right.index(slot), phase)
    fence_async_shared()
    left, right = s.rows_left.index(slot), s.rows_right.index(slot)
    # An index that is 0, but not to the compiler: it would compute 32 descriptors of the queries in
    # front of the loop, for which there are no registers.
    zero = it >> 30
    scores = warpgroup_mma(
        s.q_left.index(zero), left.permute([1, 0]), scores, use_acc=False, is_async=True
    )
    return warpgroup_mma(s.q_right.index(zero), right.permute([1, 0]), scores, is_async=True)


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
def hand_over(s, p, rescale, m, HALF_INDEX: gl.constexpr):
    """Give the other group the weights of a tile, its factors and the maximum.

    It has read what was there before it handed over its own.
    """
    s.p.store(p)
    s.factor.store(rescale)
    s.m.store(m)
    fence_async_shared()
    mbarrier.arrive(s.handed.index(HALF_INDEX), count=1)


@gluon.jit
def weigh_others(s, ring, acc, l, it, HALF_INDEX: gl.constexpr):  # noqa: E741
    """Start acc += P rows of a tile whose weights the other group has.

    Returns:
        the accumulator under way; m; l.
    """
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    mbarrier.wait(s.handed.index(1 - HALF_INDEX), (it >> 1) & 1)
    fence_async_shared()
    rescale = s.factor.load(ROW)
    m = s.m.load(ROW)
    l *= rescale  # noqa: E741
    acc *= gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, ACC)), 1)
    return warpgroup_mma(s.p, ring.index(it & 1), acc, is_async=True), m, l


@gluon.jit
def weigh_own(
    r,
    s,
    scores,
    acc,
    m,
    l,  # noqa: E741
    scale,
    it,
    is_last,
    next_item,
    HALF_INDEX: gl.constexpr,
):
    """Turn the scores of a tile into weights, hand them over, and acc += P rows."""
    q, ring, empty = parts(s, HALF_INDEX)
    p, rescale, m, l = softmax(r, s, scores, m, l, scale, it)  # noqa: E741
    hand_over(s, p, rescale, m, HALF_INDEX)
    if is_last:
        # The last scores are done: the query has been read.
        fetch_query(r, q, next_item, HALF_INDEX * HALF)
    acc *= gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, ACC)), 1)
    p = gl.convert_layout(p, WEIGHTS_OPERAND)
    acc = warpgroup_mma(p, ring.index(it & 1), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(it & 1), count=1)
    return acc, m, l


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
def half(r, s, HALF_INDEX: gl.constexpr):
    """Scores and weights of every other tile, and half of the features of the output.

    A group starts the scores of its own tile, then weighs rows with the other group's weights of
    the tile before, and computes its own weights while the tensor cores do that.
    """
    FIRST: gl.constexpr = HALF_INDEX * HALF
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    ACC_ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    q, ring, empty = parts(s, HALF_INDEX)
    item = gl.program_id(0)
    fetch_query(r, q, item, FIRST)
    count = load_count(r, item)
    prepare_query(r, s, q, 0, HALF_INDEX)
    it = 0
    ready = 0
    done = 0
    while item < r.n_items:
        scale, ready = await_query(r, s, q, item, done, ready, FIRST)
        stop = it + item_tiles(r, item, count)
        next_item = item + gl.num_programs(0)
        count = load_count(r, next_item)
        m = gl.full([BLOCK_H], MINUS_INF, gl.float32, layout=ROW)
        l = gl.zeros([BLOCK_H], gl.float32, layout=ROW)  # noqa: E741
        acc = gl.zeros([BLOCK_H, HALF], gl.float32, layout=ACC)
        if (it & 1) == HALF_INDEX:
            scores = warpgroup_mma_wait(0, deps=[start_scores(s, it)])
            acc, m, l = weigh_own(  # noqa: E741
                r, s, scores, acc, m, l, scale, it, it + 1 == stop, next_item, HALF_INDEX
            )
            it += 1
        while it + 1 < stop:
            started = start_scores(s, it + 1)
            weighted, m, l = weigh_others(s, ring, acc, l, it, HALF_INDEX)  # noqa: E741
            scores = warpgroup_mma_wait(1, deps=[started])
            acc = warpgroup_mma_wait(0, deps=[weighted])
            mbarrier.arrive(empty.index(it & 1), count=1)
            acc, m, l = weigh_own(  # noqa: E741
                r, s, scores, acc, m, l, scale, it + 1, it + 2 == stop, next_item, HALF_INDEX
            )
            it += 2
        if it < stop:
            mbarrier.wait(s.handed.index(1 - HALF_INDEX), (it >> 1) & 1)
            fetch_query(r, q, next_item, FIRST)
            weighted, m, l = weigh_others(s, ring, acc, l, it, HALF_INDEX)  # noqa: E741
            acc = warpgroup_mma_wait(0, deps=[weighted])
            mbarrier.arrive(empty.index(it & 1), count=1)
            it += 1
        prepare_query(r, s, q, done + 1, HALF_INDEX)
        s.sums.index(HALF_INDEX).store(l)
        group_barrier()
        mbarrier.arrive(s.summed, count=1)
        mbarrier.wait(s.summed, done & 1)
        l += s.sums.index(1 - HALF_INDEX).load(ROW)  # noqa: E741
        token, head, split = item_place(r, item)
        heads = head + gl.arange(0, BLOCK_H, layout=ROW)
        factor, lse = normalize(r, m, l, heads)
        if HALF_INDEX == 0:
            row = (token.to(gl.int64) * r.N_HEADS + heads) * r.SPLITS + split
            gl.store(r.lse + row, lse, mask=heads < r.N_HEADS)
        factor = gl.convert_layout(factor, ACC_ROW)
        store_half(r, finish_half(r, acc, factor, item, FIRST), item, FIRST)
        done += 1
        item = next_item
    async_copy.wait_group(0)
