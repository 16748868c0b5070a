"""Primitives that Inductor's IR lacks, for the Triton backend.

``block_amax``   a reduction inside the tile that stays pointwise in the IR, so that the scheduler
                 fuses a row norm with everything behind it into one kernel
``block_pow2``   a power of two from a block maximum, computed once per block
``pair_index``   an index with one element per pair of columns, so that an angle is loaded once
``rotate_pairs`` pairs of neighbouring columns, rotated in registers
``round_bf16``   rounding to bf16 that is kept, two elements per instruction
``guard``        an index whose stores are masked: other lanes write nothing
``mul_rn``,      fp32 arithmetic that no later compiler stage contracts or approximates
``div_rn``

Each is an ``ops`` method: a default handler lets LoopBody, dependency extraction and CSE pass it
through; the dtype and shape handlers say what comes out; ``TritonOverrides`` prints it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import sympy
import torch
from torch._inductor.codegen.triton import TritonOverrides
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
from torch._inductor.ops_handler import DefaultHandler
from torch._inductor.shape_propagation import ShapePropagationOpsHandler, get_broadcasted_shape
from torch._inductor.virtualized import V, ops
from torch.utils._ordered_set import OrderedSet
from torch.utils._sympy.value_ranges import ValueRanges

from fp8kv_inductor.formats import E4M3_MAX
from fp8kv_inductor.numerics import FP32_BIAS, FP32_MANTISSA_BITS, ceil_log2_offsets

PREFIX = "fp8kv_"
"""Keeps our ``ops`` names apart from Inductor's."""


OpsValue = Any
"""A value inside an ``inner_fn``: an OpsWrapper while tracing, a variable while printing."""


class RowLayoutError(RuntimeError):
    """The scheduler chose a tile in which a block of a row is not a run of the innermost axis."""


def block_amax(value: OpsValue, column: sympy.Expr, group: int) -> OpsValue:
    """Maximum of ``value`` over its aligned group of ``group`` columns, repeated for each column.

    A group of NaN alone has the maximum 0.

    Args:
        value: non-negative fp32, one element of a row. NaN does not count.
        column: index expression of the element within its row.
        group: a power of two that divides the row's blocks.

    Raises:
        RowLayoutError: while printing, if the columns are not the innermost tile axis.
    """
    return getattr(ops, PREFIX + "block_amax")(value, ops.index_expr(column, torch.int32), group)


def block_pow2(
    value: OpsValue,
    column: sympy.Expr,
    group: int,
    minimum: float,
    exponents: tuple[int, int],
    sign: int,
) -> OpsValue:
    """2^(sign * e) for each column, e = ceil(log2(max(amax, minimum) / 448)) within ``exponents``.

    Args:
        value, column, group: as for :func:`block_amax`, which gives amax.
        minimum: least maximum.
        exponents: bounds of e.
        sign: 1 for the block scale, -1 for its inverse.
    """
    return getattr(ops, PREFIX + "block_pow2")(
        value, ops.index_expr(column, torch.int32), group, minimum, *exponents, sign
    )


def pair_index(position: sympy.Expr) -> OpsValue:
    """``position`` for each aligned pair of columns; loads happen where it is not negative.

    Args:
        position: index expression that is the same for both columns of a pair.
    """
    return getattr(ops, PREFIX + "pair_index")(ops.index_expr(position, torch.int32))


def rotate_pairs(
    value: OpsValue, column: sympy.Expr, cos: OpsValue, sin: OpsValue, inverse: bool
) -> OpsValue:
    """Each aligned pair of columns, rotated by its angle; every operation rounds to fp32.

    Args:
        value, column: as for :func:`block_amax`.
        cos, sin: one element per pair, loaded through :func:`pair_index`.
        inverse: rotate by the negative angle.
    """
    return getattr(ops, PREFIX + "rotate_pairs")(
        value, ops.index_expr(column, torch.int32), cos, sin, inverse
    )


