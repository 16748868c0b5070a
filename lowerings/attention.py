"""sparse_attention: choices of kernels on CUDA (prefill or split-k), reductions on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import sympy
import torch
import triton
from torch._inductor import config, ir
from torch._inductor.codegen.triton import triton_type
from torch._inductor.ir import TensorBox
from torch._inductor.lowering import (
    empty_strided,
    fallback_handler,
    lowerings,
    register_lowering,
)
from torch._inductor.select_algorithm import SymbolicGridFn
from torch._inductor.virtualized import V, ops
from torch.utils._sympy.functions import FloorDiv

from fp8kv_inductor.formats import RowFormat, get_format
from fp8kv_inductor.kernels import attention as kernels
from fp8kv_inductor.kernels.launch import ReadArguments
from fp8kv_inductor.lowerings import exact
from fp8kv_inductor.lowerings.exact import F32, OpsValue, Target, f32
from fp8kv_inductor.lowerings.loops import Index, Loader, reduction_loader
from fp8kv_inductor.lowerings.template import ExternRead, make_template, realized, select

MINUS_INF = float("-inf")
ZERO, ONE = sympy.Integer(0), sympy.Integer(1)
MAX_SPLITS = 32
"""The combination of split-k parts is unrolled in the IR up to this many."""


def register() -> tuple[str, ...]:
    """Register the lowering of sparse_attention; returns its name."""
    # Not only when a graph is lowered: code from a cache calls it by its name.
    _by_hand()
    register_lowering(torch.ops.fp8kv.sparse_attention.default, type_promotion_kind=None)(
        _sparse_attention
    )
    return ("sparse_attention",)


def _sparse_attention(
    q: TensorBox,
    window_data: TensorBox,
    window_scale: TensorBox,
    cmp_data: TensorBox,
    cmp_scale: TensorBox,
    indices: TensorBox,
    cmp_counts: TensorBox | None,
    sink: TensorBox,
    n_window: int,
    softmax_scale: float,
    fmt: str,
    cos: TensorBox | None = None,
    sin: TensorBox | None = None,
) -> tuple[TensorBox, TensorBox]:
    read = _Read(
        q,
        (window_data, window_scale),
        (cmp_data, cmp_scale),
        indices,
        cmp_counts,
        sink,
        n_window,
        softmax_scale,
        get_format(fmt),
        None if cos is None or sin is None else (cos, sin),
    )
    if Target.of(q.get_device_or_error()).triton:
        return _triton(read)
    out, lse = _reductions(read)
    return _rotated(read, out), lse


def _rotated(read: _Read, out: TensorBox) -> TensorBox:
    """Inverse rope in IR, if the read asks for it."""
    if read.angles is None:
        return out
    return lowerings[torch.ops.fp8kv.rope.default](out, *read.angles, True)


@dataclass(frozen=True)
class _Read:
    """The operator's arguments."""

    q: TensorBox
    window: tuple[TensorBox, TensorBox]
    cmp: tuple[TensorBox, TensorBox]
    indices: TensorBox
    cmp_counts: TensorBox | None
    sink: TensorBox
    n_window: int
    softmax_scale: float
    fmt: RowFormat
    angles: tuple[TensorBox, TensorBox] | None

    def pointwise(self, inner_fn: Loader, dtype: torch.dtype, ranges: Index) -> TensorBox:
        return ir.Pointwise.create(
            device=self.q.get_device_or_error(), dtype=dtype, inner_fn=inner_fn, ranges=list(ranges)
        )


def _shift(m: OpsValue) -> OpsValue:
    """What to subtract from scores: their maximum, or 0 where -inf - -inf would give NaN."""
    return ops.where(ops.eq(m, f32(MINUS_INF)), f32(0.0), m)


