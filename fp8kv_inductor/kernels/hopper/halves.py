"""The two groups that compute: scores, weights and what they add up to."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fp8kv_inductor.kernels.hopper.gather import tile_exponent
from fp8kv_inductor.kernels.hopper.items import begin_item, item_place, load_count, zero
from fp8kv_inductor.kernels.hopper.layouts import (
    ACC,
    BLOCK_H,
    EXPONENTS,
    HALF,
    SCORES,
    TILE,
    WEIGHTS,
)
from fp8kv_inductor.kernels.hopper.outputs import store_half
from fp8kv_inductor.kernels.hopper.places import Q_PLACE, give_back, other_place, wait_full
from fp8kv_inductor.kernels.hopper.query import (
    fetch_query_half,
    half_to_fp16,
    power_of_two,
    query_scale,
)
from fp8kv_inductor.kernels.hopper.renamed import group_barrier

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
SLACK = gl.constexpr(5.0)
"""By how much a maximum may exceed what weights are relative to: 2^5 * 2^9 still fits into fp16."""
MINUS_INF = gl.constexpr(-float("inf"))


@gluon.jit
def start_scores(half, full, scores, q_place, place, step, it, ADD: gl.constexpr):
    """Start scores over half of the features, once it is there.

    The proxy fence sits behind the wait, not in ``gather``: it compiles to a barrier that waits for
    all outstanding loads of the thread. The queries' place is not to be the same for every tile:
    the compiler would keep the descriptors of all their parts in registers, and spill others.

    Args:
        half, full: left or right, and its barriers.
        scores: what they are added to, if ADD.
    """
    wait_full(full, step)
    fence_async_shared()
    q, rows = half.index(q_place + zero(it)), half.index(place).permute([1, 0])
    return warpgroup_mma(q, rows, scores, use_acc=ADD, is_async=True)


@gluon.jit
def any_grown(s, step):
    """Whether any head's shift has grown in this tile, so that accumulators have to follow.

    What left sends to right is counted by steps: weights by that of their tile, and the factor of
    the output, which comes behind the last, by that of the queries behind it.
    """
    return gl.max(s.grown.index(step & 1).load(EXPONENTS), 0) > 0


@gluon.jit
def softmax(s, scores, rows, m, l, exponent, scale, step):  # noqa: E741
    """Weights of a tile, in base 2, and the running shift and sum.

    The shift follows the maximum only where that exceeds it by more than ``SLACK``, so that
    accumulators seldom have to be rescaled.

    Args:
        rows: of the pool, negative where dead.
        exponent: rows were divided by 2^exponent.
        scale: what makes scores of the rows as they were, in base 2, out of these.

    Returns:
        p `[BLOCK_H, TILE]` times 2^exponent; what to multiply accumulators with if any shift has
        grown; whether one has; m; l.
    """
    scores = gl.where(gl.expand_dims(rows >= 0, 0), scores, MINUS_INF)
    largest = gl.max(scores, 1) * scale
    grown = largest > m + SLACK
    s.grown.index(step & 1).store(gl.max(gl.reshape(grown.to(gl.int32), [4, BLOCK_H // 4]), 1))
    new_m = gl.where(grown, largest, m)
    # While nothing was live, -inf - -inf must not become NaN.
    shift = gl.where(new_m == MINUS_INF, 0.0, new_m)
    p = gl.exp2(scores * gl.expand_dims(scale, 1) - gl.expand_dims(shift - exponent, 1))
    rescale = gl.exp2(m - shift)
    l = l * rescale + gl.sum(p, 1) * gl.exp2(-exponent)  # noqa: E741
    return p.to(s.p.dtype), rescale, any_grown(s, step), new_m, l


@gluon.jit
def normalize(r, m, l, sink):  # noqa: E741
    """What to multiply the accumulator with, and the natural log of the sum; see ``finish``."""
    top = gl.maximum(m, sink)
    shift = gl.where(top == MINUS_INF, 0.0, top)
    weight = gl.exp2(m - shift)
    total = l * weight + gl.exp2(sink - shift)
    empty = (total == 0.0) | (sink == -MINUS_INF)
    return gl.where(empty, 0.0, weight / total), (m + gl.log2(l)) * LN_2


@gluon.jit
def hand_over(s):
    """Tell right that weights are there; its tensor cores read them."""
    fence_async_shared()
    mbarrier.arrive(s.p_full, count=1)


@gluon.jit
def give_left_back(s, step, condition):
    """Give a left place back, once the output of the item before, if there is one, has left it."""
    tma.store_wait(0)
    give_back(s.empty_left, step, condition)


@gluon.jit
def give_query_back(s, step):
    """Give the place of the queries back, behind the scores of an item's last tile in ``step``."""
    give_back(s.empty_left, step + 2)
    give_back(s.empty_right, step + 2)


