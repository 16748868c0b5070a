"""Primitives that Inductor's IR lacks, for the Triton backend.

``block_amax``   a reduction inside the tile that stays pointwise in the IR, so that the scheduler
                 fuses a row norm with everything behind it into one kernel
``spread``       a value per block, repeated for its columns
``group_index``  an index with one element per group of columns, for what is loaded or stored once
``halves``       the even and the odd columns; ``interleave`` puts them together again
``packed``       an instruction on 32-bit registers, which may hold a pair of columns
``packed_amax``  ``block_amax`` of such pairs; ``amax_of_groups`` joins its maxima
``packed_codes`` e4m3 codes of such pairs
``round_bf16``   rounding to bf16 that is kept, two elements per instruction
``guard``        an index whose stores are masked: other lanes write nothing
``mul_rn``,      fp32 arithmetic that no later compiler stage contracts or approximates
``div_rn``

Each is an ``ops`` method: a default handler lets LoopBody, dependency extraction and CSE pass it
through; the dtype and shape handlers say what comes out; ``TritonOverrides`` prints it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

import sympy
import torch
from torch._inductor import config
from torch._inductor.codegen.common import DeferredLine
from torch._inductor.codegen.triton import IndexingOptions, TritonKernel, TritonOverrides
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
from torch._inductor.ops_handler import DefaultHandler
from torch._inductor.shape_propagation import ShapePropagationOpsHandler, get_broadcasted_shape
from torch._inductor.utils import sympy_product
from torch._inductor.virtualized import V, ops
from torch.utils._ordered_set import OrderedSet
from torch.utils._sympy.value_ranges import ValueRanges

PREFIX = "fp8kv_"
"""Keeps our ``ops`` names apart from Inductor's."""

GROUP_OPS: set[str] = set()
"""Names of the primitives that need groups of columns as runs of the innermost tile axis."""

FEW_ROWS = 512
"""Up to here Inductor gives a row of a persistent reduction several warps, beyond it one."""

LOADED_COLUMNS = 8
"""bf16 columns that a thread loads at once."""

OpsValue = Any
"""A value inside an ``inner_fn``: an OpsWrapper while tracing, a variable while printing."""


F32 = torch.float32
U8 = torch.uint8


class RowLayoutError(RuntimeError):
    """A group of a row's columns is not a run of the innermost axis of the tile being printed."""


def block_amax(value: OpsValue, column: sympy.Expr, group: int) -> OpsValue:
    """Maximum of ``value`` over each aligned group of columns; one element per group.

    Args:
        value: non-negative fp32, one element of a row. NaN does not count.
        column: index expression of the element within its row.
        group: columns per group, a power of two that divides the row's blocks.

    Raises:
        RowLayoutError: while printing, if the columns are not the innermost tile axis.
    """
    return getattr(ops, PREFIX + "block_amax")(value, ops.index_expr(column, torch.int32), group)


def amax_of_groups(value: OpsValue, column: sympy.Expr, group: int, larger: int) -> OpsValue:
    """Maximum over larger groups, repeated for each of the groups in it.

    Args:
        value: fp32, one element per ``group`` columns.
        column: as for :func:`block_amax`.
        group, larger: columns per group, ``larger`` a multiple of ``group``.
    """
    return getattr(ops, PREFIX + "amax_of_groups")(
        value, ops.index_expr(column, torch.int32), group, larger
    )


def spread(value: OpsValue, column: sympy.Expr, group: int, to: int = 1) -> OpsValue:
    """A value per group of columns, repeated for each column.

    Args:
        value: computed from :func:`block_amax`.
        column, group: as there.
        to: columns per element of the result.
    """
    return getattr(ops, PREFIX + "spread")(value, ops.index_expr(column, torch.int32), group, to)


def group_index(position: sympy.Expr, group: int) -> OpsValue:
    """``position`` of each group of columns; loads happen where it is not negative.

    Args:
        position: index expression that is the same for all columns of a group.
        group: columns per group, a power of two.
    """
    return getattr(ops, PREFIX + "group_index")(ops.index_expr(position, torch.int32), group)


def halves(value: OpsValue, column: sympy.Expr) -> tuple[OpsValue, OpsValue]:
    """The even and the odd columns, one element per pair each.

    Args:
        value: fp32, one element of a row.
        column: index expression of the element within its row.
    """
    split, column = getattr(ops, PREFIX + "half"), ops.index_expr(column, torch.int32)
    return split(value, column, 0), split(value, column, 1)


