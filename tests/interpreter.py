"""Run Triton kernels on CPU tensors, in Triton's interpreter, inside an ordinary test process.

``TRITON_INTERPRET=1`` decides at import time for a whole process. Here, inside
:func:`interpreted`, launches and device functions of ordinary ``@triton.jit`` functions are handed
to the interpreter, and everything is put back afterwards.

Faults of the interpreter that are repaired on the way: it has no inline assembly and applies the
function of a reduction to one element at a time; it truncates float conversions to bf16 and
fp8 (or carries a rounded mantissa away); it multiplies bf16 matrices as if their bits were
integers; its elementwise maximum keeps NaN; and triton 3.6 cannot use a tensor as a loop bound with
numpy 2.4.
"""

import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter
from triton.runtime.jit import JITFunction

_TORCH_DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}
_BIT_DTYPES = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32)}
_BIT_DTYPES[8] = (torch.int64, np.uint64)

_PATCHED_BY_TRITON = (
    tl,
    tl.core,
    tl.math,
    tl.core.tensor,
    tl.core.dtype,
    tl.core.tensor_descriptor_base,
)


def _to_torch(data: np.ndarray, dtype: tl.dtype) -> torch.Tensor:
    bits = np.ascontiguousarray(data).view(_BIT_DTYPES[data.dtype.itemsize][1])
    signed = bits.view(f"i{data.dtype.itemsize}") if data.dtype.itemsize > 1 else bits
    return torch.from_numpy(signed.copy()).view(_TORCH_DTYPES[dtype.name])


