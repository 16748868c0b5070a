"""Outputs, and shares of parts: normalised, rotated back and stored."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from fp8kv_inductor.kernels.hopper.items import item_place
from fp8kv_inductor.kernels.hopper.layouts import (
    ACC,
    BLOCK_H,
    HALF,
    OPERAND,
    OPERAND_BLOCK,
    OPERAND_WORDS,
    VECTORS,
    WORD_VECTORS,
)
from fp8kv_inductor.kernels.hopper.places import PLACES
from fp8kv_inductor.kernels.hopper.renamed import async_store, group_barrier, reinterpret


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
def store_features(r, x, item, FIRST: gl.constexpr):
    """Write features from FIRST on of an item's output, or of the share of a part."""
    LAYOUT: gl.constexpr = x.type.layout
    token, head, split = item_place(r, item)
    heads = gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, LAYOUT))
    features = FIRST + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    row = ((token.to(gl.int64) * r.N_HEADS + head) * r.SPLITS + split) * (2 * HALF)
    offsets = gl.expand_dims(heads * (r.SPLITS * 2 * HALF), 1) + gl.expand_dims(features, 0)
    exists = heads < r.N_HEADS - head
    if r.SPLITS > 1:
        exists &= heads // (BLOCK_H // gl.num_programs(1)) == gl.program_id(1)
    gl.store(r.out + row + offsets, x, mask=gl.expand_dims(exists, 1))


@gluon.jit
def store_half(r, half, place, acc, factor, item, FIRST: gl.constexpr):
    """Write half of the features of an item's output, normalised.

    Args:
        half, place: where the rows of the last tile have been read; turns what the threads of an
            accumulator hold into whole lines.
    """
    x = acc * gl.expand_dims(factor, 1)
    FLOAT: gl.constexpr = r.out.dtype.element_ty
    if gl.float32 != FLOAT:
        if r.ROPE_PAIRS > 0 and FIRST > 0:
            token, _, _ = item_place(r, item)
            x = rotate_back(r, x, token)
        lines = reinterpret(half, FLOAT, [PLACES, BLOCK_H, HALF], OPERAND).index(place)
        lines.store(x.to(FLOAT))
        if r.SPLITS == 1:
            fence_async_shared()
            group_barrier()
            token, head, _ = item_place(r, item)
            block = reinterpret(half, FLOAT, [PLACES, 1, BLOCK_H, HALF], OPERAND_BLOCK)
            block = block.index(place)
            async_store(r.out_blocks, [token, head, FIRST], block)
        else:
            store_features(r, lines.load(VECTORS), item, FIRST)
    else:
        lines = reinterpret(half, gl.float32, [PLACES, BLOCK_H, HALF // 2], OPERAND_WORDS)
        lines = lines.index(place)
        x = gl.permute(gl.reshape(x, [BLOCK_H, 2, HALF // 2]), [0, 2, 1])
        first, second = gl.split(x)
        lines.store(first)
        store_features(r, lines.load(WORD_VECTORS), item, FIRST)
        lines.store(second)
        store_features(r, lines.load(WORD_VECTORS), item, FIRST + HALF // 2)