def interleave(even: OpsValue, column: sympy.Expr, odd: OpsValue) -> OpsValue:
    """The inverse of :func:`halves`."""
    return getattr(ops, PREFIX + "interleave")(even, ops.index_expr(column, torch.int32), odd)


def packed(instruction: str, *operands: OpsValue) -> OpsValue:
    """A PTX instruction on 32-bit registers; int32.

    Args:
        instruction: `$0` is the result, then come the operands. Equal ones may become one.
        operands: int32 or fp32. An int32 element per pair holds two 16-bit floats, the even
            column's in the lower half.
    """
    return getattr(ops, PREFIX + "packed")(instruction, *operands)


def packed_amax(pairs: OpsValue, column: sympy.Expr, group: int, kind: str) -> OpsValue:
    """Largest magnitude of each aligned group of columns, as fp32; NaN does not count.

    Args:
        pairs: int32, two columns an element.
        column, group: as for :func:`block_amax`.
        kind: `bf16` or `f16`.
    """
    return getattr(ops, PREFIX + "packed_amax")(
        pairs, ops.index_expr(column, torch.int32), group, kind
    )


def packed_codes(pairs: OpsValue, column: sympy.Expr) -> OpsValue:
    """e4m3 codes (uint8) of pairs of fp16 columns, saturating, one element of a row."""
    return getattr(ops, PREFIX + "packed_codes")(pairs, ops.index_expr(column, torch.int32))


def round_bf16(value: OpsValue) -> OpsValue:
    """fp32 rounded to bf16, as fp32."""
    return getattr(ops, PREFIX + "round_bf16")(value)


def guard(index: OpsValue, mask: OpsValue, group: int = 1) -> OpsValue:
    """``index`` as int64, such that a store through it happens only where ``mask`` holds.

    Args:
        index, mask: one element per group of columns.
        group: columns per group; the value that is stored has one element per group as well.
    """
    return getattr(ops, PREFIX + "guard")(index, mask, group)


def mul_rn(left: OpsValue, right: OpsValue) -> OpsValue:
    """fp32 product, rounded on its own: never contracted with a later addition."""
    return getattr(ops, PREFIX + "mul_rn")(left, right)


def div_rn(left: OpsValue, right: OpsValue) -> OpsValue:
    """fp32 quotient, correctly rounded."""
    return getattr(ops, PREFIX + "div_rn")(left, right)


def register_primitives() -> None:
    """Teach Inductor's handlers these ``ops`` methods. Idempotent."""
    _register("block_amax", _print_block_amax, _first_dtype, _amax_shape, in_groups=True)
    _register("amax_of_groups", _print_amax_of_groups, _first_dtype, _first_shape, in_groups=True)
    _register("spread", _print_spread, _first_dtype, _spread_shape, in_groups=True)
    _register("group_index", _print_group_index, _first_dtype, _index_shape, in_groups=True)
    _register("half", _print_half, _first_dtype, _pair_shape, in_groups=True)
    _register("interleave", _print_interleave, _first_dtype, _dense_shape, in_groups=True)
    _register("packed", _print_packed, lambda *_: torch.int32, _packed_shape)
    _register("packed_amax", _print_packed_amax, lambda *_: F32, _amax_shape, in_groups=True)
    _register("packed_codes", _print_packed_codes, lambda *_: U8, _dense_shape, in_groups=True)
    _register("round_bf16", _print_round_bf16, _first_dtype, _first_shape)
    _register("guard", _print_guard, lambda *_: torch.int64, _first_shape)
    _register("mul_rn", _print_mul_rn, _first_dtype, _broadcast_shape)
    _register("div_rn", _print_div_rn, _first_dtype, _broadcast_shape)
    _adapt_indexing()
    _load_early()
    _widen_in_registers()


def _register(
    name: str,
    printer: Callable[..., Any],
    dtype: Callable[..., torch.dtype],
    shape: Callable[..., Any],
    in_groups: bool = False,
) -> None:
    """Teach Inductor one primitive.

    Args:
        name: without prefix.
        printer, dtype, shape: its handlers.
        in_groups: whether it needs whole rows in the tile, so that the scheduler's rules apply.
    """
    name = PREFIX + name
    if in_groups:
        GROUP_OPS.add(name)
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


def _group_shape(group: int) -> tuple[str, ...]:
    *outer, inner = V.kernel.dense_size_list()
    return (*outer, f"{inner} // {group}" if group > 1 else inner)


def _amax_shape(value: Any, column: Any, group: int, *_: Any) -> Any:
    return _group_shape(group)


