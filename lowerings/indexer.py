"""indexer_scores: a template on CUDA, nested reductions on the CPU."""

from __future__ import annotations

import functools
from typing import Any

import sympy
import torch
import triton
from torch._inductor import ir
from torch._inductor.ir import TensorBox
from torch._inductor.lowering import fallback_handler, register_lowering
from torch._inductor.select_algorithm import SymbolicGridFn
from torch._inductor.virtualized import V, ops
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from fp8kv_inductor.kernels import indexer as kernels
from fp8kv_inductor.lowerings.exact import F32, OpsValue, Target, f32
from fp8kv_inductor.lowerings.loops import Index, reduction_loader
from fp8kv_inductor.lowerings.template import make_template, realized, select


def register() -> tuple[str, ...]:
    """Register the lowering of indexer_scores; returns its name."""
    register_lowering(torch.ops.fp8kv.indexer_scores.default, type_promotion_kind=None)(
        _indexer_scores
    )
    return ("indexer_scores",)


def _indexer_scores(q: TensorBox, *arguments: Any) -> TensorBox:
    lower = _triton if Target.of(q.get_device_or_error()).triton else _reductions
    return lower(q, *arguments)


def _grid(tokens: Any, tiles: Any, meta: dict[str, Any]) -> tuple[Any, Any, Any]:
    """One program per token and tile of its keys."""
    return tokens, tiles, 1


@functools.cache
def _template() -> Any:
    return make_template("indexer_scores", SymbolicGridFn(_grid), (kernels.score_tile,))


def _triton(
    q: TensorBox,
    weights: TensorBox,
    idx_data: TensorBox,
    page_rows: TensorBox,
    request: TensorBox,
    counts: TensorBox,
    page_size: int,
) -> TensorBox:
    tokens, *row_sizes = q.get_size()
    heads, width = map(V.graph.sizevars.guard_int, row_sizes)
    keys = page_rows.get_size()[1] * page_size
    block_n = kernels.keys_per_program(q.get_dtype())
    arguments = {
        "call_sizes": [tokens, FloorDiv(keys + block_n - 1, block_n)],
        "D": width,
        "PAGE_SIZE": page_size,
        "BLOCK_H": max(16, triton.next_power_of_2(heads)),
        "BLOCK_D": max(16, triton.next_power_of_2(width)),
        "BLOCK_N": block_n,
        "num_warps": 4,
        "num_stages": 1,
    }
    return select(
        "indexer_scores",
        realized(q, weights, idx_data, page_rows, request, counts),
        ir.FixedLayout(q.get_device_or_error(), F32, [tokens, keys], [keys, sympy.Integer(1)]),
        [(_template(), arguments)],
    )


def _reductions(
    q: TensorBox,
    weights: TensorBox,
    idx_data: TensorBox,
    page_rows: TensorBox,
    request: TensorBox,
    counts: TensorBox,
    page_size: int,
) -> TensorBox:
    """sum over heads of weight * relu(sum over features of q * key); dead keys are not read.

    ``live_pages`` checks the rows: an error that a loop of several threads raised would end the
    process.
    """
    device = q.get_device_or_error()
    tokens, heads, width = q.get_size()
    q.realize()
    n_keys = idx_data.get_size()[0]
    pages = fallback_handler(torch.ops.fp8kv.live_pages.default, add_to_fallback_set=False)(
        page_rows, request, counts, page_size, n_keys
    )
    keys = page_rows.get_size()[1] * page_size
    q_load, weight_load, key_load, page_load, count_load = (
        box.make_loader() for box in (q, weights, idx_data, pages, counts)
    )

    def live(token: sympy.Expr, key: sympy.Expr) -> OpsValue:
        count = ops.to_dtype(count_load([token]), torch.int64)
        return ops.lt(ops.index_expr(key, torch.int64), count)

    def key_element(token: sympy.Expr, key: sympy.Expr, feature: sympy.Expr) -> OpsValue:
        first = page_load([token, FloorDiv(key, page_size)])
        offset = ops.index_expr(ModularIndexing(key, 1, page_size), torch.int64)
        slot = ops.indirect_indexing(ops.add(first, offset), n_keys, check=False, wrap_neg=False)
        return ops.to_dtype(key_load([slot, feature]), F32)

    def dot(index: Index, feature: Index) -> OpsValue:
        token, head, key = index
        element = ops.masked(live(token, key), lambda: key_element(token, key, feature[0]), 0.0)
        return ops.mul(ops.to_dtype(q_load([token, head, *feature]), F32), element)

    dots = reduction_loader(device, "sum", dot, [tokens, heads, keys], width)

    def weighted(index: Index, head: Index) -> OpsValue:
        token, key = index
        similarity = ops.relu(dots([token, *head, key]))
        return ops.mul(weight_load([token, *head]), similarity)

    scores = reduction_loader(device, "sum", weighted, [tokens, keys], heads)
    return ir.Pointwise.create(
        device=device,
        dtype=F32,
        inner_fn=lambda index: ops.where(live(*index), scores(index), f32(float("-inf"))),
        ranges=[tokens, keys],
    )
