"""What the groups of a program are told, and what they share."""

from typing import Any

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import _aggregate as aggregate


def record(cls: Any) -> Any:
    """An aggregate whose constructor takes its fields in order."""
    fields = dict(cls.__annotations__)

    def __init__(self: Any, *values: Any) -> None:
        for name, value in zip(fields, values, strict=True):
            is_constant = fields[name] is gl.constexpr
            setattr(self, name, gl.constexpr(value) if is_constant else value)

    cls.__init__ = gluon.constexpr_function(__init__)
    return aggregate(cls)


@record
class Rows:
    """A pool; the data of QUANTIZED rows are words."""

    data: gl.tensor
    scale: gl.tensor
    stride_data: gl.tensor
    stride_scale: gl.tensor


@record
class Read:
    """The operator's arguments, the same for every group.

    Attributes:
        stride_*: in elements, but rows of pools in vectors of VECTOR_BYTES.
        to_base_2: softmax_scale * log2(e).
        n_items: tokens * blocks of heads * SPLITS.
        WHOLE_TILES: no tile holds rows of both pools.
        ROPE_PAIRS: pairs of features that the output is rotated back by; 0 for none.
    """

    q: gl.tensor
    stride_q_token: gl.tensor
    stride_q_head: gl.tensor
    window: Rows
    cmp: Rows
    indices: gl.tensor
    stride_index_token: gl.tensor
    stride_index_column: gl.tensor
    counts: gl.tensor
    stride_count: gl.tensor
    sink: gl.tensor
    stride_sink: gl.tensor
    cos: gl.tensor
    sin: gl.tensor
    stride_cos: gl.tensor
    stride_sin: gl.tensor
    out: gl.tensor
    out_blocks: tma.tensor_descriptor
    lse: gl.tensor
    to_base_2: gl.tensor
    n_columns: gl.tensor
    n_items: gl.tensor
    N_HEADS: gl.constexpr
    N_WINDOW: gl.constexpr
    WHOLE_TILES: gl.constexpr
    SPLITS: gl.constexpr
    QUANTIZED: gl.constexpr
    HAS_COUNTS: gl.constexpr
    ROPE_PAIRS: gl.constexpr


@record
class Shared:
    """What the groups exchange; left and right are halves of the features.

    Attributes:
        largest_left, largest_right: by warp, the largest magnitude of its queries, if rows are
            quantized.
        left, right: places for halves of the queries or of a tile `[PLACES, TILE, HALF]`.
        rows: ring of four times the pool rows `[TILE]` of a tile, negative where dead.
        exponents: ring of four times what each warp's rows were divided by.
        p, factor: weights `[BLOCK_H, TILE]` and what to multiply accumulators with `[BLOCK_H]`.
        grown: ring of two times, by warp, whether some of those factors are not 1.
        q_right: barrier of the right half of queries in fp16.
        p_full, p_empty: barriers of p with its factor.
        full_left, full_right, empty_left, empty_right: barriers of the places.
    """

    largest_left: gl.shared_memory_descriptor
    largest_right: gl.shared_memory_descriptor
    left: gl.shared_memory_descriptor
    right: gl.shared_memory_descriptor
    rows: gl.shared_memory_descriptor
    exponents: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor
    factor: gl.shared_memory_descriptor
    grown: gl.shared_memory_descriptor
    full_left: gl.shared_memory_descriptor
    full_right: gl.shared_memory_descriptor
    empty_left: gl.shared_memory_descriptor
    empty_right: gl.shared_memory_descriptor
    q_right: gl.shared_memory_descriptor
    p_full: gl.shared_memory_descriptor
    p_empty: gl.shared_memory_descriptor