def _spread_shape(value: Any, column: Any, group: int, to: int) -> Any:
    return _group_shape(to)


def _pair_shape(*_: Any) -> Any:
    return _group_shape(2)


def _packed_shape(instruction: str, *operands: Any) -> Any:
    return functools.reduce(get_broadcasted_shape, (operand.shape for operand in operands))


def _index_shape(position: Any, group: int) -> Any:
    return _group_shape(group)


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


def _print_guard(index: Any, mask: Any, group: int) -> Any:
    # Not through the CSE: each guard needs a variable of its own to carry its own mask.
    kernel = V.kernel
    variable = kernel.cse.newvar(ValueRanges.unknown(), torch.int64, index.shape)
    kernel.compute.writeline(f"{variable} = {index}.to(tl.int64)")
    _guards(kernel)[str(variable)] = [str(mask)]
    if group > 1:
        kernel.store = functools.partial(_store_groups, kernel.store, variable, group)
    return variable


def _guards(kernel: Any) -> dict[str, list[str]]:
    """Masks of a kernel's guarded variables, by the variables' names."""
    return kernel.__dict__.setdefault(PREFIX + "guards", {})


@functools.cache
def _adapt_indexing() -> None:
    """Masks of guarded variables reach every store that they index; rows have one layout.

    A variable's own masks would not: Inductor drops them where it broadcasts an index that does not
    name every tile axis, as with a single token or a single scale per row.
    """
    kernel_class: Any = TritonKernel
    original = kernel_class.indexing

    def indexing(self: Any, index: sympy.Expr, **kwargs: Any) -> Any:
        if kwargs.get("block_ptr") and _holds_rows(self) and _along_columns(index):
            # Triton chooses a layout per shape of a tile. Factors of a norm, which all rows share,
            # would get another one than the rows.
            kwargs["dense_indexing"] = True
        options = original(self, index, **kwargs)
        if isinstance(options, IndexingOptions):
            guards = _guards(self)
            names = {symbol.name for symbol in index.free_symbols} & guards.keys()
            options.mask_vars.update(mask for name in sorted(names) for mask in guards[name])
            if names and _holds_rows(self):
                options.index_str = _in_layout_of_rows(options.index_str)
        return options

    kernel_class.indexing = indexing


@functools.cache
def _widen_in_registers() -> None:
    """A kernel over rows makes bf16 fp32 by an instruction an element, where Triton takes two."""
    kernel_class: Any = TritonKernel
    original = kernel_class.load

    def load(self: Any, name: str, index: sympy.Expr) -> Any:
        if not _holds_rows(self) or V.graph.get_dtype(name) != torch.bfloat16:
            return original(self, name, index)
        with config.patch({"triton.codegen_upcast_to_fp32": False}):
            loaded = original(self, name, index)
        code = (
            "tl.inline_asm_elementwise('shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;', "
            f"'=&r,=r,r', [{loaded}], dtype=tl.float32, is_pure=True, pack=2)"
        )
        wide = self.cse.generate(self.compute, code, dtype=F32, shape=loaded.shape)
        wide.mask_vars = loaded.mask_vars
        return wide

    kernel_class.load = load


def _holds_rows(kernel: Any) -> bool:
    """Whether a tile of the kernel is a few whole rows, with groups of columns."""
    return kernel.persistent_reduction and any(map(kernel.features.contains_op, GROUP_OPS))


def _along_columns(index: sympy.Expr) -> bool:
    symbols = _in_roots(index).free_symbols
    return symbols == {_innermost().symbol()}


def _in_layout_of_rows(index: str) -> str:
    """The index of a store, whose layout shall be that of bf16 rows.

    A thread would store 16 bytes, which are more codes than it can load bf16 columns at once.
    """
    tree, rank = _innermost(), len(V.kernel.dense_size_list())
    contiguous = [*(1 for _ in range(rank - 1)), LOADED_COLUMNS]
    for name in (node.name for node in tree.nodes.values() if node.expr == tree.symbol()):
        index = re.sub(rf"\b{name}\b", f"tl.max_contiguous({name}, {contiguous})", index)
    return index


