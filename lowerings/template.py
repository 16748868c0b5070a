"""Triton templates that share their mathematics with the hand-callable kernels."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

from torch._inductor import ir
from torch._inductor.ir import IRNode, TensorBox
from torch._inductor.select_algorithm import (
    TritonTemplate,
    autotune_select_algorithm,
    realize_inputs,
)

TEMPLATES = "fp8kv_inductor.lowerings.templates"


def make_template(
    name: str, grid: Callable[..., tuple[Any, Any, Any]], functions: Sequence[Any]
) -> TritonTemplate:
    """The template ``templates/<name>.py.jinja``, followed by the source of Triton functions.

    Args:
        name: of the operator.
        grid: a SymbolicGridFn over the ``call_sizes`` of a choice.
        functions: ``@triton.jit`` functions that the template calls, directly or not.
    """
    body = resources.files(TEMPLATES).joinpath(f"{name}.py.jinja").read_text()
    pasted = [inspect.getsource(function.fn) for function in functions]
    return TritonTemplate(name=f"fp8kv_{name}", grid=grid, source="\n\n".join([body, *pasted]))


def realized(*boxes: TensorBox) -> list[IRNode]:
    """The buffers or views behind ``boxes``, which a template can address."""
    return [realize_inputs(box) for box in boxes]


def select(
    template: TritonTemplate,
    inputs: list[IRNode],
    layout: ir.Layout,
    choices: Sequence[dict[str, Any]],
    **shared: Any,
) -> TensorBox:
    """Call the template with one of several choices; more than one is timed by Inductor.

    Args:
        template: what to instantiate.
        inputs: in the order of ``def_kernel``.
        layout: of the output.
        choices: keyword arguments of each choice.
        shared: keyword arguments of all choices.

    Raises:
        NotImplementedError: no choice can be generated.
    """
    callers: list[Any] = []
    errors = [
        template.maybe_append_choice(callers, input_nodes=inputs, layout=layout, **shared, **choice)
        for choice in choices
    ]
    if not callers:
        raise NotImplementedError(f"no choice of {template.name} can be generated: {errors}")
    result = autotune_select_algorithm(template.name, callers, inputs, layout)
    # A tuple (result, chosen) since torch 2.12.
    return result[0] if isinstance(result, tuple) else result
