"""rope, act_quant and store: IR over whole rows, so that Inductor fuses them with their producers.

Each op keeps the iteration space [tokens, (heads,) head_dim] of the norm in front of it. With
Triton a block maximum stays pointwise (``block.block_amax``) and the whole chain is one kernel. On
the CPU, and for rows that are not whole blocks, it is an ordinary reduction and rows are realized
between the ops, because loops that share nothing would each recompute the chain. On the CPU the
encoded rows go into the pool by ``write_rows``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor.ir import TensorBox
from torch._inductor.lowering import fallback_handler, register_lowering
from torch._inductor.virtualized import V, ops
from torch.utils._ordered_set import OrderedSet
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from fp8kv_inductor.formats import (
    SCALE_EXPONENT_MAX,
    SCALE_EXPONENT_MIN,
    RowFormat,
    get_format,
)
from fp8kv_inductor.lowerings import block, exact, pairs
from fp8kv_inductor.lowerings.exact import F32, I32, OpsValue, Target
from fp8kv_inductor.lowerings.loops import Index, Loader, reduction_loader
from fp8kv_inductor.lowerings.reloads import wait_for_stores
from fp8kv_inductor.lowerings.schedule import RowBuffer, keep_rows_whole, row_box
from fp8kv_inductor.lowerings.small_reductions import is_row_op
from fp8kv_inductor.numerics import ACT_QUANT_AMAX_MIN, FP32_BIAS, act_quant_exponent_max

Element = Callable[[Index], tuple[OpsValue, OpsValue]]
"""Code of an element and scale of its block, in the pool's dtypes; no scale for rows without."""


def register() -> tuple[str, ...]:
    """Register the lowerings of rope, act_quant and store; returns their names."""
    block.register_primitives()
    keep_rows_whole()
    wait_for_stores()
    lowerings: dict[str, Callable[..., Any]]
    lowerings = {"rope": _rope, "act_quant": _act_quant, "store": _store}
    for name, lowering in lowerings.items():
        register_lowering(getattr(torch.ops.fp8kv, name).default, type_promotion_kind=None)(
            lowering
        )
    return tuple(lowerings)


LARGEST_GROUP = 128
"""Columns that every tile holds which Inductor may choose, flattened ones included."""

ROUNDED = "fp8kv_rounded"
"""Attribute of an ``inner_fn`` whose values are on the grid of its dtype already."""

PAIRS = "fp8kv_pairs"
"""Attribute of an ``inner_fn`` of bf16 rows that loads pairs of columns by the same index."""

ENCODER = "fp8kv_encoder"
"""Attribute of an ``inner_fn`` of ``act_quant``: from a row format to an ``Element`` or None."""


def _is_rounded(x: TensorBox) -> bool:
    """Whether loading ``x`` gives rounded values even if Inductor fuses its producer."""
    node = getattr(x.data, "data", None)
    return isinstance(node, ir.InputBuffer) or bool(_attribute(x, ROUNDED))


def _row_loader(x: TensorBox, in_tile: bool) -> Loader:
    """Loads an element as fp32, rounded to the dtype of ``x`` even if its producer was fused."""
    dtype, target = x.get_dtype(), Target.of(x.get_device_or_error())
    if not in_tile:
        x.realize()
    exact_already = not target.triton or _is_rounded(x)
    load = x.make_loader()
    if exact_already:
        return lambda index: ops.to_dtype(load(index), F32, src_dtype=dtype)
    return lambda index: exact.rounded(load(index), dtype, target)


def _rows_like(x: TensorBox, inner_fn: Loader, in_tile: bool) -> TensorBox:
    """A box like ``x`` whose elements ``inner_fn`` has rounded to the dtype of ``x``."""
    setattr(inner_fn, ROUNDED, True)
    pointwise = ir.Pointwise(
        device=x.get_device_or_error(),
        dtype=x.get_dtype(),
        inner_fn=inner_fn,
        ranges=x.get_size(),
    )
    if not in_tile:
        return TensorBox.create(pointwise)
    rows = row_box(pointwise)
    if not _only_rows_are_read():
        rows.realize()
    return rows


