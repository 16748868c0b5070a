"""The CUDA code that torch.compile would generate, on a machine without a GPU.

The real stack runs: Dynamo, AOTAutograd, post-grad passes, our lowerings, Inductor's scheduler and
Triton printer. Tensors are traced on the CPU and become fake CUDA tensors behind AOTAutograd; the
driver and the device properties are stand-ins; compilation stops where the wrapper module would be
loaded. Nothing is launched.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch._dynamo.device_interface import CudaInterface
from torch._dynamo.utils import detect_fake_mode
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch.utils import _triton as triton_probe
from torch.utils._pytree import tree_map
from triton.backends.compiler import GPUTarget

WARP_SIZE = 32


@dataclass(frozen=True)
class CudaSource:
    """Generated code.

    Attributes:
        wrapper: the whole generated module.
        kernels: Triton kernels by name, with their source.
    """

    wrapper: str
    kernels: dict[str, str]


def cuda_source(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    capability: int = 90,
    dynamic: bool | None = None,
    options: dict[str, Any] | None = None,
) -> CudaSource:
    """Compile ``fn`` for a CUDA device that need not exist and return the generated code.

    Args:
        fn: a function or module, traced as one graph (fullgraph).
        args: CPU tensors and other values to trace with; buffers of a module count as inputs.
        capability: compute capability, major and minor digit (90 for an H200).
        dynamic: as for torch.compile.
        options: Inductor configuration for this compilation.
    """
    captured: list[str] = []

    def capture(wrapper: str) -> Callable[..., Any]:
        captured.append(wrapper)
        raise _StopCompilation

    with contextlib.suppress(_StopCompilation):
        run_cuda_source(fn, args, capture, capability, dynamic, options)
    (wrapper,) = captured
    return CudaSource(wrapper, triton_kernels(wrapper))


def run_cuda_source(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    load: Callable[[str], Callable[..., Any]],
    capability: int = 90,
    dynamic: bool | None = None,
    options: dict[str, Any] | None = None,
) -> Any:
    """``fn(*args)`` as the caller of torch.compile sees it, for a stand-in of the CUDA device.

    Args:
        fn, args, capability, dynamic, options: as for :func:`cuda_source`.
        load: from the source of the generated module to a function of the graph's inputs, which
            are CPU tensors and sizes.
    """

    def stop_before_loading(graph: GraphLowering, *_: Any, **__: Any) -> None:
        raise _Generated(graph.codegen()[0].value)

    def inner(module: torch.fx.GraphModule, example_inputs: list[Any], **kwargs: Any) -> Any:
        kwargs.pop("inputs_to_check", None)
        try:
            with (
                _cuda_stand_in(capability),
                mock.patch.object(GraphLowering, "compile_to_module", stop_before_loading),
            ):
                compile_fx_inner(module, _move_to_cuda(module, example_inputs), **kwargs)
        except _Generated as generated:
            return load(generated.wrapper)
        raise AssertionError("the graph has no code")

    def backend(module: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        return compile_fx(module, example_inputs, inner_compile=inner)

    settings = {"force_disable_caches": True, "compile_threads": 1, **(options or {})}
    torch._dynamo.reset()
    try:
        with config.patch(settings), torch.no_grad():
            return torch.compile(fn, dynamic=dynamic, fullgraph=True, backend=backend)(*args)
    finally:
        torch._dynamo.reset()


def triton_kernels(wrapper: str) -> dict[str, str]:
    """Triton kernels by name in the source of a generated module."""
    definition = r"^(\w+) = async_compile\.triton\('\w+', '''(.*?)''', device_str='cuda'\)"
    return dict(re.findall(definition, wrapper, re.S | re.M))


def launches(wrapper: str) -> list[str]:
    """Kernels that a generated module calls, in order: Triton's, and ours that are called by name.

    Library kernels, such as matrix products, are not among them.
    """
    calls = r"^\s+(?:extern_kernels\.(fp8kv_\w+)\(|(triton_\w+)\.run\()"
    return [ours or name for ours, name in re.findall(calls, wrapper, re.MULTILINE)]


def buffers(wrapper: str) -> list[int]:
    """Element counts of the buffers of static size that a generated module allocates."""
    shapes = re.findall(r"empty_strided_(?:cpu|cuda)\(\(([^)]*)\)", wrapper)
    numbers = [re.findall(r"\w+", shape) for shape in shapes]
    return [math.prod(map(int, shape)) for shape in numbers if all(map(str.isdigit, shape))]


def pool_copies(wrapper: str, *pools: torch.Tensor) -> list[Any]:
    """Buffers of the size of a whole pool, and clones or copies, in a generated module.

    Args:
        wrapper: source of the module.
        pools: data tensors; give them sizes that no other tensor has.
    """
    sizes = {pool.numel() for pool in pools}
    whole = [size for size in buffers(wrapper) if size in sizes]
    code = re.sub(r"^\s*#.*$", "", wrapper, flags=re.MULTILINE)
    return [*whole, *re.findall(r"aten\.(?:clone|copy_)\b|\.clone\(|\.copy_\(", code)]


class _StopCompilation(BaseException):
    """Leaves the compiler once the code is captured; not an Exception, so nothing swallows it."""


class _Generated(_StopCompilation):
    """Carries the source of a generated module out of Inductor."""

    def __init__(self, wrapper: str) -> None:
        super().__init__()
        self.wrapper = wrapper


def _device_properties(capability: int) -> SimpleNamespace:
    """An H200's properties under another compute capability."""
    return SimpleNamespace(
        type="cuda",
        index=0,
        name="NVIDIA H200",
        gcnArchName="",
        cc=capability,
        major=capability // 10,
        minor=capability % 10,
        multi_processor_count=132,
        regs_per_multiprocessor=65536,
        regs_per_block=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=WARP_SIZE,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448,
        shared_memory_per_multiprocessor=233472,
        total_memory=140 << 30,
        L2_cache_size=50 << 20,
        uuid="",
    )


