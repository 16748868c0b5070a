"""The inverse rope of a read's output, moved into the read.

An epilogue of a template reaches one element at a time, not the other one of its pair. The read
itself can rotate: this pass hands it the angles where a graph rotates all that the read gives.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

ANGLES = 11
"""Position of a read's angles among its arguments."""


def fuse(graph: Graph) -> None:
    """Replace ``rope(read, cos, sin, inverse=True)`` by a read with angles.

    Left alone: an output that is also used as it is, a read that rotates already, and angles that
    are computed behind the read, which must stay where it is among the stores.
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    for rotation in list(graph.nodes):
        read = _read_behind(rotation)
        if read is None:
            continue
        out = _argument(rotation, 0, "x")
        cos, sin = _argument(rotation, 1, "cos"), _argument(rotation, 2, "sin")
        if max(position[cos], position[sin]) < position[read]:
            read.args = read.args[:ANGLES]
            read.kwargs = {**read.kwargs, "cos": cos, "sin": sin}
            rotation.replace_all_uses_with(out)
            graph.erase_node(rotation)


def _read_behind(node: Node) -> Node | None:
    """The read whose output ``node`` alone uses, to rotate it back."""
    if node.target is not torch.ops.fp8kv.rope.default:
        return None
    out = _argument(node, 0, "x")
    if not _argument(node, 3, "inverse") or out.target is not operator.getitem or out.args[1] != 0:
        return None
    read = out.args[0]
    if read.target is not torch.ops.fp8kv.sparse_attention.default or len(out.users) > 1:
        return None
    return None if _argument(read, ANGLES, "cos") is not None else read


def _argument(node: Node, position: int, name: str) -> Any:
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name)
