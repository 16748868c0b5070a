"""The one description of a pool row: every size in bytes and every scale rule comes from here.

Pools allocate with it, the planner counts with it, kernels and lowerings take their constants from
it. Nothing here touches tensor data; the arithmetic that a format names lives in ``numerics``.
Weights have formats, too, which the planner counts with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

E4M3_MAX = 448.0
"""Largest finite float8_e4m3fn value."""

SCALE_EXPONENT_MIN = -24
"""Pool scales are at least 2^-24, the smallest positive fp16 value."""

SCALE_EXPONENT_MAX = 15
"""Pool scales are at most 2^15, the largest power of two in fp16."""

ScaleRule = Literal["none", "pow2", "amax"]


@dataclass(frozen=True)
class RowFormat:
    """How one row of `[head_dim]` values lies in a pool.

    Attributes:
        name: the ``fmt`` string of the operators.
        code_dtype: dtype of ``data`` `[N, D]`: the values themselves, or e4m3 codes as uint8.
        block: number of neighbouring elements that share a scale; 0 without scales.
        scale_dtype: dtype of ``scale`` `[N, D / block]`.
        rule: ``"none"`` stores values; ``"pow2"`` takes the smallest power of two that is not
            below amax / 448; ``"amax"`` takes amax / 448 rounded to ``scale_dtype``.
    """

    name: str
    code_dtype: torch.dtype
    block: int
    scale_dtype: torch.dtype
    rule: ScaleRule

    @property
    def quantized(self) -> bool:
        """True if rows are e4m3 codes with block scales."""
        return self.rule != "none"

    def scales_per_row(self, head_dim: int) -> int:
        """Number of scales next to a row of ``head_dim`` elements.

        Raises:
            ValueError: ``head_dim`` is not a multiple of the block.
        """
        if not self.quantized:
            return 0
        if head_dim % self.block:
            raise ValueError(
                f"format {self.name!r} scales blocks of {self.block} elements, but a row has "
                f"{head_dim}; head_dim must be a multiple of {self.block}"
            )
        return head_dim // self.block

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of one row, codes and scales together."""
        scales = self.scales_per_row(head_dim) * self.scale_dtype.itemsize
        return head_dim * self.code_dtype.itemsize + scales

    def bytes_per_element(self, head_dim: int) -> float:
        """Bytes per KV element, scales included (1.0625 for fp8_e4m3)."""
        return self.row_bytes(head_dim) / head_dim


FORMATS: dict[str, RowFormat] = {
    row_format.name: row_format
    for row_format in (
        RowFormat("bf16", torch.bfloat16, 0, torch.float16, "none"),
        RowFormat("fp32", torch.float32, 0, torch.float16, "none"),
        RowFormat("fp8_e4m3", torch.uint8, 32, torch.float16, "pow2"),
        RowFormat("fp8_e4m3_amax", torch.uint8, 32, torch.float16, "amax"),
        RowFormat("fp8_e4m3_ue8m0", torch.uint8, 32, torch.uint8, "pow2"),
    )
}
"""All row formats by name. "fp32" holds the accumulators of the state tier."""


def get_format(name: str) -> RowFormat:
    """The format called ``name``.

    Raises:
        ValueError: no such format.
    """
    try:
        return FORMATS[name]
    except KeyError:
        raise ValueError(f"unknown row format {name!r}; known: {', '.join(FORMATS)}") from None


@dataclass(frozen=True)
class WeightFormat:
    """How a weight matrix `[n_out, n_in]` lies in memory.

    Attributes:
        name: for people and command lines.
        code_dtype: dtype of the values, or of the codes that stand for them.
        values_per_code: neighbouring values of a row that share one code.
        scale_block: `(n_out, n_in)` values that share a scale of one byte, a power of two;
            None without scales.
    """

    name: str
    code_dtype: torch.dtype
    values_per_code: int = 1
    scale_block: tuple[int, int] | None = None

    def tensors(self, n_out: int, n_in: int) -> list[tuple[tuple[int, int], torch.dtype]]:
        """Shape and dtype of each tensor that holds such a matrix: codes, then scales."""
        tensors = [((n_out, -(-n_in // self.values_per_code)), self.code_dtype)]
        if self.scale_block is not None:
            rows, columns = self.scale_block
            tensors.append(((-(-n_out // rows), -(-n_in // columns)), torch.uint8))
        return tensors

    def nbytes(self, n_out: int, n_in: int) -> int:
        """Bytes of such a matrix, scales included."""
        return sum(
            rows * columns * dtype.itemsize for (rows, columns), dtype in self.tensors(n_out, n_in)
        )


WEIGHT_FORMATS: dict[str, WeightFormat] = {
    weight_format.name: weight_format
    for weight_format in (
        WeightFormat("bf16", torch.bfloat16),
        WeightFormat("fp8", torch.float8_e4m3fn, scale_block=(128, 128)),
        WeightFormat("fp4", torch.uint8, values_per_code=2, scale_block=(1, 32)),
    )
}
"""Formats of linear layers by name. The public checkpoints hold routed experts as fp4 (e2m1) and
the other linear layers as fp8 (e4m3)."""
