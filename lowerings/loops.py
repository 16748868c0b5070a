"""Loops of the IR that the lowerings share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import sympy
import torch
from torch._inductor import ir

Index = Sequence[sympy.Expr]
Loader = Callable[[Index], Any]
"""From the index of an element to its ``ops`` value."""


def reduction_loader(
    device: torch.device,
    kind: Literal["sum", "max"],
    inner_fn: Callable[[Index, Index], Any],
    ranges: Index,
    over: Any,
) -> Loader:
    """Realize an fp32 reduction and return the loader of its result.

    Args:
        device: of the result.
        kind: how values are combined.
        inner_fn: value by the index within ``ranges`` and the index within the reduction.
        ranges: sizes of the result.
        over: size of the one dimension that is reduced.
    """
    box = ir.Reduction.create(
        device=device,
        dst_dtype=torch.float32,
        src_dtype=torch.float32,
        inner_fn=inner_fn,
        ranges=list(ranges),
        reduction_ranges=[sympy.sympify(over)],
        reduction_type=kind,
    )
    box.realize()
    return box.make_loader()