def _normalize(acc: OpsValue, m: OpsValue, total: OpsValue, sink: OpsValue) -> OpsValue:
    """acc / (total + exp(sink - m)), 0 for an empty row or an infinite sink.

    Args:
        acc: sum of exp(score - m) * row.
        m: maximum of the scores, -inf if there is none.
        total: sum of exp(score - m).
        sink: natural log of what is added to the denominator.
    """
    top = ops.maximum(m, sink)
    shift = _shift(top)
    weight = ops.exp(ops.sub(m, shift))
    denominator = ops.add(ops.mul(total, weight), ops.exp(ops.sub(sink, shift)))
    empty = ops.or_(ops.eq(denominator, f32(0.0)), ops.eq(sink, f32(float("inf"))))
    return ops.mul(acc, ops.where(empty, f32(0.0), ops.truediv(weight, denominator)))


def _grid(tokens: Any, head_blocks: Any, splits: Any, meta: dict[str, Any]) -> tuple[Any, Any, Any]:
    """One program per token, block of heads and split of the token's live columns."""
    return tokens, head_blocks, splits


@functools.cache
def _template() -> Any:
    return make_template(
        "sparse_attention",
        SymbolicGridFn(_grid),
        (
            kernels.load_query,
            kernels.load_rows,
            kernels.column_stop,
            kernels.split_range,
            kernels.attend,
            kernels.finish,
            kernels.as_part,
            kernels.rotate_back,
        ),
    )


TEMPLATE_TILES = ((32, 8), (64, 8), (32, 4), (16, 4))
"""Columns of a tile and warps of the templates that max-autotune tries besides the default."""

Q, INDICES, SINK, LSE = range(4)
"""Positions among the inputs of every choice; pools, counts and angles follow."""


def _read_by_hand(
    *inputs: torch.Tensor,
    out: torch.Tensor,
    fmt: str,
    n_window: int,
    softmax_scale: float,
    splits: int,
    has_counts: bool,
    has_angles: bool,
) -> None:
    """The hand-callable read as a choice: inputs as the template takes them."""
    row_format, rest = get_format(fmt), list(inputs[LSE + 1 :])
    data = [rest.pop(0) for _ in range(2)]
    scale = [rest.pop(0) for _ in range(2)] if row_format.quantized else data
    read = ReadArguments(
        inputs[Q],
        (data[0], scale[0]),
        (data[1], scale[1]),
        inputs[INDICES],
        rest.pop(0) if has_counts else None,
        inputs[SINK],
        (rest[0], rest[1]) if has_angles else None,
        n_window,
        softmax_scale,
        row_format,
    )
    kernels.read_into(read, splits, out, inputs[LSE])


@functools.cache
def _by_hand() -> Any:
    return ExternRead(_read_by_hand, "read", written=LSE)


def _takes_hopper(read: _Read, target: Target, head_dim: int) -> bool:
    """Whether the kernel for sm_90 is likely to take the read; what it refuses it hands on."""
    hopper = kernels.hopper_read_for(target.capability)
    if hopper is None or V.graph.cpp_wrapper:
        return False
    pairs = 0 if read.angles is None else _pairs(read)
    return hopper.takes_rows(head_dim, read.q.get_dtype(), read.fmt, read.softmax_scale, pairs)


