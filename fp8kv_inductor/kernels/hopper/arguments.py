"""What the groups of a program are told, and what they share."""

from typing import Any

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
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
        q: halves of the queries `[2, BLOCK_H, HALF]`.
        q_scale: what the queries of each head were divided by `[BLOCK_H]`, if rows are quantized.
        rows_left, rows_right: ring of two tiles `[TILE, HALF]`.
        rows: ring of four times the pool rows `[TILE]` of a tile, negative where dead.
        exponents: ring of four times what each warp's rows were divided by.
        p, factor: weights `[BLOCK_H, TILE]` and what to multiply accumulators with `[BLOCK_H]`.
        grown: by warp, whether some of those factors are not 1.
        q_ready, q_free, p_full, p_empty: barriers of the queries and of p with its factor.
        full_left, full_right, empty_left, empty_right: barriers of the ring.
    """

    q: gl.shared_memory_descriptor
    q_scale: gl.shared_memory_descriptor
    rows_left: gl.shared_memory_descriptor
    rows_right: gl.shared_memory_descriptor
    rows: gl.shared_memory_descriptor
    exponents: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor
    factor: gl.shared_memory_descriptor
    grown: gl.shared_memory_descriptor
    q_ready: gl.shared_memory_descriptor
    q_free: gl.shared_memory_descriptor
    full_left: gl.shared_memory_descriptor
    full_right: gl.shared_memory_descriptor
    empty_left: gl.shared_memory_descriptor
    empty_right: gl.shared_memory_descriptor
    p_full: gl.shared_memory_descriptor
    p_empty: gl.shared_memory_descriptor