def _reads_rows(user: torch.fx.Node, node: torch.fx.Node) -> bool:
    """Whether ``user`` is a row operator and ``node`` its rows, so that it may inline them."""
    return is_row_op(user) and user.args[0] is node and node not in user.args[1:]


def _in_tile(x: TensorBox, group: int) -> bool:
    """Whether the primitives of ``block`` apply: a tile of whole rows holds whole groups.

    A dynamic width becomes a constant of the graph.
    """
    if not Target.of(x.get_device_or_error()).triton or group > LARGEST_GROUP:
        return False
    return V.graph.sizevars.guard_int(x.get_size()[-1]) % group == 0


WHOLE_TILE_OPS = {"masked", "index_expr", "indirect_indexing", "check_bounds"}
"""What Inductor prints in the shape of the whole tile, even in front of an index by group."""


def _attribute(x: TensorBox, name: str) -> Any:
    """An attribute of the ``inner_fn`` that computes `x`, realized or not; None without."""
    node = getattr(x.data, "data", None)
    return getattr(getattr(getattr(node, "data", node), "inner_fn", None), name, None)


def _only_rows_are_read() -> bool:
    """Whether what is being lowered are rows that nothing but row operators reads."""
    node = V.graph.current_node
    return all(_reads_rows(user, node) for user in node.users)


def _pairs_loader(x: TensorBox) -> Loader:
    """Loads the columns of bf16 rows in pairs (``pairs``)."""
    load = x.make_loader()
    return _attribute(x, PAIRS) or (
        lambda index: pairs.pack_bf16(*block.halves(ops.to_dtype(load(index), F32), index[-1]))
    )


def _encoder(
    load_pairs: Loader, features: int, group: int
) -> Callable[[RowFormat], Element | None]:
    """How to encode the rows that ``act_quant`` makes, for formats with an exact scale."""

    def encoder(fmt: RowFormat) -> Element | None:
        if fmt.rule != "pow2" or group % fmt.block:
            return None
        return lambda index: pairs.encode(load_pairs(index), index[-1], features, group, fmt)

    return encoder


def _encoded(rows: TensorBox, fmt: RowFormat) -> Element | None:
    """The code of a row's elements without the rows themselves, if they come from ``act_quant``."""
    encoder = _attribute(rows, ENCODER)
    element = encoder and encoder(fmt)
    if not element:
        return None
    codes = ir.Pointwise(
        device=rows.get_device_or_error(),
        dtype=fmt.code_dtype,
        inner_fn=lambda index: element(index)[0],
        ranges=rows.get_size(),
    )
    # Rows that were realized before a store into what they were computed from must be loaded.
    return None if codes.get_read_names() & V.graph.mutated_buffers else element


def _is_realized(x: TensorBox) -> bool:
    return isinstance(getattr(x.data, "data", None), ir.Buffer)


def _group_loader(x: TensorBox) -> Loader:
    """A loader whose index may come from :func:`block.group_index`."""
    loops = getattr(x.data, "data", None)
    # In a graph of one token, what it loads by token has no index, and the shape of the whole tile.
    fits = (
        isinstance(loops, ir.Pointwise)
        and x.get_size()[0] != 1
        and not WHOLE_TILE_OPS & set(loops.inner_fn_opcount().used_ops)
    )
    if not fits:
        x.realize()
    return x.make_loader()


def _indirect(index: OpsValue, size: sympy.Expr) -> sympy.Expr:
    """``index``, known to be in range, for a loader."""
    return ops.indirect_indexing(index, size, check=False, wrap_neg=False)