def _triton(read: _Read) -> tuple[TensorBox, TensorBox]:
    """Prefill or split-k, by the number of tokens that the graph is compiled for."""
    tokens, *row_sizes = read.q.get_size()
    heads, head_dim = map(V.graph.sizevars.guard_int, row_sizes)
    device, dtype = read.q.get_device_or_error(), read.q.get_dtype()
    target = Target.of(device)
    tile = kernels.choose_read_config(heads, head_dim, dtype, target.shared_bytes)
    head_blocks = triton.cdiv(heads, tile.block_h)
    hint = V.graph.sizevars.optimization_hint
    columns = hint(read.indices.get_size()[1])
    splits = kernels.choose_splits(hint(tokens), head_blocks, columns, target.sm_count)
    splits = min(splits, MAX_SPLITS)
    if splits > 1:
        _guard_few(tokens, head_blocks, target.sm_count)
    # The pairs of an odd row begin at odd features, which a tile does not hold as neighbours.
    inside = read.angles if splits == 1 and head_dim % 2 == 0 else None

    lse_sizes = [tokens, heads] if splits == 1 else [tokens, heads, splits, 2]
    lse = empty_strided(lse_sizes, None, dtype=F32, device=device)
    pools = [read.window[0], read.cmp[0]]
    if read.fmt.quantized:
        pools += [read.window[1], read.cmp[1]]
    counts = [] if read.cmp_counts is None else [read.cmp_counts]
    inputs = realized(read.q, read.indices, read.sink, lse, *pools, *counts, *(inside or ()))
    generators = {INDICES: functools.partial(_random_rows, read)}
    if counts:
        generators[LSE + 1 + len(pools)] = functools.partial(_full_counts, read)
    sizes = [tokens, heads, head_dim] if splits == 1 else [tokens, heads, splits, head_dim]
    stride = ir.FlexibleLayout.contiguous_strides(sizes)
    part = select(
        "sparse_attention",
        inputs,
        ir.FixedLayout(
            device, dtype if splits == 1 else kernels.part_dtype(dtype, read.fmt), sizes, stride
        ),
        _choices(
            read, target, tile, inputs[LSE], [tokens, head_blocks, splits], inside is not None
        ),
        generators,
    )
    if splits == 1:
        out = part if inside else _rotated(read, part)
        return out, lse
    out, total_lse = _combine(read, part, lse, splits)
    return _rotated(read, out), total_lse