def round_bf16(value: OpsValue) -> OpsValue:
    """fp32 rounded to bf16, as fp32."""
    return getattr(ops, PREFIX + "round_bf16")(value)


def guard(index: OpsValue, mask: OpsValue) -> OpsValue:
    """``index`` as int64, such that a store through it happens only where ``mask`` holds."""
    return getattr(ops, PREFIX + "guard")(index, mask)


def mul_rn(left: OpsValue, right: OpsValue) -> OpsValue:
    """fp32 product, rounded on its own: never contracted with a later addition."""
    return getattr(ops, PREFIX + "mul_rn")(left, right)


def div_rn(left: OpsValue, right: OpsValue) -> OpsValue:
    """fp32 quotient, correctly rounded."""
    return getattr(ops, PREFIX + "div_rn")(left, right)


def register_primitives() -> None:
    """Teach Inductor's handlers these ``ops`` methods. Idempotent."""
    _register("block_amax", _print_block_amax, _first_dtype, _dense_shape)
    _register("block_pow2", _print_block_pow2, _first_dtype, _dense_shape)
    _register("pair_index", _print_pair_index, _first_dtype, _pair_shape)
    _register("rotate_pairs", _print_rotate_pairs, _first_dtype, _dense_shape)
    _register("round_bf16", _print_round_bf16, _first_dtype, _first_shape)
    _register("guard", _print_guard, lambda *_: torch.int64, _first_shape)
    _register("mul_rn", _print_mul_rn, _first_dtype, _broadcast_shape)
    _register("div_rn", _print_div_rn, _first_dtype, _broadcast_shape)


def _register(
    name: str,
    printer: Callable[..., Any],
    dtype: Callable[..., torch.dtype],
    shape: Callable[..., Any],
) -> None:
    name = PREFIX + name
    setattr(DefaultHandler, name, DefaultHandler._call_default(name))
    setattr(DtypePropagationOpsHandler, name, staticmethod(dtype))
    setattr(ShapePropagationOpsHandler, name, staticmethod(shape))
    setattr(TritonOverrides, name, staticmethod(printer))


def _first_dtype(first: Any, *_: Any) -> torch.dtype:
    return first.dtype


def _first_shape(first: Any, *_: Any) -> Any:
    return first.shape


def _dense_shape(*_: Any) -> Any:
    return tuple(V.kernel.dense_size_list())


def _pair_shape(*_: Any) -> Any:
    *outer, inner = V.kernel.dense_size_list()
    return (*outer, f"{inner} // 2")


def _broadcast_shape(left: Any, right: Any) -> Any:
    return get_broadcasted_shape(left.shape, right.shape)


def _print_mul_rn(left: Any, right: Any) -> str:
    # Not libdevice.mul_rn, which flushes subnormals.
    return (
        "tl.inline_asm_elementwise('mul.rn.f32 $0, $1, $2;', '=f,f,f', "
        f"[{left}, {right}], dtype=tl.float32, is_pure=True, pack=1)"
    )


def _print_div_rn(left: Any, right: Any) -> str:
    return f"tl.div_rn({left}, {right})"


def _print_guard(index: Any, mask: Any) -> Any:
    # Not through the CSE: each guard needs a variable of its own to carry its own mask.
    variable = V.kernel.cse.newvar(ValueRanges.unknown(), torch.int64, index.shape)
    V.kernel.compute.writeline(f"{variable} = {index}.to(tl.int64)")
    variable.mask_vars.add(str(mask))
    return variable


def _print_round_bf16(value: Any) -> str:
    # Triton's own cast does one element per instruction, at a quarter of the rate.
    return (
        "tl.inline_asm_elementwise('cvt.rn.bf16x2.f32 $0, $2, $1;', '=r,r,r', "
        f"[{value}], dtype=tl.bfloat16, is_pure=True, pack=2).to(tl.float32)"
    )


