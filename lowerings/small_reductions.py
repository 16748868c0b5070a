"""Reductions over a few elements in front of our row operators, written out element by element.

Pooling the ring of a compressor is a softmax and a sum over 8 slots. As reductions they need a
kernel of their own, because the row norm behind them reduces along another axis. Written out, they
are pointwise over the row, and Inductor fuses them with the norm. It writes out shorter ones by
itself, but keeps what they share, such as the exponentials, in memory.

Maxima are equal; a sum is added from the first element to the last.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten

LONGEST = 8
"""Elements of the longest reduction that is written out: the ring of an overlapping ratio."""

COMBINE: dict[Any, Any] = {
    aten.sum.dim_IntList: aten.add.Tensor,
    aten.amax.default: aten.maximum.default,
    aten.amin.default: aten.minimum.default,
}
ROW_OPS = ("fp8kv::rope", "fp8kv::act_quant", "fp8kv::store")


def unroll(graph: Graph, device: str = "cuda") -> None:
    """Write out short fp32 reductions whose results run into our operators as rows.

    Args:
        graph: behind AOTAutograd, with fake tensors in ``meta``.
        device: type of device; where Inductor does not fuse rows, there is nothing to gain.
    """
    if not any(is_row_op(node) for node in graph.nodes):
        return
    for node in list(graph.nodes):
        dim = _short_dim(node)
        if dim is not None and _val(node).device.type == device and _reaches_row_op(node):
            _Unroller(graph, node).replace(dim)


def _val(node: Node) -> Any:
    return node.meta.get("val")


def _args(node: Node) -> tuple[Any, ...]:
    return node.args


def is_row_op(node: Node) -> bool:
    """Whether ``node`` is an operator that iterates over the rows of its first argument."""
    # A mutating operator may be wrapped; then it is the wrapper's first argument.
    return any(
        isinstance(op, torch._ops.OpOverload) and op.name() in ROW_OPS
        for op in (node.target, *_args(node)[:1])
    )


def _is_pointwise(node: Node) -> bool:
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or not isinstance(_val(node), torch.Tensor):
        return False
    simple = all(isinstance(arg, (Node, int, float, torch.dtype)) for arg in node.args)
    simple = simple and not any(isinstance(arg, Node) for arg in node.kwargs.values())
    return simple and (torch.Tag.pointwise in op.tags or op.name() == "prims::convert_element_type")


def _reduced_dim(node: Node) -> int | None:
    """The one dimension that an fp32 reduction of ``COMBINE`` reduces, counted from the front."""
    if node.target not in COMBINE or len(node.args) < 2 or node.kwargs:
        return None
    source, dims = _args(node)[:2]
    if len(dims) != 1 or _val(source).dtype != torch.float32:
        return None
    return dims[0] % _val(source).dim()


def _short_dim(node: Node) -> int | None:
    """As ``_reduced_dim``, if that is short and not the row itself."""
    dim = _reduced_dim(node)
    if dim is None:
        return None
    shape = _val(_args(node)[0]).shape
    if dim == len(shape) - 1:
        return None
    size = shape[dim]
    if not isinstance(size, int):
        # The first dimension counts tokens or groups; others become constants of the graph.
        size = size.node.hint if dim > 0 else None
    return dim if size is not None and 1 < size <= LONGEST else None


def _reaches_row_op(node: Node) -> bool:
    """Whether a row operator follows behind pointwise operators, views and norms alone."""
    seen, todo = {node}, [node]
    while todo:
        for user in todo.pop().users:
            if is_row_op(user):
                return True
            if user not in seen and _keeps_rows(user):
                seen.add(user)
                todo.append(user)
    return False


def _keeps_rows(node: Node) -> bool:
    if node.target in (aten.mean.dim, *COMBINE):
        source, dims = _args(node)[:2]
        return [dim % _val(source).dim() for dim in dims] == [_val(source).dim() - 1]
    return _is_pointwise(node) or node.target in (aten.unsqueeze.default, aten.squeeze.dims)


class _Unroller:
    """Writes out one reduction and, on the way to it, what its elements are computed from."""

    def __init__(self, graph: Graph, reduction: Node) -> None:
        self.graph = graph
        self.reduction = reduction
        self.taken: dict[tuple[Node, int, int], Node] = {}
        self.folded: dict[Node, Node] = {}

    def replace(self, dim: int) -> None:
        """Put the written out reduction in the place of the old one."""
        before = list(self.graph.nodes)
        with self.graph.inserting_before(self.reduction):
            result = self.fold(self.reduction, dim)
            if _val(result).dim() < _val(self.reduction).dim():
                result = self.call(aten.unsqueeze.default, result, dim)
        self.reduction.replace_all_uses_with(result)
        unused = {self.reduction, *(node for node, _, _ in self.taken), *self.folded}
        for node in reversed(before):
            if node in unused and not node.users:
                self.graph.erase_node(node)

    def fold(self, reduction: Node, dim: int) -> Node:
        """A reduction as a chain of operators, without the reduced dimension."""
        if reduction not in self.folded:
            source, combine = _args(reduction)[0], COMBINE[reduction.target]
            first, *rest = (self.take(source, dim, i) for i in range(int(_val(source).shape[dim])))
            for element in rest:
                first = self.call(combine, first, element)
            self.folded[reduction] = first
        return self.folded[reduction]

    def take(self, node: Node, dim: int, index: int) -> Node:
        """``node.select(dim, index)``, taken from what ``node`` is computed from."""
        key = node, dim, index
        if key not in self.taken:
            self.taken[key] = self._take(node, dim, index)
        return self.taken[key]

    def _take(self, node: Node, dim: int, index: int) -> Node:
        if _is_pointwise(node):
            args = (self._take_broadcast(node, arg, dim, index) for arg in _args(node))
            return self.call(node.target, *args, **node.kwargs)
        if _reduced_dim(node) == dim and _short_dim(node) == dim:
            return self.fold(node, dim)
        if node.target is aten.unsqueeze.default:
            source, at = _args(node)[0], _args(node)[1] % _val(node).dim()
            if at == dim:
                return source
            inner = self.take(source, dim - (at < dim), index)
            return self.call(aten.unsqueeze.default, inner, at - (dim < at))
        if selection := _selection(node):
            source, at, selected = selection
            inner = self.take(source, dim + (at <= dim), index)
            if inner.target is aten.select.int:
                return self.call(aten.select.int, inner, at - (dim < at), selected)
            return self.take(inner, at - (dim < at), selected)
        return self.call(aten.select.int, node, dim, index)

    def _take_broadcast(self, node: Node, arg: Any, dim: int, index: int) -> Any:
        if not isinstance(arg, Node) or not isinstance(_val(arg), torch.Tensor):
            return arg
        own = dim - _val(node).dim() + _val(arg).dim()
        if own < 0:
            return arg
        size = _val(arg).shape[own]
        return self.take(arg, own, 0 if isinstance(size, int) and size == 1 else index)

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Node:
        """A new node."""
        node = self.graph.call_function(op, args, kwargs)
        node.meta = {
            k: v for k, v in self.reduction.meta.items() if k in ("stack_trace", "nn_module_stack")
        }
        values = [_val(arg) if isinstance(arg, Node) else arg for arg in args]
        with _val(self.reduction).fake_mode:
            node.meta["val"] = op(*values, **kwargs)
        return node


def _selection(node: Node) -> tuple[Node, int, int] | None:
    """Source, dimension and index of a node that selects by constants."""
    if node.target is aten.select.int:
        source, dim, index = _args(node)
    elif node.target is operator.getitem and _args(node)[0].target is aten.unbind.int:
        unbound, index = _args(node)
        source, dim = (*_args(unbound), 0)[:2]
    else:
        return None
    if not isinstance(index, int) or index < 0:
        return None
    return source, dim % _val(source).dim(), index