def _guard_few(tokens: sympy.Expr, head_blocks: int, sm_count: int) -> None:
    """Keep a graph with parts to the numbers of tokens that are divided into parts.

    Each token has ``splits`` parts in memory. A graph for any number of tokens that was compiled
    for few would fill gigabytes with those of a long prompt; this guard compiles another one.
    """
    few = sympy.Le(tokens, sm_count // (2 * head_blocks))
    V.graph.sizevars.evaluate_expr(few, fallback_value=True)


def _choices(
    read: _Read,
    target: Target,
    tile: kernels.ReadConfig,
    lse: ir.IRNode,
    call_sizes: list[Any],
    rotates: bool,
) -> list[tuple[Any, dict[str, Any]]]:
    """What can compute the read, best guess first; only that without max-autotune.

    Args:
        read, target: the operator's arguments and the device.
        tile: of the template, by default.
        lse: what the read writes besides its output.
        call_sizes: tokens, blocks of heads, splits.
        rotates: whether the angles are among the inputs.
    """
    head_dim = V.graph.sizevars.guard_int(read.q.get_size()[2])
    splits = call_sizes[2]
    shared = {
        "mutated_inputs": [lse],
        "call_sizes": call_sizes,
        "D": head_dim,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "BLOCK": read.fmt.block,
        "BLOCK_H": tile.block_h,
        "SPLITS": splits,
        "PART": triton_type(kernels.part_dtype(read.q.get_dtype(), read.fmt)),
        "N_WINDOW": read.n_window,
        "SOFTMAX_SCALE": read.softmax_scale,
        "HAS_COUNTS": read.cmp_counts is not None,
        "PAIRS": _pairs(read) if rotates else 0,
        "STAGES": tile.num_stages,
        "num_stages": tile.num_stages,
    }
    tiles = [(tile.block_k, tile.num_warps)]
    if config.max_autotune and read.q.get_dtype() == torch.bfloat16:
        tiles += [other for other in TEMPLATE_TILES if other not in tiles]
    choices: list[tuple[Any, dict[str, Any]]] = [
        (_template(), {**shared, "BLOCK_K": block_k, "num_warps": num_warps})
        for block_k, num_warps in tiles
    ]
    if _takes_hopper(read, target, head_dim):
        by_hand = {
            "fmt": read.fmt.name,
            "n_window": read.n_window,
            "softmax_scale": read.softmax_scale,
            "splits": splits,
            "has_counts": read.cmp_counts is not None,
            "has_angles": rotates,
        }
        choices.insert(0, (_by_hand(), by_hand))
    return choices if config.max_autotune else choices[:1]


def _pairs(read: _Read) -> int:
    """R / 2 of the angles that the output is rotated back by."""
    assert read.angles is not None
    return V.graph.sizevars.guard_int(read.angles[0].get_size()[1])


def _random_rows(read: _Read, indices: ir.IRNode) -> torch.Tensor:
    """Indices to time choices with: rows all over the smaller pool."""
    hint = V.graph.sizevars.optimization_hint
    n_slots = min(hint(pool[0].get_size()[0]) for pool in (read.window, read.cmp))
    rows = _like(indices)
    return rows.copy_(torch.randint(0, n_slots, rows.shape, device=rows.device))


def _full_counts(read: _Read, counts: ir.IRNode) -> torch.Tensor:
    """Counts to time choices with: all columns live."""
    return _like(counts).fill_(V.graph.sizevars.optimization_hint(read.indices.get_size()[1]))


def _like(node: ir.IRNode) -> torch.Tensor:
    """An uninitialised tensor with the sizes and strides that a graph is compiled for."""
    hint = V.graph.sizevars.optimization_hint
    size, stride = map(hint, node.get_size()), map(hint, node.get_stride())
    return torch.empty_strided(
        tuple(size), tuple(stride), dtype=node.get_dtype(), device=node.get_device()
    )


def _combine(
    read: _Read, part: TensorBox, lse: TensorBox, splits: int
) -> tuple[TensorBox, TensorBox]:
    """Weighted sum of the parts: a part counts like a row with score ``lse``."""
    part_load, lse_load, sink_load = (box.make_loader() for box in (part, lse, read.sink))
    dtype = read.q.get_dtype()

    def weights(index: Index) -> tuple[OpsValue, list[OpsValue]]:
        scores = [lse_load([*index, sympy.Integer(split), ZERO]) for split in range(splits)]
        m = functools.reduce(ops.maximum, scores)
        return m, [ops.exp(ops.sub(score, _shift(m))) for score in scores]

    def out(index: Index) -> OpsValue:
        *row, feature = index
        m, weight = weights(row)
        parts = [
            ops.mul(
                ops.to_dtype(part_load([*row, sympy.Integer(split), feature]), F32),
                ops.mul(weight[split], lse_load([*row, sympy.Integer(split), ONE])),
            )
            for split in range(splits)
        ]
        acc, total = functools.reduce(ops.add, parts), functools.reduce(ops.add, weight)
        return ops.to_dtype(_normalize(acc, m, total, sink_load([row[1]])), dtype, src_dtype=F32)

    def total_lse(index: Index) -> OpsValue:
        m, weight = weights(index)
        return ops.add(m, ops.log(functools.reduce(ops.add, weight)))

    sizes = read.q.get_size()
    return read.pointwise(out, dtype, sizes), read.pointwise(total_lse, F32, sizes[:2])


def _reductions(read: _Read) -> tuple[TensorBox, TensorBox]:
    """Gather and dequantize inside the loops of two reductions per pool.

    Columns of the window and of the compressed pool are separate parts, so that no loop has to
    choose a pool. ``live_slots`` checks the indices: an error that a loop of several threads
    raised would end the process. A dead column reads row 0 and drops what it read.
    """
    tokens, heads, head_dim = read.q.get_size()
    columns = read.indices.get_size()[1]
    dtype = read.q.get_dtype()
    window_slots, cmp_slots = (pool[0].get_size()[0] for pool in (read.window, read.cmp))
    slots = fallback_handler(torch.ops.fp8kv.live_slots.default, add_to_fallback_set=False)(
        read.indices, read.cmp_counts, read.n_window, window_slots, cmp_slots
    )
    read.q.realize()
    q_load, sink_load = read.q.make_loader(), read.sink.make_loader()
    parts = [
        _Part(read.fmt, pool, slots, first, width)
        for pool, first, width in (
            (read.window, 0, read.n_window),
            (read.cmp, read.n_window, columns - read.n_window),
        )
        if width != 0 and pool[0].get_size()[0] != 0
    ]
    if not parts:
        empty = read.pointwise(lambda _: ops.constant(0.0, dtype), dtype, [tokens, heads, head_dim])
        return empty, read.pointwise(lambda _: f32(MINUS_INF), F32, [tokens, heads])

    reduction = functools.partial(reduction_loader, read.q.get_device_or_error())

    def scores_of(part: _Part) -> Loader:
        def dot(index: Index, feature: Index) -> OpsValue:
            token, head, column = index
            q = ops.to_dtype(q_load([token, head, *feature]), F32, src_dtype=dtype)
            return ops.mul(q, part.value(token, column, feature[0]))

        ranges = [tokens, heads, part.width]
        dots = reduction("sum", dot, ranges, head_dim)

        def score(index: Index) -> OpsValue:
            token, _, column = index
            scaled = ops.mul(dots(index), f32(read.softmax_scale))
            return ops.where(part.live(token, column), scaled, f32(MINUS_INF))

        scores = read.pointwise(score, F32, ranges)
        scores.realize()
        return scores.make_loader()

    scores = [scores_of(part) for part in parts]

    def over_parts(
        kind: Literal["sum", "max"],
        combine: Callable[[OpsValue, OpsValue], OpsValue],
        inner: Callable[[_Part, Loader], Callable[[Index, Index], OpsValue]],
        ranges: Index,
    ) -> Loader:
        loaders = [
            reduction(kind, inner(part, score), ranges, part.width)
            for part, score in zip(parts, scores, strict=True)
        ]
        return lambda index: functools.reduce(combine, [load(index) for load in loaders])

    rows = [tokens, heads]
    m = over_parts(
        "max",
        ops.maximum,
        lambda part, score: lambda index, column: score([*index, *column]),
        rows,
    )

    def weight(score: Loader, row: Index, column: Index) -> OpsValue:
        return ops.exp(ops.sub(score([*row, *column]), _shift(m(row))))

    total = over_parts("sum", ops.add, lambda _, score: functools.partial(weight, score), rows)
    acc = over_parts(
        "sum",
        ops.add,
        lambda part, score: (
            lambda index, column: ops.mul(
                weight(score, index[:2], column), part.value(index[0], column[0], index[2])
            )
        ),
        [*rows, head_dim],
    )

    def out(index: Index) -> OpsValue:
        row = index[:2]
        value = _normalize(acc(index), m(row), total(row), sink_load([row[1]]))
        return ops.to_dtype(value, dtype, src_dtype=F32)

    def lse(index: Index) -> OpsValue:
        return ops.add(m(index), ops.log(total(index)))

    return read.pointwise(out, dtype, [*rows, head_dim]), read.pointwise(lse, F32, rows)


class _Part:
    """The columns of one pool."""

    def __init__(
        self,
        fmt: RowFormat,
        pool: tuple[TensorBox, TensorBox],
        slots: TensorBox,
        first: Any,
        width: Any,
    ) -> None:
        self.fmt = fmt
        self.first, self.width = first, sympy.sympify(width)
        self.n_slots = pool[0].get_size()[0]
        self.data, self.scale = pool[0].make_loader(), pool[1].make_loader()
        self.slots = slots.make_loader()

    def _slot(self, token: sympy.Expr, column: sympy.Expr) -> OpsValue:
        return self.slots([token, column + self.first])

    def live(self, token: sympy.Expr, column: sympy.Expr) -> OpsValue:
        """Whether the column exists."""
        return ops.ge(self._slot(token, column), ops.constant(0, torch.int64))

    def value(self, token: sympy.Expr, column: sympy.Expr, feature: sympy.Expr) -> OpsValue:
        """The dequantized element as fp32, 0 in a dead column."""
        live = self.live(token, column)
        slot = ops.where(live, self._slot(token, column), ops.constant(0, torch.int64))
        row = ops.indirect_indexing(slot, self.n_slots, check=False, wrap_neg=False)
        element = self.data([row, feature])
        if self.fmt.quantized:
            scale = self.scale([row, FloorDiv(feature, self.fmt.block)])
            element = ops.mul(exact.e4m3_values(element), exact.decode_scale(scale, self.fmt))
        else:
            element = ops.to_dtype(element, F32, src_dtype=self.fmt.code_dtype)
        return ops.where(live, element, f32(0.0))
