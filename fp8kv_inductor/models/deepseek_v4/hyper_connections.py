"""Hyper-connections: the residual state is C parallel streams `[T, C, dim]`.

Manifold-constrained form (https://arxiv.org/abs/2512.24880): the matrix that mixes the streams is
made doubly stochastic by Sinkhorn's alternating normalisation. Everything is fp32 inside.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8kv_inductor import ops
from fp8kv_inductor.model_config import ModelConfig


def stream_mixes(x: Tensor, fn: Tensor, eps: float) -> Tensor:
    """Projections of a token's streams, normalised as one row.

    Args:
        x: `[T, C, dim]`.
        fn: `[M, C * dim]` fp32.
        eps: of the normalisation.

    Returns:
        `[T, M]` fp32.
    """
    flat = x.flatten(1).to(torch.float32)
    return F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)


def weighted_sum(x: Tensor, pre: Tensor) -> Tensor:
    """Collapse streams `[T, C, dim]` by weights `[T, C]` to `[T, dim]` in the dtype of ``x``."""
    return (pre.unsqueeze(-1) * x.to(torch.float32)).sum(1).to(x.dtype)


def enter(
    x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, model: ModelConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Collapse the streams into a sublayer's input and compute how its output goes back.

    Args:
        x: `[T, C, dim]`.
        fn: `[(2 + C) * C, C * dim]` fp32.
        scale: `[3]` fp32, of the pre, post and comb parts.
        base: `[(2 + C) * C]` fp32.
        model: eps and iterations.

    Returns:
        sublayer input `[T, dim]`, post weights `[T, C]` and comb matrices `[T, C, C]`, fp32.
    """
    streams = model.hc_mult
    sizes = [streams, streams, streams * streams]
    pre, post, comb = (
        part * part_scale + part_base
        for part, part_scale, part_base in zip(
            stream_mixes(x, fn, model.norm_eps).split(sizes, -1),
            scale.unbind(),
            base.split(sizes),
            strict=True,
        )
    )
    matrix = ops.sinkhorn(
        comb.unflatten(-1, (streams, streams)), model.hc_sinkhorn_iters, model.hc_eps
    )
    return weighted_sum(x, pre.sigmoid() + model.hc_eps), 2 * post.sigmoid(), matrix


def leave(out: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Streams after a sublayer: ``x'[q] = post[q] * out + sum_p comb[p, q] * x[p]``.

    Args:
        out: `[T, dim]` output of the sublayer.
        x: `[T, C, dim]` streams before it.
        post: `[T, C]` fp32.
        comb: `[T, C, C]` fp32, the first stream axis is summed.
    """
    mixed = (comb.unsqueeze(-1) * x.to(torch.float32).unsqueeze(2)).sum(1)
    return (post.unsqueeze(-1) * out.to(torch.float32).unsqueeze(1) + mixed).to(x.dtype)


def head(x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, model: ModelConfig) -> Tensor:
    """Collapse the streams `[T, C, dim]` before the final norm; ``fn`` is `[C, C * dim]` fp32."""
    pre = (stream_mixes(x, fn, model.norm_eps) * scale + base).sigmoid() + model.hc_eps
    return weighted_sum(x, pre)