def _rope(x: TensorBox, cos: TensorBox, sin: TensorBox, inverse: bool = False) -> TensorBox:
    target, dtype = Target.of(x.get_device_or_error()), x.get_dtype()
    # The load of a lone angle has no index, and the shape of the whole tile.
    in_tile = _in_tile(x, 2) and cos.get_numel() != 1
    load = _row_loader(x, in_tile)
    product = block.mul_rn if target.triton else ops.mul
    first = x.get_size()[-1] - 2 * cos.get_size()[1]
    angle_loader = _group_loader if in_tile else TensorBox.make_loader
    cos_load, sin_load = angle_loader(cos), angle_loader(sin)

    def rotated_pair(index: Index, even: OpsValue, odd: OpsValue) -> tuple[OpsValue, OpsValue]:
        positions = zip((index[0], FloorDiv(index[-1] - first, 2)), cos.get_size(), strict=True)
        pair = [_indirect(block.group_index(position, 2), size) for position, size in positions]
        angle_cos, angle_sin = cos_load(pair), sin_load(pair)
        minus, plus = (ops.add, ops.sub) if inverse else (ops.sub, ops.add)
        return (
            minus(product(even, angle_cos), product(odd, angle_sin)),
            plus(product(odd, angle_cos), product(even, angle_sin)),
        )

    def rotated_element(index: Index, own: OpsValue, in_tail: OpsValue) -> OpsValue:
        *lead, column = index
        odd = ModularIndexing(column - first, 1, 2)
        partner = load([*lead, column + 1 - 2 * odd])
        pair = [lead[0], FloorDiv(column - first, 2)]
        angle_cos = ops.masked(in_tail, lambda: cos_load(pair), 1.0)
        angle_sin = ops.masked(in_tail, lambda: sin_load(pair), 0.0)
        # even: own cos - partner sin; odd: own cos + partner sin
        straight, turned = product(own, angle_cos), product(partner, angle_sin)
        plus = ops.eq(ops.index_expr(odd, I32), exact.i32(0 if inverse else 1))
        # A difference, not a sum with neg: Triton's neg is 0 - x, which loses the sign of zero.
        return ops.where(plus, ops.add(straight, turned), ops.sub(straight, turned))

    def inner(index: Index) -> OpsValue:
        own = load(index)
        in_tail = ops.ge(ops.index_expr(index[-1], I32), ops.index_expr(first, I32))
        if in_tile:
            even, odd = rotated_pair(index, *block.halves(own, index[-1]))
            rotated = block.interleave(even, index[-1], odd)
        else:
            rotated = rotated_element(index, own, in_tail)
        rotated = exact.rounded(rotated, dtype, target)
        return ops.to_dtype(ops.where(in_tail, rotated, own), dtype, src_dtype=F32)

    if in_tile and dtype == torch.bfloat16 and _only_rows_are_read():
        load_pairs = _pairs_loader(x)

        def rotated_pairs(index: Index) -> OpsValue:
            own = load_pairs(index)
            rotated = pairs.pack_bf16(*rotated_pair(index, *pairs.unpack_bf16(own)))
            position = block.group_index(FloorDiv(index[-1] - first, 2), 2)
            return ops.where(ops.ge(position, exact.i32(0)), rotated, own)

        setattr(inner, PAIRS, rotated_pairs)
    return _rows_like(x, inner, in_tile)