def _store_groups(
    store: Callable[..., None],
    guarded: Any,
    group: int,
    name: str,
    index: sympy.Expr,
    value: Any,
    mode: str | None = None,
) -> None:
    """A kernel's ``store``, which prints those through ``guarded`` once per group of columns."""
    if str(guarded) not in map(str, index.free_symbols):
        return store(name, index, value, mode)
    kernel, groups = V.kernel, _GroupAxis(group)
    dense = kernel.dense_size_list()
    if str(guarded.shape[-1]) == dense[-1]:
        # The index was computed for every column; the first one of a group stores.
        _guards(kernel)[str(guarded)].append(f"({groups.tree.name} % {group} == 0)")
        code = _spread(value, [*_group_shape(group), str(group)], dense)
        value = kernel.cse.generate(kernel.compute, code, dtype=value.dtype, shape=tuple(dense))
        return store(name, index, value, mode)
    masks = OrderedSet([*_guards(kernel)[str(guarded)], *groups.masks(groups.trees)])
    address = f"{kernel.args.output(name)} + ({kernel.index_to_str(groups.along(index))})"
    line = f"tl.store({address}, {value}, {' & '.join(masks) or None})"
    kernel.stores.writeline(DeferredLine(name, line))


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
        self.group, self.shape = group, V.kernel.dense_size_list()
        inner = self.shape[-1]
        if len(self.shape) > 1:
            # What Inductor calls TMA restrictions is a lower bound on the sizes it may choose.
            smallest = V.kernel.tma_min_block_sizes
            smallest[inner] = max(group, smallest.get(inner, 1))
        self.full = ", ".join(self.shape)
        self.grouped = ", ".join([*_group_shape(group), str(group)])
        asserted = V.kernel.__dict__.setdefault(PREFIX + "asserted", set())
        if group not in asserted:
            asserted.add(group)
            V.kernel.compute.writeline(
                f"tl.static_assert({inner} % {group} == 0, 'a tile must hold whole blocks')"
            )

    def split(self, value: Any, elements: int = 1) -> str:
        """``value``, one element per ``elements`` columns, with them as `[groups, elements]`."""
        full, grouped = self.full, self.grouped
        if elements > 1:
            full = ", ".join(_group_shape(elements))
            grouped = ", ".join([*_group_shape(self.group), str(self.group // elements)])
        return f"tl.reshape(tl.broadcast_to({value}, [{full}]), [{grouped}])"


def _print_block_amax(value: Any, column: Any, group: int) -> str:
    groups = _Groups(group)
    # A maximum passes NaN over, unless there is nothing else.
    return f"tl.maximum(tl.max({groups.split(value)}, {len(groups.shape)}), 0.0)"


def _print_amax_of_groups(value: Any, column: Any, group: int, larger: int) -> str:
    groups = _Groups(larger)
    largest = f"tl.max({groups.split(value, group)}, {len(groups.shape)})"
    grouped = [*_group_shape(larger), str(larger // group)]
    return _spread(largest, grouped, list(_group_shape(group)))


def _print_spread(value: Any, column: Any, group: int, to: int) -> str:
    _Groups(group)
    return _spread(value, [*_group_shape(group), str(group // to)], list(_group_shape(to)))


def _spread(value: Any, grouped: list[str], dense: list[str]) -> str:
    expanded = f"tl.expand_dims({value}, {len(dense)})"
    repeated = f"tl.broadcast_to({expanded}, [{', '.join(grouped)}])"
    return f"tl.reshape({repeated}, [{', '.join(dense)}])"


class _GroupAxis:
    """The innermost tile axis with one element per group of columns."""

    def __init__(self, group: int) -> None:
        self.tree, self.group, self.sizes = _innermost(), group, _group_shape(group)
        trees = V.kernel.active_range_trees()
        self.trees = [tree for tree in trees if tree.tensor_dim is not None]

    @functools.cached_property
    def numbers(self) -> Any:
        """A variable with the number of each group."""
        tree, group = self.tree, self.group
        expand = V.kernel.indexing_size_str(tree.tensor_dim)
        within = f"tl.arange(0, {tree.prefix.upper()}BLOCK // {group}){expand}"
        return self.variable(f"{tree.prefix}offset // {group} + {within}", torch.int32, [tree])

    def variable(self, code: str, dtype: torch.dtype, trees: Iterable[Any]) -> Any:
        """A variable that varies along the axes of ``trees``, computed before any load."""
        dims = {tree.tensor_dim for tree in trees}
        shape = tuple(size if dim in dims else "1" for dim, size in enumerate(self.sizes))
        variable = V.kernel.cse.generate(_early_buffer(), code, dtype=dtype, shape=shape)
        _early_variables()[str(variable)] = _early_buffer(), shape[-1] == "1"
        return variable

    def along(self, expression: sympy.Expr) -> sympy.Expr:
        """An index expression at the first column of each group."""
        expression, column = _in_roots(expression), self.tree.symbol()
        if self.group == 1 or column not in expression.free_symbols:
            return expression
        number = sympy.Symbol(str(self.numbers), integer=True, nonnegative=True)
        return expression.xreplace({column: self.group * number})

    def masks(self, trees: Iterable[Any]) -> OrderedSet[str]:
        """Masks of the elements that exist along the axes of ``trees``."""
        masks = OrderedSet(f"{tree.prefix}mask" for tree in trees)
        V.kernel.filter_masks(masks)
        columns = f"{self.tree.prefix}mask"
        if self.group > 1 and columns in masks:
            masks.remove(columns)
            code = f"{self.group} * {self.numbers} < {self.tree.prefix}numel"
            masks.add(str(self.variable(code, torch.bool, [self.tree])))
        return masks

    def index(self, expression: sympy.Expr) -> Any:
        """A variable with :meth:`along` of an expression, masked where it is negative."""
        symbols = _in_roots(expression).free_symbols
        trees = [tree for tree in self.trees if tree.symbol() in symbols]
        expression = self.along(expression)
        code = V.kernel.index_to_str(expression)
        if not trees:
            code = f"tl.full({[1] * len(self.sizes)}, {code}, tl.int32)"
        index = self.variable(code, torch.int32, trees)
        index.mask_vars = self.masks(trees)
        if not expression.is_nonnegative:
            index.mask_vars.add(str(self.variable(f"{index} >= 0", torch.bool, trees)))
        # The masks of an argument have an element per column.
        index.update_on_args = lambda *_: None
        return index


def _early_buffer() -> Any:
    """Where early loads belong: not behind the reduction of the row, as Inductor has it.

    Few rows take as long as the loads that wait for one another, and the assembler lets these wait
    for those of the row unless a barrier keeps them in front. With many rows, the row's loads
    should decide the layout of the tile.
    """
    return V.kernel.body if _holds_few_rows(V.kernel) else V.kernel.loads


def _holds_few_rows(kernel: Any) -> bool:
    """Whether all rows of a persistent reduction are so few that a kernel waits, not computes."""
    few = V.graph.sizevars.optimization_hint(_rows(kernel), fallback=FEW_ROWS + 1) <= FEW_ROWS
    return kernel.persistent_reduction and few


def _rows(kernel: Any) -> sympy.Expr:
    return sympy_product(tree.numel for tree in kernel.range_trees if not tree.is_reduction)


def _early_variables() -> dict[str, tuple[Any, bool]]:
    """Variables that the loads of the kernel being printed may use, by name: their buffers, and
    whether they have an element per row.
    """
    kernel, name = V.kernel, PREFIX + "early"
    if name not in kernel.__dict__:
        setattr(kernel, name, {})
        if _holds_few_rows(kernel):
            kernel.indexing_code.writeline("tl.debug_barrier()")
    return getattr(kernel, name)


@functools.cache
def _load_early() -> None:
    """Loads by group, and of what all rows share, go into the buffer of early loads."""
    kernel_class: Any = TritonKernel
    original = kernel_class.get_load_buffer

    def get_load_buffer(self: Any, indexing: Any) -> Any:
        if _holds_rows(self) and _along_columns(indexing.index):
            _early_variables()
            return original(self, indexing) if _is_the_row(self) else _early_buffer()
        return _group_load_buffer(self, indexing) or original(self, indexing)

    kernel_class.get_load_buffer = get_load_buffer


def _is_the_row(kernel: Any) -> bool:
    """Whether the load being printed, which no row's index is part of, is the one row of a kernel.

    Its index is that of what all rows would share. What is reduced is loaded first.
    """
    name = PREFIX + "row"
    if name in kernel.__dict__ or _rows(kernel) != 1:
        return False
    setattr(kernel, name, True)
    return True


def _group_load_buffer(kernel: Any, indexing: Any) -> Any:
    """The buffer of a load by group; None for others."""
    if PREFIX + "early" not in kernel.__dict__:
        return None
    symbols = indexing.index.free_symbols
    if not symbols:
        # The group index of a single row.
        return _early_buffer()
    early = _early_variables()
    names = [str(symbol) for symbol in (*symbols, *indexing.mask_vars)]
    names = [name for name in names if name.startswith("tmp")]
    if not names or not all(name in early for name in names):
        return None
    buffers, by_row = zip(*(early[name] for name in names), strict=True)
    if any(buffer is not buffers[0] for buffer in buffers):
        return None
    return _late_buffer(kernel) if all(by_row) and not _holds_few_rows(kernel) else buffers[0]


def _late_buffer(kernel: Any) -> Any:
    """Where loads by row belong, with many rows: the slot is needed last, and until then two
    registers per row would be taken away from other programs. A barrier keeps the assembler from
    loading it first all the same.
    """
    name = PREFIX + "late"
    if not kernel.persistent_reduction:
        return kernel.loads
    if name not in kernel.__dict__:
        setattr(kernel, name, True)
        kernel.compute.writeline("tl.debug_barrier()")
    return kernel.compute


def _print_group_index(position: Any, group: int) -> Any:
    return _GroupAxis(group).index(_index_argument(1))


def _print_half(value: Any, column: Any, odd: int) -> str:
    code = f"tl.split({_Groups(2).split(value)})"
    shape = _group_shape(2)
    pair = V.kernel.cse.generate(V.kernel.compute, code, dtype=value.dtype, shape=shape)
    return f"{pair}[{odd}]"


def _print_interleave(even: Any, column: Any, odd: Any) -> str:
    return f"tl.reshape(tl.join({even}, {odd}), [{_Groups(2).full}])"


def _print_packed(instruction: str, *operands: Any) -> str:
    constraints = ",".join(["=r", *("r" for _ in operands)])
    return (
        f"tl.inline_asm_elementwise('{instruction}', '{constraints}', "
        f"[{', '.join(map(str, operands))}], dtype=tl.int32, is_pure=True, pack=1)"
    )


def _floats(pairs: Any, kind: str) -> tuple[str, str]:
    """The 16-bit floats of the even and of the odd columns."""
    cast = f".to(tl.int16).to(tl.{kind}, bitcast=True)"
    return f"{pairs}{cast}", f"({pairs} >> 16){cast}"


def _print_packed_amax(pairs: Any, column: Any, group: int, kind: str) -> str:
    groups = _Groups(group)
    body = _print_packed(f"max.xorsign.abs.{kind}x2 $0, $1, $2;", "left", "right")
    float_type = {"bf16": "bfloat16", "f16": "float16"}[kind]
    larger = V.kernel.helper_functions.add(
        f"@triton.jit\ndef {{name}}(left, right):\n    return {body}\n", base_name=f"_larger_{kind}"
    )
    code = f"tl.reduce({groups.split(pairs, 2)}, {len(groups.shape)}, {larger})"
    largest = V.kernel.cse.generate(
        V.kernel.compute, code, dtype=torch.int32, shape=_group_shape(group)
    )
    even, odd = (f"tl.abs({half}.to(tl.float32))" for half in _floats(largest, float_type))
    # Signs are mixed, and a maximum passes NaN over, unless there is nothing else.
    return f"tl.maximum(tl.maximum({even}, {odd}), 0.0)"


def _print_packed_codes(pairs: Any, column: Any) -> str:
    even, odd = _floats(pairs, "float16")
    dense = _print_interleave(even, column, odd)
    return f"{dense}.to(tl.float8e4nv).to(tl.uint8, bitcast=True)"


def _index_argument(position: int) -> sympy.Expr:
    """The index expression behind an argument of the ``ops`` call being printed."""
    expression = V.interpreter.current_node.args[position].args[1]
    if isinstance(expression, int):
        return sympy.Integer(expression)
    return V.interpreter.submodules["get_index"](expression.args[0])


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
            f"groups of {group} columns need the row as the innermost tile axis, but column "
            f"{column} does not run along {index}. Keep whole rows ([tokens, head_dim]) between "
            "the norm and the store"
        )
    period = 4 * group
    for start in _aligned_starts(column, index, group, period):
        columns = [int(column.subs(index, start + step)) for step in range(group)]
        if columns != list(range(columns[0], columns[0] + group)) or columns[0] % group:
            raise RowLayoutError(
                f"groups of {group} columns need the row as the innermost tile axis, but "
                f"{index} = {start} begins columns {columns[0]}, {columns[1]}... Keep whole rows "
                "([tokens, head_dim]) between the norm and the store, head_dim a multiple of "
                f"{group}"
            )


def _aligned_starts(
    column: sympy.Expr, index: sympy.Symbol, group: int, period: int
) -> Iterable[int]:
    """Multiples of ``group`` that cover the row's period: columns are affine or a modulus."""
    moduli = [int(m.args[2]) for m in column.atoms(sympy.Function) if len(m.args) == 3]
    return range(0, 2 * max([period, *moduli]), group)
