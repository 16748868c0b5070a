"""The two plain building blocks of the graph: a linear layer and RMS normalisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