def _block_maxima(
    x: TensorBox, load: Loader, columns: sympy.Expr, group: int, in_tile: bool
) -> Loader:
    """Finite block maximum by the index of an element, one of the first ``columns`` of its row.

    In the tile it has one element per block (:func:`block.block_amax`).
    """
    if in_tile:
        return lambda index: block.block_amax(
            exact.finite_magnitude_or_nan(load(index)), index[-1], group
        )
    *lead, width = x.get_size()
    maxima_load = reduction_loader(
        x.get_device_or_error(),
        "max",
        lambda index, within: exact.finite_magnitude(
            load([*index[:-1], index[-1] * group + within[0]])
        ),
        [*lead, FloorDiv(columns, group)],
        group,
    )

    def amax(index: Index) -> OpsValue:
        # Columns past the last block read its maximum and do not use it. A plain column // group
        # lets the C++ backend split the loop, which drops the remainder of an uneven row.
        last = sympy.Min(index[-1], columns - 1)
        even = V.graph.sizevars.statically_known_multiple_of(width, group)
        block_index = sympy.Min(FloorDiv(index[-1], group), FloorDiv(columns, group) - 1)
        return maxima_load([*index[:-1], block_index if even else FloorDiv(last, group)])

    return amax


def _per_column(value: OpsValue, column: sympy.Expr, group: int, in_tile: bool) -> OpsValue:
    """What was computed from a block maximum, for a column of the block."""
    return block.spread(value, column, group) if in_tile else value


def _act_quant(x: TensorBox, features: int, group: int = 64) -> TensorBox:
    target, in_tile = Target.of(x.get_device_or_error()), _in_tile(x, group)
    load, dtype = _row_loader(x, in_tile), x.get_dtype()
    exponents = (1 - FP32_BIAS, act_quant_exponent_max(dtype))
    amax = _block_maxima(x, load, sympy.Integer(features), group, in_tile)

    def inner(index: Index) -> OpsValue:
        value, column = load(index), index[-1]
        scale, inverse = (
            _per_column(power, column, group, in_tile)
            for power in exact.pow2_scale(amax(index), ACT_QUANT_AMAX_MIN, exponents)
        )
        quantized = exact.act_quant(value, scale, inverse, target)
        is_quantized = ops.lt(ops.index_expr(column, I32), exact.i32(features))
        return ops.to_dtype(ops.where(is_quantized, quantized, value), dtype, src_dtype=F32)

    in_pairs = in_tile and dtype == torch.bfloat16 and target.single_rounding_cast
    if in_pairs and _only_rows_are_read():
        setattr(inner, ENCODER, _encoder(_pairs_loader(x), features, group))
    return _rows_like(x, inner, in_tile)


def _store(rows: TensorBox, slots: TensorBox, data: TensorBox, scale: TensorBox, fmt: str) -> None:
    row_format, target = get_format(fmt), Target.of(rows.get_device_or_error())
    if target.triton and V.graph.sizevars.statically_known_equals(data.get_size()[0], 1):
        # Inductor leaves the index of a dimension of size 1 out, and with it the guard.
        fallback_handler(torch.ops.fp8kv.store.default, add_to_fallback_set=False)(
            rows, slots, data, scale, fmt
        )
        return
    group, width = row_format.block, rows.get_size()[1]
    in_tile = _in_tile(rows, max(group, 1))
    load = _row_loader(rows, in_tile)
    element: Element
    if row_format.quantized:
        amax = _block_maxima(rows, load, width, group, in_tile)
    encoded = _encoded(rows, row_format)
    if encoded:
        element = encoded
    elif row_format.rule == "pow2":
        exponents = (SCALE_EXPONENT_MIN, SCALE_EXPONENT_MAX)

        def element(index: Index) -> tuple[OpsValue, OpsValue]:
            block_scale, inverse = exact.pow2_scale(amax(index), 0.0, exponents)
            inverse = _per_column(inverse, index[-1], group, in_tile)
            codes = exact.e4m3_codes(ops.mul(load(index), inverse), target)
            return codes, exact.encode_scale(block_scale, row_format)

    elif row_format.rule == "amax":

        def element(index: Index) -> tuple[OpsValue, OpsValue]:
            held = exact.amax_scale(amax(index), row_format, target)
            divisor = _per_column(held, index[-1], group, in_tile)
            codes = exact.e4m3_codes(exact.quotient(load(index), divisor, target), target)
            return codes, exact.encode_scale(held, row_format)

    else:

        def element(index: Index) -> tuple[OpsValue, OpsValue]:
            return ops.to_dtype(load(index), row_format.code_dtype, src_dtype=F32), None

    if target.triton:
        inlined = OrderedSet(_row_ops_in_front() if encoded else ())
        with ir.IRNode.current_origins(inlined):
            _scatter_rows(rows, slots, data, scale, row_format, element, in_tile)
    else:
        _write_rows(rows, slots, data, scale, row_format, element)


