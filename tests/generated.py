"""Load Triton kernels out of generated code: compile them for a GPU, or interpret them."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch._inductor.runtime.hints import DeviceProperties
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ARCHITECTURES = (89, 90, 100, 120)
TEMPLATES = 100
"""A compute capability on which the read is a Triton template; sm_90 has a kernel of its own."""
TORCH_DTYPES = {
    "*bf16": torch.bfloat16,
    "*fp16": torch.float16,
    "*fp32": torch.float32,
    "*u8": torch.uint8,
    "*i32": torch.int32,
    "*i64": torch.int64,
}


@triton.jit
def _rsqrt(x):
    return 1.0 / tl.sqrt(x)


@triton.jit
def _exp(x):
    return tl.exp(x)


class GeneratedKernel:
    """One kernel of a ``CudaSource``, without Inductor's launcher.

    Attributes:
        meta: Inductor's ``triton_meta``: signature, alignment, constants.
    """

    def __init__(self, name: str, source: str, folder: Path) -> None:
        source = source.replace("triton_helpers.set_driver_to_gpu()", "")
        header, rest = source.split("@triton_heuristics", 1)
        meta = re.search(r"triton_meta=(\{.*\}),\n", rest)
        assert meta
        self.name, self.folder = name, folder
        self.source = header + "\n@triton.jit" + rest.split("@triton.jit", 1)[1]
        self.meta: dict[str, Any] = eval(meta.group(1), {"DeviceProperties": DeviceProperties})

    def compile(self, capability: int, num_warps: int = 4, **constants: int) -> Any:
        """A cubin and its PTX for ``capability``; no GPU is needed."""
        function = getattr(_load(f"{self.name}_compiled", self.source, self.folder), self.name)
        signature = dict(self.meta["signature"])
        signature.update(dict.fromkeys(constants, "constexpr"))
        source = ASTSource(
            fn=function,
            signature=signature,
            constexprs={(function.arg_names.index(k),): v for k, v in constants.items()},
            attrs=self.meta["configs"][0],
        )
        target = GPUTarget("cuda", capability, 32)
        return triton.compile(source, target=target, options={"num_warps": num_warps})

    def interpret(self, grid: tuple[int, ...], *args: Any, **constants: int) -> None:
        """Run over CPU tensors; to be called inside ``interpreter.interpreted()``."""
        module = _load(f"{self.name}_interpreted", self.source, self.folder)
        module.libdevice = SimpleNamespace(rsqrt=_rsqrt, exp=_exp)
        getattr(module, self.name)[grid](*args, **constants)

    def arguments(self, *tensors: torch.Tensor, sizes: tuple[int, ...] = ()) -> list[Any]:
        """``tensors`` in any order and ``sizes`` in the kernel's order, matched by dtype.

        Tensors of the same dtype must come in the kernel's order.
        """
        left, sizes_left = list(tensors), list(sizes)
        ordered: list[Any] = []
        for kind in self.meta["signature"].values():
            if kind in TORCH_DTYPES:
                match = next(t for t in left if t.dtype == TORCH_DTYPES[kind])
                left = [t for t in left if t is not match]
                ordered.append(match)
            elif kind != "constexpr":
                ordered.append(sizes_left.pop(0))
        assert not left and not sizes_left
        return ordered


def _load(name: str, source: str, folder: Path) -> ModuleType:
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
