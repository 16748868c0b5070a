"""Whole generated CUDA modules on the CPU, their kernels in Triton's interpreter."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from generated import TEMPLATES, GeneratedKernel
from interpreter import interpreted

from fp8kv_inductor.lowerings.cross_compile import cuda_source, run_cuda_source, triton_kernels

LARGEST_BLOCK = {"x": 1024, "y": 64, "z": 16, "r0_": 128}
"""Block sizes by axis: small enough that kernels loop and have several programs."""


def interpreted_graph(
    fn: Callable[..., Any], args: tuple[Any, ...], dynamic: bool | None = None
) -> Any:
    """``fn(*args)`` through the CUDA code that torch.compile generates for it."""
    with tempfile.TemporaryDirectory() as folder, interpreted():

        def load(wrapper: str) -> Callable[..., Any]:
            return _load(wrapper, Path(folder))

        return run_cuda_source(fn, args, load, TEMPLATES, dynamic=dynamic)


def compile_kernels(
    fn: Callable[..., Any], args: tuple[Any, ...], dynamic: bool | None = None
) -> list[Any]:
    """The kernels of a graph, compiled for sm_90."""
    kernels = cuda_source(fn, args, dynamic=dynamic).kernels
    with tempfile.TemporaryDirectory() as folder:
        return [_Launcher(*kernel, Path(folder)).compile(90) for kernel in kernels.items()]


def _load(wrapper: str, folder: Path) -> Callable[..., Any]:
    """The ``call`` of a generated module, over CPU tensors."""
    guards = torch._C._dynamo.guards
    checks = [name for name in dir(guards) if name.startswith("assert_")]
    namespace: dict[str, Any] = {
        **{name: getattr(guards, name) for name in checks},
        "torch": torch,
        "aten": torch.ops.aten,
        "assert_alignment": lambda *_: None,
        "copy_if_misaligned": lambda tensor: tensor,
        "copy_misaligned": lambda tensor: tensor,
        "empty_strided_cuda": lambda *shape: torch.empty_strided(*shape[:2], dtype=shape[2]),
        "get_raw_stream": lambda index: index,
        "reinterpret_tensor": guards._reinterpret_tensor,
    }
    for name, source in triton_kernels(wrapper).items():
        namespace[name] = _Launcher(name, source, folder)
    runner = re.search(r"^class Runner:.*?(?=^runner = Runner)", wrapper, re.S | re.M)
    assert runner
    exec(runner.group(), namespace)
    call = namespace["Runner"](partitions=[]).call

    def run(*inputs: Any) -> Any:
        with (
            mock.patch("torch.cuda._DeviceGuard", contextlib.nullcontext),
            mock.patch("torch.cuda.set_device"),
        ):
            return call(list(inputs))

    return run


class _Launcher:
    """What Inductor's launcher does, with block sizes from a kernel's hints."""

    def __init__(self, name: str, source: str, folder: Path) -> None:
        def found(pattern: str, otherwise: str = "") -> str:
            match = re.search(pattern, source, re.M)
            return match.group(1) if match else otherwise

        self.kernel = GeneratedKernel(name, source, folder)
        self.parameters = re.findall(r"\w+(?=[,:) ])", found(rf"^def {name}(\(.*\)):") + " ")
        self.axes = "xyz"[: int(found(r"'grid_type': 'Grid([123])D", "0"))]
        least = eval(found(r"'tma_min_block_sizes': (\{.*?\})", "{}"))
        self.blocks = {}
        for axis, hint in eval(found(r"size_hints=(\{.*?\})", "{}")).items():
            block = f"{axis.upper()}BLOCK"
            if block in self.parameters:
                self.blocks[block] = max(min(hint, LARGEST_BLOCK[axis]), least.get(block, 1))

    def run(self, *args: Any, stream: int) -> None:
        if not self.axes:
            # A template's wrapper knows the grid.
            self.kernel.interpret(args[-3:], *args[:-3])
            return
        values = dict(zip(self.parameters, args, strict=False))
        grid = tuple(
            triton.cdiv(values[f"{axis}numel"], self.blocks.get(f"{axis.upper()}BLOCK", 1))
            for axis in self.axes
        )
        self.kernel.interpret(grid, *args, **self.blocks)

    def compile(self, capability: int) -> Any:
        return self.kernel.compile(capability, **self.blocks, **self.kernel.meta["constants"])
