"""Indexer: scores all compressed rows of a request with a small fp4 key each and picks the best."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fp8kv_inductor import numerics, ops
from fp8kv_inductor.model_config import ModelConfig
from fp8kv_inductor.models.deepseek_v4.compressor import Compressor
from fp8kv_inductor.models.deepseek_v4.layers import Linear
from fp8kv_inductor.models.deepseek_v4.rotary import Rope
from fp8kv_inductor.models.deepseek_v4.step import RatioStep
from fp8kv_inductor.pools import LayerPools

E2M1_MAX = 6.0
E2M1_BLOCK = 32
E2M1_AMAX_MIN = E2M1_MAX * 2.0**-126
"""Smallest block maximum of the fp4 round trip, from the model's reference."""


def hadamard(n: int) -> Tensor:
    """Sylvester's matrix `[n, n]` of +-1; ``n`` is a power of two."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < n:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def fp4_quant(x: Tensor) -> Tensor:
    """fp4 (e2m1) round trip of `[..., D]` in blocks of 32 with power-of-two scales.

    Per block: scale = 2^ceil(log2(max(amax, 6 * 2^-126) / 6)); values 0, .5, 1, 1.5, 2, 3, 4, 6;
    ties go to the even code.
    """
    blocks = x.to(torch.float32).unflatten(-1, (-1, E2M1_BLOCK))
    amax = numerics.finite_amax(blocks).clamp_min(E2M1_AMAX_MIN)
    exponent = numerics.ceil_log2_ratio(amax, E2M1_MAX)
    scaled = (blocks * numerics.exp2_int(-exponent)).clamp(-E2M1_MAX, E2M1_MAX)
    magnitude = scaled.abs()
    # Neighbouring values are half, one and two apart below 2, below 4 and above. torch.round takes
    # ties to the even multiple, which is the even code.
    spacing = torch.where(magnitude < 2.0, 0.5, torch.where(magnitude < 4.0, 1.0, 2.0))
    rounded = (scaled / spacing).round() * spacing
    return (rounded * numerics.exp2_int(exponent)).flatten(-2).to(x.dtype)


class Indexer(nn.Module):
    """Picks the compressed rows that each query reads."""

    hadamard: Tensor

    def __init__(
        self,
        model: ModelConfig,
        ratio: int,
        dtype: torch.dtype,
        rounding: bool,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.n_heads = model.index_n_heads
        self.head_dim = model.index_head_dim
        self.topk = model.index_topk
        self.rounding = rounding
        self.weight_scale = (model.index_head_dim * model.index_n_heads) ** -0.5
        self.wq_b = Linear(model.q_lora_rank, self.n_heads * self.head_dim, dtype, device)
        self.weights_proj = Linear(model.dim, self.n_heads, dtype, device)
        self.compressor = Compressor(model, ratio, self.head_dim, device)
        self.register_buffer("hadamard", hadamard(self.head_dim).to(device), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        """Normalised Hadamard transform of `[..., DI]`, then the fp4 round trip."""
        if not self.rounding:
            return x
        rotated = (x.to(torch.float32) @ self.hadamard) * self.head_dim**-0.5
        return fp4_quant(rotated.to(x.dtype))

    def forward(
        self,
        x: Tensor,
        q_latent: Tensor,
        positions: Tensor,
        request: Tensor,
        rope: Rope,
        step: RatioStep,
        pools: LayerPools,
    ) -> Tensor:
        """Store the keys of closing groups, then pick rows for every token.

        Args:
            x: `[T, dim]` input of the layer.
            q_latent: `[T, q_lora_rank]`, shared with the attention's queries.
            positions: `[T]`.
            request: `[T]` row of the page tables.
            rope: angles of the tokens.
            step: groups, counts and page rows.
            pools: idx and idx_state are used.

        Returns:
            `[T, min(topk, P * rows_per_page)]` rows of the cmp pool, -1 for none; live picks are a
            prefix of ``min(counts, topk)`` columns.
        """
        assert pools.idx is not None and pools.idx_state is not None
        states = self.compressor.states(x, positions)
        keys = self.rotate(self.compressor(states, step, pools.idx_state, x.dtype))
        ops.store(keys, step.groups.slots, pools.idx)
        ops.store(states, step.state_slots, pools.idx_state)

        q = ops.rope(self.wq_b(q_latent).unflatten(-1, (self.n_heads, self.head_dim)), *rope)
        weights = self.weights_proj(x).to(torch.float32) * self.weight_scale
        scores = ops.indexer_scores(
            self.rotate(q),
            weights,
            pools.idx,
            step.page_rows,
            request,
            step.counts,
            step.rows_per_page,
        )
        width = min(self.topk, step.page_rows.shape[1] * step.rows_per_page)
        picks = scores.topk(width, -1).indices
        page, row = picks // step.rows_per_page, picks % step.rows_per_page
        rows = step.page_rows[request.unsqueeze(1), page] + row
        # Scores beyond the count are -inf and sort last.
        live = torch.arange(width, device=x.device) < step.counts.unsqueeze(1)
        return torch.where(live, rows, -1)
