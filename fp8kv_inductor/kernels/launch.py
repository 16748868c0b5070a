"""What every launcher needs to know: the limits of a device and the strides of a batch of rows."""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8kv_inductor.formats import RowFormat


class DeviceLimits(NamedTuple):
    """The properties of a GPU that decide how a kernel is launched on it.

    Attributes:
        sm_count: streaming multiprocessors.
        shared_bytes: shared memory that one program may use.
        e4m3_rounds_twice: Triton converts fp32 to e4m3 through fp16, so values have to be brought
            onto the e4m3 grid first.
    """

    sm_count: int
    shared_bytes: int
    e4m3_rounds_twice: bool


INTERPRETER_LIMITS = DeviceLimits(sm_count=1, shared_bytes=1 << 20, e4m3_rounds_twice=False)
"""CPU tensors reach a kernel only through Triton's interpreter, which has no such limits."""


@cache
def _cuda_limits(index: int) -> DeviceLimits:
    properties: Any = torch.cuda.get_device_properties(index)
    return DeviceLimits(
        sm_count=properties.multi_processor_count,
        shared_bytes=properties.shared_memory_per_block_optin,
        # cvt.e4m3x2.f32 is an instruction of sm_90; before that there is only cvt.e4m3x2.f16x2.
        e4m3_rounds_twice=(properties.major, properties.minor) < (9, 0),
    )


def device_limits(device: torch.device) -> DeviceLimits:
    """The limits of ``device``."""
    if device.type != "cuda":
        return INTERPRETER_LIMITS
    return _cuda_limits(torch.cuda.current_device() if device.index is None else device.index)


class ReadArguments(NamedTuple):
    """What a read is asked for, as ``kernels.attention.sparse_attention`` takes it."""

    q: Tensor
    window: tuple[Tensor, Tensor]
    cmp: tuple[Tensor, Tensor]
    indices: Tensor
    cmp_counts: Tensor | None
    sink: Tensor
    angles: tuple[Tensor, Tensor] | None
    n_window: int
    softmax_scale: float
    row_format: RowFormat


class RowLayout(NamedTuple):
    """`[T, D]` or `[T, H, D]` seen as ``tokens * heads`` rows of neighbouring elements."""

    x: Tensor
    heads: int
    stride_token: int
    stride_head: int

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return self.x.shape[0] * self.heads


def row_layout(x: Tensor) -> RowLayout:
    """Strides of the rows of ``x``; rows whose elements are not neighbours are copied first."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    if x.dim() == 2:
        return RowLayout(x, 1, x.stride(0), 0)
    return RowLayout(x, x.shape[1], x.stride(0), x.stride(1))


ROW_TILE_ELEMENTS = 2048
"""Elements of the tile of a row kernel: 16 per thread of four warps, two 16-byte loads of bf16."""


def rows_per_program(block_d: int) -> int:
    """Rows of ``block_d`` elements that one program of a row kernel handles."""
    return max(1, ROW_TILE_ELEMENTS // block_d)
