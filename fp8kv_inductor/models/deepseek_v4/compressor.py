"""Compressor: every ``ratio`` tokens become one row by a softmax over tokens, channel by channel.

A token's state row is `[kv | score]`, fp32. With overlap (ratio 4) both parts are two rows wide: a
group pools the first halves of the previous group and the second halves of its own tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fp8kv_inductor import ops
from fp8kv_inductor.model_config import ModelConfig
from fp8kv_inductor.models.deepseek_v4.layers import Linear, RMSNorm
from fp8kv_inductor.models.deepseek_v4.step import RatioStep
from fp8kv_inductor.pools import Pool


class Compressor(nn.Module):
    """Compressed rows of ``width`` features, of the attention or of the indexer."""

    def __init__(
        self, model: ModelConfig, ratio: int, width: int, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.ratio = ratio
        self.width = width
        self.halves = 1 + model.overlap(ratio)
        wide = self.halves * width
        self.ape = nn.Parameter(
            torch.empty(ratio, wide, dtype=torch.float32, device=device), requires_grad=False
        )
        # wkv above wgate: one product gives the state row.
        self.wkv_gate = Linear(model.dim, 2 * wide, torch.float32, device)
        self.norm = RMSNorm(width, model.norm_eps, device)

    def states(self, x: Tensor, positions: Tensor) -> Tensor:
        """State rows `[T, 2 * halves * width]` fp32 of tokens ``x`` `[T, dim]`."""
        kv_score = self.wkv_gate(x).unflatten(-1, (2, -1))
        ape = self.ape[positions % self.ratio].unsqueeze(1)
        # The position counts in the score alone; a select keeps this pointwise, a cat would not.
        is_score = torch.arange(2, device=x.device).unsqueeze(1) == 1
        return (kv_score + torch.where(is_score, ape, 0.0)).flatten(1)

    def forward(self, states: Tensor, step: RatioStep, pool: Pool, dtype: torch.dtype) -> Tensor:
        """Pool each closing group, from this step's states and those of earlier steps.

        The rows must be stored before ``states`` are: the ring slots that those take may still be
        read here.

        Args:
            states: `[T, 2 * halves * width]` of this step, not yet stored.
            step: where the groups' tokens lie.
            pool: state rows of earlier steps.
            dtype: of the result.

        Returns:
            `[G, width]` normalised and rotated; zeros for groups that do not close.
        """
        groups = step.groups
        ring = groups.tokens.shape[1]
        half = torch.arange(ring, device=states.device) // self.ratio

        def pooled(rows: Tensor, index: Tensor) -> Tensor:
            return rows.unflatten(-1, (2, self.halves, self.width))[index, :, half]

        gathered = torch.where(
            groups.in_step[..., None, None],
            pooled(states, groups.tokens),
            pooled(pool.data, groups.states),
        )
        exists = groups.exists.unsqueeze(-1)
        kv, score = gathered.unbind(2)
        # Not -inf: a group without any token would become NaN.
        score = score.masked_fill(~exists, torch.finfo(score.dtype).min)
        row = (score.softmax(1) * kv.masked_fill(~exists, 0.0)).sum(1)
        return ops.rope(self.norm(row).to(dtype), *step.group_rope)