@gluon.jit
def begin_softmax(r, item, LAYOUT: gl.constexpr):
    """Sinks of an item's heads in base 2, and the running shift and sum, of nothing yet.

    The sinks of a part are -inf: it is combined with them later.
    """
    sink = gl.full([BLOCK_H], MINUS_INF, gl.float32, layout=LAYOUT)
    if r.SPLITS == 1:
        _, head, _ = item_place(r, item)
        heads = head + gl.arange(0, BLOCK_H, layout=LAYOUT)
        sink = gl.load(r.sink + heads * r.stride_sink, mask=heads < r.N_HEADS, other=0.0)
        sink *= LOG2_E
    m = gl.full([BLOCK_H], MINUS_INF, gl.float32, layout=LAYOUT)
    return sink, m, gl.zeros([BLOCK_H], gl.float32, layout=LAYOUT)


@gluon.jit
def send_factor(r, s, item, m, l, sink, part_exponent, step):  # noqa: E741
    """What the output is multiplied with: to right and, `[BLOCK_H]`, to the caller. Writes lse."""
    LAYOUT: gl.constexpr = m.type.layout
    factor, lse = normalize(r, m, l, sink)
    token, head, split = item_place(r, item)
    heads = head + gl.arange(0, BLOCK_H, layout=LAYOUT)
    row = (token.to(gl.int64) * r.N_HEADS + heads) * r.SPLITS + split
    exists = heads < r.N_HEADS
    if r.SPLITS > 1:
        row *= 2
        factor *= power_of_two(-part_exponent)
        gl.store(r.lse + row + 1, gl.full_like(lse, power_of_two(part_exponent)), mask=exists)
    mbarrier.wait(s.p_empty, (step & 1) ^ 1)
    s.factor.store(factor)
    mbarrier.arrive(s.p_full, count=1)
    gl.store(r.lse + row, lse, mask=exists)
    return factor


@gluon.jit
def fetch_first_query(r, s, item):
    """Bring the first queries; gather, which brings the others, has to bring rows first."""
    fetch_query_half(r, s.left, item, Q_PLACE, 0)
    fetch_query_half(r, s.right, item, Q_PLACE, HALF)
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def left_quantized(r, s):
    """Scores, softmax, and the left half of the output, of quantized rows.

    The product of a tile is under way during the softmax of the next one: its place is needed only
    when gather, which takes its time, has filled the other.
    """
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    ACC_ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    item = gl.program_id(0)
    count = load_count(r, item)
    fetch_first_query(r, s, item)
    # The right half of the first queries is left's, too.
    half_to_fp16(s.left, Q_PLACE, s.largest_left, item)
    half_to_fp16(s.right, Q_PLACE, s.largest_right, item)
    done = 0
    it = 0
    step = 0
    place = 0
    last_place = 0
    q_place = Q_PLACE
    acc = gl.zeros([BLOCK_H, HALF], gl.float32, layout=ACC)
    while item < r.n_items:
        mbarrier.wait(s.q_right, (done & 1) ^ 1, pred=done > 0)
        scale = r.to_base_2 * query_scale(r, s, item, q_place, ROW)
        fence_async_shared()
        group_barrier()
        tiles, next_item, count = begin_item(r, item, count)
        sink, m, l = begin_softmax(r, item, ROW)  # noqa: E741
        part_exponent = -126
        for tile in range(tiles):
            started = gl.zeros([BLOCK_H, TILE], gl.float32, layout=SCORES)
            started = start_scores(s.right, s.full_right, started, q_place, place, step, it, False)
            started = start_scores(s.left, s.full_left, started, q_place, place, step, it, True)
            # Of the tile before. The first of an item has none: what is multiplied is there, and
            # the result is dropped.
            weighted = warpgroup_mma(
                s.p, s.left.index(last_place), acc, use_acc=tile > 1, is_async=True
            )
            rows = s.rows.index(it & 3).load(gl.SliceLayout(0, SCORES))
            exponent = tile_exponent(s.exponents.index(it & 3))
            if r.SPLITS > 1:
                part_exponent = gl.maximum(part_exponent, exponent)
            exponent = gl.maximum(exponent, 0).to(gl.float32)
            scores = warpgroup_mma_wait(1, deps=[started])
            if tile == tiles - 1:
                give_query_back(s, step)
            p, rescale, grown, m, l = softmax(  # noqa: E741
                s, scores, rows, m, l, exponent, scale * gl.exp2(exponent), step
            )
            acc = warpgroup_mma_wait(0, deps=[weighted])
            give_left_back(s, step + 1, it > 0)
            if grown & (tile > 0):
                acc *= gl.expand_dims(gl.convert_layout(rescale, ACC_ROW), 1)
            mbarrier.wait(s.p_empty, (step & 1) ^ 1)
            s.p.store(p)
            s.factor.store(rescale)
            hand_over(s)
            it += 1
            last_place = place
            place = other_place(q_place, place)
            step += 1
        weighted = warpgroup_mma(
            s.p, s.left.index(last_place), acc, use_acc=tiles > 1, is_async=True
        )
        factor = send_factor(r, s, item, m, l, sink, part_exponent, step)
        acc = warpgroup_mma_wait(0, deps=[weighted])
        store_half(r, s.left, last_place, acc, gl.convert_layout(factor, ACC_ROW), item, 0)
        if next_item < r.n_items:
            wait_full(s.full_left, step)
            half_to_fp16(s.left, place, s.largest_left, item)
        q_place, place = place, q_place
        step += 1
        done += 1
        item = next_item
    tma.store_wait(0)