def _convert_float(data, source, target, rounding_mode):
    """PyTorch's casts: nearest even; e4m3 saturates and has one NaN, like the hardware's."""
    values = _to_torch(data, source)
    if target.name == "fp8e4nv":
        limit = torch.finfo(torch.float8_e4m3fn).max
        values = values.float().clamp(-limit, limit)
        values = torch.where(values.isnan(), torch.nan, values)
    bits, numpy_bits = _BIT_DTYPES[target.primitive_bitwidth // 8]
    converted = values.to(_TORCH_DTYPES[target.name]).view(bits).numpy().view(numpy_bits)
    return converted.reshape(data.shape)


def _create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    product = torch.matmul(_to_torch(a.data, a.dtype).float(), _to_torch(b.data, b.dtype).float())
    return triton_interpreter.TensorHandle(product.numpy() + d.data, d.dtype.scalar)


def _create_maxnumf(self, left, right):
    return self.binary_op(left, right, np.fmax)


def _halves(data: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """The pairs of 16-bit floats in 32-bit registers, as fp32."""
    pairs = np.ascontiguousarray(data).view(np.int16)
    return torch.from_numpy(pairs.copy()).view(dtype).float().unflatten(-1, (-1, 2))


def _registers(halves: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    return halves.to(dtype).flatten(-2).view(torch.int16).numpy().view(np.int32)


def _columns(*registers: np.ndarray) -> torch.Tensor:
    """fp32 values of two registers as halves."""
    values = [torch.from_numpy(np.ascontiguousarray(data)) for data in registers]
    return torch.stack([value.view(torch.float32) for value in values], -1)


def _xorsign_max(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left.abs().fmax(right.abs()).copysign(left * right.copysign(torch.ones(())))


def _on_e4m3_grid(values: torch.Tensor) -> torch.Tensor:
    limit = torch.finfo(torch.float8_e4m3fn).max
    return values.clamp(-limit, limit).to(torch.float8_e4m3fn).float()


def _in_halves(dtype: torch.dtype, function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    return lambda *data: _registers(function(*(_halves(each, dtype) for each in data)), dtype)


_BF16, _FP16 = torch.bfloat16, torch.float16
_INSTRUCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "mul.rn.f32": np.multiply,
    "cvt.rn.bf16x2.f32": lambda *columns: _registers(_columns(*columns), _BF16),
    "fma.rn.bf16x2": _in_halves(_BF16, lambda left, right: left * right + left),
    "mul.rn.bf16x2": _in_halves(_BF16, torch.mul),
    "mul.rn.f16x2": _in_halves(_FP16, torch.mul),
    "max.xorsign.abs.bf16x2": _in_halves(_BF16, _xorsign_max),
    "max.xorsign.abs.f16x2": _in_halves(_FP16, _xorsign_max),
    "cvt.rn.satfinite.e4m3x2.f32 cvt.rn.f16x2.e4m3x2": lambda *columns: _registers(
        _on_e4m3_grid(_columns(*columns)), _FP16
    ),
}
"""What the instructions of generated kernels do to arrays of their operands."""


def _create_inline_asm(self, asm, constraints, values, types, is_pure, pack):
    """Instructions on arrays; with two elements a time, each is paired with itself."""
    if asm.startswith("shl.b32"):
        # Both halves of a register of bf16, as fp32.
        wide = _to_torch(values[0].data, values[0].dtype).float().numpy()
        handle = triton_interpreter.TensorHandle(wide, tl.float32)
        return SimpleNamespace(get_result=lambda _: handle)
    names = " ".join(re.findall(r"(?:^|[;{] )((?!\.)[\w.]+) ", asm))
    operands = [value.data for value in values]
    data = _INSTRUCTIONS[names](*np.broadcast_arrays(*(pack * operands)))
    if pack == 2:
        data = data.view(np.uint16)[..., ::2]
    handle = triton_interpreter.TensorHandle(data, types[0].scalar)
    return SimpleNamespace(get_result=lambda _: handle)


def _generic_reduce(self, inputs):
    """The same reduction over whole slices of its one tensor."""
    (tensor,) = inputs
    first, *rest = np.moveaxis(tensor.handle.data, self.axis, 0)
    result = self.to_tensor(first, tensor.dtype)
    for data in rest:
        result = self.combine_fn.fn(result, self.to_tensor(data, tensor.dtype))
    return (result,)


_patch_lang_tensor_by_triton = triton_interpreter._patch_lang_tensor


def _patch_lang_tensor(tensor, scope):
    _patch_lang_tensor_by_triton(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


_interpreted_function = functools.cache(triton_interpreter.InterpretedFunction)
_patched_namespaces: set[int] = set()
"""Ids of the globals whose ``triton.language`` the running kernel has patched already."""


def _run(self, *args, grid, warmup, **kwargs):
    _patched_namespaces.clear()
    return _interpreted_function(self.fn).run(*args, grid=grid, warmup=warmup, **kwargs)


def _call(self, *args, **kwargs):
    """InterpretedFunction.__call__, but patching once per kernel instead of at every call."""
    if id(self.fn.__globals__) not in _patched_namespaces:
        triton_interpreter._patch_lang(self.fn)
        _patched_namespaces.add(id(self.fn.__globals__))
    return _interpreted_function(self.fn).rewrite()(*args, **kwargs)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """While open, ``kernel[grid](...)`` interprets kernels over CPU tensors."""
    patches = {
        JITFunction: {"run": _run, "__call__": _call},
        triton_interpreter: {
            "_convert_float": _convert_float,
            "_patch_lang_tensor": _patch_lang_tensor,
        },
        triton_interpreter.ReduceOps: {"generic_reduce": _generic_reduce},
        triton_interpreter.InterpreterBuilder: {
            "create_dot": _create_dot,
            "create_inline_asm": _create_inline_asm,
            "create_maxnumf": _create_maxnumf,
        },
    }
    # What a device function's call patches in triton.language, Triton does not restore.
    saved = [(owner, dict(vars(owner))) for owner in (*patches, *_PATCHED_BY_TRITON)]
    try:
        for owner, attributes in patches.items():
            for name, value in attributes.items():
                setattr(owner, name, value)
        # Infinities and NaN are inputs of these tests, not accidents.
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "All-NaN slice", RuntimeWarning)
            yield
    finally:
        for owner, attributes in saved:
            for name in set(vars(owner)) - set(attributes):
                delattr(owner, name)
            for name, value in attributes.items():
                if vars(owner)[name] is not value:
                    setattr(owner, name, value)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
"""Where kernel tests run: in the interpreter, and on a GPU if there is one."""


def whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Everything that lies in the memory behind a view, as bytes."""
    return torch.tensor([], dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def relocated(argument: Any, device: str) -> Any:
    """A copy of a tensor, or of the tensors of a tuple, on a device, with strides and offset."""
    if isinstance(argument, tuple):
        return tuple(relocated(part, device) for part in argument)
    if not isinstance(argument, torch.Tensor):
        return argument
    storage = whole_storage(argument).to(device, copy=True).untyped_storage()
    empty = torch.tensor([], dtype=argument.dtype, device=device)
    return empty.set_(storage, argument.storage_offset(), argument.shape, argument.stride())


def launch(device: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function`` over copies of its tensors on ``device``; results come back to the CPU."""
    moved = [relocated(argument, device) for argument in args]
    named = {name: relocated(argument, device) for name, argument in kwargs.items()}
    with interpreted() if device == "cpu" else contextlib.nullcontext():
        return relocated(function(*moved, **named), "cpu")