class _Driver:
    """As much of a Triton driver as code generation asks for."""

    def __init__(self, capability: int) -> None:
        properties = _device_properties(capability)
        self.capability = capability
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {
                "max_shared_mem": properties.shared_memory_per_block_optin,
                "multiprocessor_count": properties.multi_processor_count,
                "max_num_regs": properties.regs_per_multiprocessor,
                "warpSize": WARP_SIZE,
            }
        )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, WARP_SIZE)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_current_device(self) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cuda


@contextlib.contextmanager
def _cuda_stand_in(capability: int) -> Iterator[None]:
    """Make Inductor believe in one CUDA device of this capability."""

    def properties(device: Any = None) -> SimpleNamespace:
        return _device_properties(capability)

    def nothing(*_: Any, **__: Any) -> None:
        return None

    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (CudaInterface, "get_device_properties", staticmethod(properties)),
            (CudaInterface.Worker, "get_device_properties", staticmethod(properties)),
            (CudaInterface, "is_available", staticmethod(lambda: True)),
            (CudaInterface, "get_compute_capability", staticmethod(lambda d=None: capability)),
            (CudaInterface, "current_device", staticmethod(lambda: 0)),
            (CudaInterface, "synchronize", staticmethod(nothing)),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        for target, replacement in (
            ("torch.cuda.get_device_properties", properties),
            ("torch.cuda.get_device_capability", lambda d=None: divmod(capability, 10)),
            ("torch.cuda.current_device", lambda: 0),
            ("torch.cuda.device_count", lambda: 1),
            ("torch.cuda.get_rng_state", lambda *_: torch.empty(0, dtype=torch.uint8)),
            ("torch.cuda.set_rng_state", nothing),
            # These trace example patterns on a real device.
            ("torch._inductor.fx_passes.misc_patterns._misc_patterns_init", nothing),
            ("torch._inductor.fx_passes.pad_mm._pad_mm_init", nothing),
            ("torch._inductor.fx_passes.fuse_attention._sfdp_init", nothing),
            ("torch._inductor.compile_fx._check_triton_bf16_support", nothing),
        ):
            stack.enter_context(mock.patch(target, replacement))
        # Not set_active and reset_active: the latter looks for a real driver.
        stack.enter_context(
            mock.patch.object(triton.runtime.driver, "_active", _Driver(capability))
        )
        for cache_clear in (
            triton_probe.has_triton.cache_clear,
            DeviceProperties.create.cache_clear,
        ):
            cache_clear()
            stack.callback(cache_clear)
        yield


def _move_to_cuda(module: torch.fx.GraphModule, example_inputs: list[Any]) -> list[Any]:
    """Turn every fake CPU tensor of a graph behind AOTAutograd into a fake CUDA tensor."""
    device = torch.device("cuda", 0)
    mode = detect_fake_mode(example_inputs)
    assert mode is not None, "AOTAutograd traces with fake tensors"
    converted: dict[int, tuple[Any, FakeTensor]] = {}

    def convert(value: Any) -> Any:
        if not isinstance(value, FakeTensor):
            return value
        if id(value) not in converted:
            converted[id(value)] = (value, _fake_cuda_like(value, mode, device))
        return converted[id(value)][1]

    inputs = [convert(value) for value in example_inputs]
    for node in module.graph.nodes:
        if node.kwargs.get("device") is not None:
            node.kwargs = {**node.kwargs, "device": device}

    class Repropagate(torch.fx.Interpreter):
        """Runs the graph on the new inputs, so that views alias the right storages."""

        def run_node(self, node: torch.fx.Node) -> Any:
            result = super().run_node(node)
            node.meta["val"] = result
            node.meta.pop("tensor_meta", None)
            if "eager_input_vals" in node.meta:
                node.meta["eager_input_vals"] = tree_map(convert, node.meta["eager_input_vals"])
            return result

    with mode:
        Repropagate(module).run(*inputs)
    module.recompile()
    return inputs


def _fake_cuda_like(value: FakeTensor, mode: FakeTensorMode, device: torch.device) -> FakeTensor:
    with unset_fake_temporarily(), in_kernel_invocation_manager(mode):
        meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return FakeTensor(mode, meta, device)
