"""What Inductor's scheduler may do with loops over rows.

The primitives of ``block`` need blocks of a row as runs of the innermost tile axis. Inductor
reorders, fuses and tiles loops for coalesced memory access and knows nothing of that. Rows are
therefore computed in a :class:`RowBuffer`, and :func:`keep_rows_whole` gives the scheduler three
rules for it: its loops are never reordered, only reductions over whole rows share its kernel, and
the innermost tile axis holds whole rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import sympy
from torch._inductor import config, ir
from torch._inductor.codegen.simd import SIMDScheduling
from torch._inductor.ir import TensorBox
from torch._inductor.scheduler import FusedSchedulerNode, Scheduler, SchedulerNode
from torch._inductor.virtualized import V

from fp8kv_inductor.lowerings.block import GROUP_OPS


class RowBuffer(ir.ComputedBuffer):
    """Rows `[..., D]` whose loops stay as the lowering writes them: columns innermost."""

    @property
    def width(self) -> sympy.Expr:
        """D."""
        return self.data.ranges[-1]

    def simplify_and_reorder(self, *args: Any, **kwargs: Any) -> Any:
        with config.patch(pick_loop_orders=False):
            return super().simplify_and_reorder(*args, **kwargs)

    def get_fill_order(self) -> list[int] | None:
        """No wish: the layout is contiguous."""
        return None

    @classmethod
    def register(cls, layout: ir.OutputSpec, data: ir.Loops) -> RowBuffer:
        """A new buffer of the graph."""
        buffer = cls(name=None, layout=layout, data=data)
        buffer.name = V.graph.register_buffer(buffer)
        V.graph.register_operation(buffer)
        return buffer


class _RowBox(ir.StorageBox):
    """A pointwise over rows that becomes a :class:`RowBuffer`, whoever realizes it."""

    def realize(self) -> str | None:
        name = super().realize()
        if type(self.data) is ir.ComputedBuffer:
            # Changed in place: what else a new buffer is given differs by torch version.
            self.data.__class__ = RowBuffer
        return name


def row_box(data: ir.Pointwise) -> TensorBox:
    """A box of rows. Loops that inline it must be those of a :class:`RowBuffer`, too."""
    return TensorBox(_RowBox(data))


@functools.cache
def keep_rows_whole() -> None:
    """Give the scheduler its rules for :class:`RowBuffer`."""
    scheduler: Any = Scheduler
    scheduler.can_fuse = _fuses_whole_rows(scheduler.can_fuse)
    node: Any
    for node in (SchedulerNode, FusedSchedulerNode):
        node.reorder_loops_by_dep_pair = _unless_rows(node.reorder_loops_by_dep_pair)
    simd: Any = SIMDScheduling
    simd.get_tiling_and_scores = classmethod(_tiles_whole_rows(simd.get_tiling_and_scores.__func__))


def _widths(nodes: Iterable[Any]) -> set[sympy.Expr]:
    """Widths of the rows that scheduler nodes compute in groups of columns."""
    return {
        node.node.width
        for node in nodes
        if isinstance(getattr(node, "node", None), RowBuffer)
        and any(map(node._body.has_op, GROUP_OPS))
    }


def _holds_whole_rows(size: sympy.Expr, widths: set[sympy.Expr]) -> bool:
    return all(V.graph.sizevars.statically_known_multiple_of(size, width) for width in widths)


def _unless_rows(reorder: Callable[..., bool]) -> Callable[..., bool]:
    def wrapped(node: Any, *deps: Any) -> bool:
        return not _widths(node.get_nodes()) and reorder(node, *deps)

    return wrapped


def _fuses_whole_rows(can_fuse: Callable[..., bool]) -> Callable[..., bool]:
    def wrapped(scheduler: Any, node1: Any, node2: Any, *args: Any, **kwargs: Any) -> bool:
        nodes = [*node1.get_nodes(), *node2.get_nodes()]
        widths = _widths(nodes)
        groups = {node.group[1] for node in nodes if node.is_reduction()}
        if widths and (
            any(node.is_template() for node in nodes)
            or len(groups) > 1
            or not all(_holds_whole_rows(reduced, widths) for _, reduced in groups)
        ):
            return False
        return can_fuse(scheduler, node1, node2, *args, **kwargs)

    return wrapped


def _tiles_whole_rows(choose: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(
        cls: Any, nodes: Any, numel: sympy.Expr, reduced: sympy.Expr = sympy.S.One, *args: Any
    ) -> Any:
        tiling, scores = choose(cls, nodes, numel, reduced, *args)
        innermost = tiling["x"] if reduced == 1 else list(tiling.values())[-1]
        if _holds_whole_rows(innermost, _widths(nodes)):
            return tiling, scores
        return cls.create_tiling([numel], [reduced]), None

    return wrapped
