"""Choices of a read: Triton templates made of the hand-callable kernels, and those kernels."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.ir import IRNode, TensorBox
from torch._inductor.select_algorithm import (
    ExternKernelCaller,
    ExternKernelChoice,
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


class ExternRead(ExternKernelChoice):
    """A function as a choice next to a template: same inputs, one of which it writes, and output.

    The function takes the tensors in the order of the inputs, ``out`` and constants by name.
    """

    def __init__(self, function: Callable[..., None], name: str, written: int) -> None:
        """``written`` is the position of the input that the function writes."""
        super().__init__(function, name=f"fp8kv_{name}")
        self.written = written

    def bind(self, input_nodes: Any, layout: Any, *_: Any, **constants: Any) -> ExternKernelCaller:
        """A call of the function in a graph."""
        self.ordered_kwargs_for_cpp_kernel = ()
        caller = _ExternReadCaller(self, input_nodes, layout, constants)
        caller.written = input_nodes[self.written]
        return caller


class _ExternReadCaller(ExternKernelCaller):
    written: IRNode

    def output_node(self) -> TensorBox:
        box = super().output_node()
        node = box.data.data
        layout = ir.NoneLayout(device=node.get_device())
        node.mutation_outputs.append(ir.MutationOutput(layout, self.written, node))
        return box


def select(
    name: str,
    inputs: list[IRNode],
    layout: ir.Layout,
    choices: Sequence[tuple[TritonTemplate | ExternRead, dict[str, Any]]],
    input_gen_fns: dict[int, Callable[[Any], torch.Tensor]] | None = None,
) -> TensorBox:
    """Call one of several choices; Inductor times them if there is more than one.

    Args:
        name: of the operator.
        inputs: in the order of ``def_kernel``.
        layout: of the output.
        choices: what to instantiate and with which keyword arguments, best guess first.
        input_gen_fns: by position, what makes an input to time with; others are random.

    Raises:
        NotImplementedError: no choice can be generated.
    """
    callers: list[Any] = []
    errors = [
        choice.maybe_append_choice(callers, input_nodes=inputs, layout=layout, **arguments)
        for choice, arguments in choices
    ]
    if not callers:
        raise NotImplementedError(f"no choice of {name} can be generated: {errors}")
    result = autotune_select_algorithm(name, callers, inputs, layout, input_gen_fns=input_gen_fns)
    # A tuple (result, chosen) since torch 2.12.
    return result[0] if isinstance(result, tuple) else result