class _Groups:
    """The innermost tile axis in aligned groups of columns, while a kernel is printed."""

    def __init__(self, group: int) -> None:
        _check_innermost(column_expression(), group)
        self.shape = V.kernel.dense_size_list()
        inner = self.shape[-1]
        if len(self.shape) > 1:
            # What Inductor calls TMA restrictions is a lower bound on the sizes it may choose.
            smallest = V.kernel.tma_min_block_sizes
            smallest[inner] = max(group, smallest.get(inner, 1))
        self.full = ", ".join(self.shape)
        self.grouped = ", ".join([*self.shape[:-1], f"{inner} // {group}", str(group)])
        self.reduced_shape = (*self.shape[:-1], f"{inner} // {group}", "1")
        asserted = V.kernel.__dict__.setdefault(PREFIX + "asserted", set())
        if group not in asserted:
            asserted.add(group)
            V.kernel.compute.writeline(
                f"tl.static_assert({inner} % {group} == 0, 'a tile must hold whole blocks')"
            )

    def split(self, value: Any) -> str:
        """``value`` with its columns as `[groups, group]`."""
        return f"tl.reshape(tl.broadcast_to({value}, [{self.full}]), [{self.grouped}])"

    def amax(self, value: Any, minimum: float = 0.0) -> Any:
        """A variable with the maximum of each group, at least ``minimum``, `[groups, 1]`."""
        code = f"tl.max({self.split(value)}, {len(self.shape)}, keep_dims=True)"
        # A maximum passes NaN over, unless there is nothing else.
        return self.reduced(
            f"tl.maximum({self.reduced(code, torch.float32)}, {minimum!r})", torch.float32
        )

    def reduced(self, code: str, dtype: torch.dtype) -> Any:
        """A variable of shape `[groups, 1]`."""
        return V.kernel.cse.generate(V.kernel.compute, code, dtype=dtype, shape=self.reduced_shape)

    def spread(self, value: Any) -> str:
        """A value per group, repeated for every column."""
        return f"tl.reshape(tl.broadcast_to({value}, [{self.grouped}]), [{self.full}])"


def _print_block_amax(value: Any, column: Any, group: int) -> str:
    groups = _Groups(group)
    return groups.spread(groups.amax(value))


def _print_block_pow2(
    value: Any, column: Any, group: int, minimum: float, low: int, high: int, sign: int
) -> str:
    groups = _Groups(group)
    carry, shift = ceil_log2_offsets(E4M3_MAX)
    amax = groups.amax(value, minimum)
    raw = groups.reduced(
        f"(({amax}.to(tl.int32, bitcast=True) + {carry}) >> {FP32_MANTISSA_BITS}) - {shift}",
        torch.int32,
    )
    exponent = groups.reduced(f"tl.minimum(tl.maximum({raw}, {low}), {high})", torch.int32)
    biased = f"{FP32_BIAS} + {exponent}" if sign > 0 else f"{FP32_BIAS} - {exponent}"
    power = groups.reduced(
        f"(({biased}) << {FP32_MANTISSA_BITS}).to(tl.float32, bitcast=True)", torch.float32
    )
    return groups.spread(power)


def _print_pair_index(position: Any) -> Any:
    kernel, tree = V.kernel, _innermost()
    sizes = _pair_shape()

    def variable(code: str, dtype: torch.dtype, axes: Iterable[Any]) -> Any:
        dims = {axis.tensor_dim for axis in axes}
        shape = tuple(size if dim in dims else "1" for dim, size in enumerate(sizes))
        return kernel.cse.generate(kernel.compute, code, dtype=dtype, shape=shape)

    start, expand = f"{tree.prefix}offset // 2", kernel.indexing_size_str(tree.tensor_dim)
    code = f"{start} + tl.arange(0, {tree.prefix.upper()}BLOCK // 2){expand}"
    pairs = variable(code, torch.int32, [tree])
    along_columns = _in_roots(_index_argument(1))
    symbol = sympy.Symbol(str(pairs), integer=True, nonnegative=True)
    along_pairs = along_columns.xreplace({tree.symbol(): 2 * symbol})
    trees = [other for other in kernel.active_range_trees() if other.tensor_dim is not None]
    axes = [other for other in trees if other.symbol() in along_columns.free_symbols]
    index = variable(kernel.index_to_str(along_pairs), torch.int32, axes)
    masks = [f"{other.prefix}mask" for other in trees if other is not tree]
    if not along_pairs.is_nonnegative:
        masks.append(str(variable(f"{index} >= 0", torch.bool, axes)))
    if not kernel._has_constant_mask(tree):
        masks.append(str(variable(f"2 * {pairs} < {tree.prefix}numel", torch.bool, [tree])))
    index.mask_vars = OrderedSet(masks)
    # The masks of the argument have an element per column.
    index.update_on_args = lambda *_: None
    return index


