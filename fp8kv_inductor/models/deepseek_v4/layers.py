"""The plain building blocks of the graph: linear layers and RMS normalisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8kv_inductor.parallel import Parallel


class Linear(nn.Module):
    """``x @ weight.T`` in the dtype of the weight, which is allocated, not initialised."""

    def __init__(
        self, n_in: int, n_out: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(n_out, n_in, dtype=dtype, device=device), requires_grad=False
        )

    def forward(self, x: Tensor) -> Tensor:
        """`[..., n_in]` to `[..., n_out]`."""
        return F.linear(x.to(self.weight.dtype), self.weight)


def partial_product(x: Tensor, weight: Tensor, parallel: Parallel) -> Tensor:
    """This rank's part of ``x @ weight.T``, the part of its own input features.

    Args:
        x: `[T, n_in / world_size]`, any dtype.
        weight: `[n_out, n_in / world_size]`.
        parallel: the ranks whose parts will be summed.

    Returns:
        `[T, n_out]` in ``parallel.sum_dtype``, or in the dtype of ``weight`` if that is None.
    """
    x, dtype = x.to(weight.dtype), parallel.sum_dtype
    if dtype is None or dtype == weight.dtype:
        return F.linear(x, weight)
    if x.is_cuda:
        return torch.mm(x, weight.T, out_dtype=dtype)
    return F.linear(x.to(dtype), weight.to(dtype))


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Divide each row by its root mean square, computed in fp32 and rounded once.

    Args:
        x: `[..., D]`.
        weight: `[D]` fp32 factors, or None for none.
        eps: added to the mean square.

    Returns:
        `[..., D]` in the dtype of ``x``.
    """
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide if weight is None else wide * weight).to(x.dtype)


class RMSNorm(nn.Module):
    """:func:`rms_norm` with an fp32 weight."""

    def __init__(self, dim: int, eps: float, device: torch.device | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(
            torch.empty(dim, dtype=torch.float32, device=device), requires_grad=False
        )

    def forward(self, x: Tensor) -> Tensor:
        """`[..., dim]`, any dtype."""
        return rms_norm(x, self.weight, self.eps)
