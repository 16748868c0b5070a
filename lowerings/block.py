"""Primitives that Inductor's IR lacks, for the Triton backend.

``block_amax``    a reduction inside the tile that stays pointwise in the IR, so that the
                  scheduler fuses a row norm with everything behind it into one kernel
``guard``         an index whose stores are masked: other lanes write nothing
``mul_rn``,       fp32 arithmetic that no later compiler stage contracts or approximates
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
from torch.utils._sympy.value_ranges import ValueRanges

PREFIX = "fp8kv_"
"""Keeps our ``ops`` names apart from Inductor's."""


OpsValue = Any
"""A value inside an ``inner_fn``: an OpsWrapper while tracing, a variable while printing."""


class RowLayoutError(RuntimeError):
    """The scheduler chose a tile in which a block of a row is not a run of the innermost axis."""


def block_amax(value: OpsValue, column: sympy.Expr, group: int) -> OpsValue:
    """Maximum of ``value`` over its aligned group of ``group`` columns, repeated for each column.

    Args:
        value: non-negative fp32, one element of a row.
        column: index expression of the element within its row.
        group: a power of two that divides the row's blocks.

    Raises:
        RowLayoutError: while printing, if the columns are not the innermost tile axis.
    """
    return getattr(ops, PREFIX + "block_amax")(value, ops.index_expr(column, torch.int32), group)


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
    """Teach Inductor's handlers the four ``ops`` methods. Idempotent."""
    _register("block_amax", _print_block_amax, _first_dtype, _dense_shape)
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


def _print_block_amax(value: Any, column: Any, group: int) -> str:
    shape = V.kernel.dense_size_list()
    inner = shape[-1]
    _check_innermost(column_expression(), group)
    if len(shape) > 1:
        # What Inductor calls TMA restrictions is a lower bound on the block sizes it may choose.
        smallest = V.kernel.tma_min_block_sizes
        smallest[inner] = max(group, smallest.get(inner, 1))
    V.kernel.compute.writeline(
        f"tl.static_assert({inner} % {group} == 0, 'a tile must hold whole blocks of a row')"
    )
    full = ", ".join(shape)
    split = ", ".join([*shape[:-1], f"{inner} // {group}", str(group)])
    blocks = f"tl.reshape(tl.broadcast_to({value}, [{full}]), [{split}])"
    amax = f"tl.max({blocks}, {len(shape)}, keep_dims=True)"
    return f"tl.reshape(tl.broadcast_to({amax}, [{split}]), [{full}])"


def column_expression() -> sympy.Expr:
    """The index expression behind the second argument of the ``ops`` call being printed."""
    column = V.interpreter.current_node.args[2]
    name = column.args[1].args[0]
    return V.interpreter.submodules["get_index"](name)


def _check_innermost(column: sympy.Expr, group: int) -> None:
    """Refuse tiles whose innermost axis does not run through whole blocks of a row."""
    kernel = V.kernel
    innermost = max(
        (tree for tree in kernel.active_range_trees() if tree.tensor_dim is not None),
        key=lambda tree: tree.tensor_dim,
    )
    index = innermost.symbol()
    nodes = kernel.range_tree_nodes
    while column.free_symbols & nodes.keys():
        column = column.xreplace({symbol: node.expr for symbol, node in nodes.items()})
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