def _print_rotate_pairs(value: Any, column: Any, cos: Any, sin: Any, inverse: bool) -> str:
    groups = _Groups(2)

    def variable(code: str) -> Any:
        shape = _pair_shape()
        return V.kernel.cse.generate(V.kernel.compute, code, dtype=torch.float32, shape=shape)

    pair = variable(f"tl.split({groups.split(value)})")
    even, odd = f"{pair}[0]", f"{pair}[1]"
    minus, plus = ("+", "-") if inverse else ("-", "+")
    first = variable(f"{_print_mul_rn(even, cos)} {minus} {_print_mul_rn(odd, sin)}")
    second = variable(f"{_print_mul_rn(odd, cos)} {plus} {_print_mul_rn(even, sin)}")
    return f"tl.reshape(tl.join({first}, {second}), [{groups.full}])"


def _index_argument(position: int) -> sympy.Expr:
    """The index expression behind an argument of the ``ops`` call being printed."""
    name = V.interpreter.current_node.args[position].args[1].args[0]
    return V.interpreter.submodules["get_index"](name)


def column_expression() -> sympy.Expr:
    """The index expression behind the second argument of the ``ops`` call being printed."""
    return _index_argument(2)


def _innermost() -> Any:
    """The range tree of the innermost tile axis."""
    return max(
        (tree for tree in V.kernel.active_range_trees() if tree.tensor_dim is not None),
        key=lambda tree: tree.tensor_dim,
    )


def _in_roots(expression: sympy.Expr) -> sympy.Expr:
    """An index expression in terms of the tile axes."""
    nodes = V.kernel.range_tree_nodes
    while expression.free_symbols & nodes.keys():
        expression = expression.xreplace({symbol: node.expr for symbol, node in nodes.items()})
    return expression


def _check_innermost(column: sympy.Expr, group: int) -> None:
    """Refuse tiles whose innermost axis does not run through whole blocks of a row."""
    index = _innermost().symbol()
    column = _in_roots(column)
    if column.free_symbols - {index}:
        raise RowLayoutError(
            f"a block maximum over {group} columns needs the row as the innermost tile axis; "
            f"column {column} does not run along {index}. Keep whole rows "
            "([tokens, head_dim]) between the norm and the store"
        )
    period = 4 * group
    for start in _aligned_starts(column, index, group, period):
        columns = [int(column.subs(index, start + step)) for step in range(group)]
        if columns != list(range(columns[0], columns[0] + group)) or columns[0] % group:
            raise RowLayoutError(
                f"a block maximum over {group} columns found columns {columns[0]}.. at {index} = "
                f"{start}: blocks of a row do not line up with the tile. "
                f"head_dim must be a multiple of {group}"
            )


def _aligned_starts(
    column: sympy.Expr, index: sympy.Symbol, group: int, period: int
) -> Iterable[int]:
    """Multiples of ``group`` that cover the row's period: columns are affine or a modulus."""
    moduli = [int(m.args[2]) for m in column.atoms(sympy.Function) if len(m.args) == 3]
    return range(0, 2 * max([period, *moduli]), group)