@gluon.jit
def left_plain(r, s):
    """Scores, softmax, and the left half of the output, of rows as they are stored.

    The product of a tile comes in front of the next scores, so that the place is free early: the
    copy of the rows that follow takes longer than everything here.
    """
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    ACC_ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    item = gl.program_id(0)
    count = load_count(r, item)
    fetch_first_query(r, s, item)
    it = 0
    step = 0
    place = 0
    q_place = Q_PLACE
    while item < r.n_items:
        scale = gl.full([BLOCK_H], 1.0, gl.float32, layout=ROW) * r.to_base_2
        wait_full(s.full_left, step - 1, it > 0)
        wait_full(s.full_right, step - 1, it > 0)
        fence_async_shared()
        group_barrier()
        started = gl.zeros([BLOCK_H, TILE], gl.float32, layout=SCORES)
        started = start_scores(s.left, s.full_left, started, q_place, place, step, it, False)
        started = start_scores(s.right, s.full_right, started, q_place, place, step, it, True)
        give_left_back(s, step + 1, it > 0)
        tiles, next_item, count = begin_item(r, item, count)
        sink, m, l = begin_softmax(r, item, ROW)  # noqa: E741
        acc = gl.zeros([BLOCK_H, HALF], gl.float32, layout=ACC)
        scores = warpgroup_mma_wait(0, deps=[started])
        for tile in range(tiles):
            if tile == tiles - 1:
                give_query_back(s, step)
            mbarrier.wait(s.p_empty, (step & 1) ^ 1)
            rows = s.rows.index(it & 3).load(gl.SliceLayout(0, SCORES))
            p, rescale, grown, m, l = softmax(  # noqa: E741
                s, scores, rows, m, l, 0.0, scale, step
            )
            s.p.store(p)
            s.factor.store(rescale)
            if grown & (tile > 0):
                acc *= gl.expand_dims(gl.convert_layout(rescale, ACC_ROW), 1)
            it += 1
            # The product of the last tile comes behind the loop: ptxas serializes all of them if
            # one is under way at a branch.
            if tile < tiles - 1:
                weights = gl.convert_layout(p, WEIGHTS)
                weighted = warpgroup_mma(weights, s.left.index(place), acc, is_async=True)
                hand_over(s)
                place = other_place(q_place, place)
                step += 1
                started = gl.zeros([BLOCK_H, TILE], gl.float32, layout=SCORES)
                started = start_scores(
                    s.left, s.full_left, started, q_place, place, step, it, False
                )
                # Give the other place back as soon as its last reader here is through.
                acc = warpgroup_mma_wait(1, deps=[weighted])
                give_back(s.empty_left, step + 1)
                started = start_scores(
                    s.right, s.full_right, started, q_place, place, step, it, True
                )
                scores = warpgroup_mma_wait(0, deps=[started])
        hand_over(s)
        weighted = warpgroup_mma(s.p, s.left.index(place), acc, is_async=True)
        factor = send_factor(r, s, item, m, l, sink, zero(item), step + 1)
        acc = warpgroup_mma_wait(0, deps=[weighted])
        store_half(r, s.left, place, acc, gl.convert_layout(factor, ACC_ROW), item, 0)
        q_place, place = other_place(q_place, place), q_place
        step += 2
        item = next_item
    tma.store_wait(0)


@gluon.jit
def right_half(r, s):
    """The right half of the output."""
    ACC_ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    item = gl.program_id(0)
    count = load_count(r, item)
    step = 0
    place = 0
    q_place = Q_PLACE
    while item < r.n_items:
        tiles, next_item, count = begin_item(r, item, count)
        acc = gl.zeros([BLOCK_H, HALF], gl.float32, layout=ACC)
        for tile in range(tiles):
            mbarrier.wait(s.p_full, step & 1)
            if any_grown(s, step) & (tile > 0):
                acc *= gl.expand_dims(s.factor.load(ACC_ROW), 1)
            weighted = warpgroup_mma(s.p, s.right.index(place), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[weighted])
            give_back(s.empty_right, step + 2, tile < tiles - 1)
            mbarrier.arrive(s.p_empty, count=1)
            place = other_place(q_place, place)
            step += 1
        mbarrier.wait(s.p_full, step & 1)
        factor = s.factor.load(ACC_ROW)
        mbarrier.arrive(s.p_empty, count=1)
        store_half(r, s.right, other_place(q_place, place), acc, factor, item, HALF)
        # What is inside is not for plain rows, whatever the number.
        if r.QUANTIZED:  # noqa: SIM102
            if next_item < r.n_items:
                wait_full(s.full_right, step)
                half_to_fp16(s.right, place, s.largest_right, item)
                fence_async_shared()
                mbarrier.arrive(s.q_right, count=1)
        tma.store_wait(0)
        give_back(s.empty_right, step + 2)
        q_place, place = place, q_place
        step += 1
        item = next_item