def _row_ops_in_front() -> Iterator[torch.fx.Node]:
    """The row operators behind whose rows the one being lowered stands; they name a kernel, too."""
    node: Any = V.graph.current_node.args[0]
    while is_row_op(node):
        yield node
        node = node.args[0]


def _scatter_rows(
    rows: TensorBox,
    slots: TensorBox,
    data: TensorBox,
    scale: TensorBox,
    fmt: RowFormat,
    element: Element,
    in_tile: bool,
) -> None:
    """Two masked scatters; in the tile both over [tokens, head_dim], which fuse into one kernel."""
    slot_load, n_slots = slots.make_loader(), data.get_size()[0]
    tokens, head_dim = rows.get_size()
    by_group = in_tile and _is_realized(slots)

    def scatter(pool: TensorBox, value: Loader, width: sympy.Expr, group: int = 1) -> None:
        """Write a value per ``group`` of ``width`` columns into the live rows of a pool's buffer.

        Args:
            pool: `[n_slots, width / group]`.
            value: by index into `[tokens, width]`.
        """

        def output_index(index: Index) -> list[sympy.Expr]:
            token = block.group_index(index[0], group) if by_group else None
            at = index[0] if token is None else _indirect(token, tokens)
            slot = ops.to_dtype(slot_load([at]), torch.int64)
            live = ops.and_(
                ops.ge(slot, ops.constant(0, torch.int64)),
                ops.lt(slot, ops.index_expr(n_slots, torch.int64)),
            )
            row = _indirect(block.guard(slot, live, group), n_slots)
            return [row, FloorDiv(index[1], group)]

        pool.realize()
        RowBuffer.register(
            ir.MutationLayoutSHOULDREMOVE(pool),
            ir.Scatter(
                device=pool.get_device_or_error(),
                dtype=pool.get_dtype(),
                inner_fn=value,
                ranges=[tokens, width],
                output_indexer=output_index,
            ),
        )

    scatter(data, lambda index: element(index)[0], head_dim)
    if fmt.quantized and in_tile:
        scatter(scale, lambda index: element(index)[1], head_dim, fmt.block)
    elif fmt.quantized:
        scatter(
            scale,
            lambda index: element([index[0], index[1] * fmt.block])[1],
            FloorDiv(head_dim, fmt.block),
        )


def _write_rows(
    rows: TensorBox,
    slots: TensorBox,
    data: TensorBox,
    scale: TensorBox,
    fmt: RowFormat,
    element: Element,
) -> None:
    """Encode into fresh rows, then let ``write_rows`` check the slots and write the live ones."""
    device, (tokens, head_dim) = rows.get_device_or_error(), rows.get_size()

    def encoded(inner_fn: Loader, dtype: torch.dtype, width: sympy.Expr) -> TensorBox:
        box = ir.Pointwise.create(
            device=device, dtype=dtype, inner_fn=inner_fn, ranges=[tokens, width]
        )
        box.realize()
        return box

    codes = encoded(lambda index: element(index)[0], fmt.code_dtype, head_dim)
    scales = encoded(
        (lambda index: element([index[0], index[1] * fmt.block])[1])
        if fmt.quantized
        else (lambda index: ops.constant(0, fmt.scale_dtype)),
        fmt.scale_dtype,
        scale.get_size()[1],
    )
    ir.FallbackKernel.create(torch.ops.fp8kv.write_rows.default, codes, scales, slots, data, scale)
