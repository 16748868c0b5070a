"""Everything that layers share within a step, computed once: slots, columns, counts, angles."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fp8kv_inductor import slots
from fp8kv_inductor.config import PAGE_SIZE
from fp8kv_inductor.model_config import ModelConfig
from fp8kv_inductor.models.deepseek_v4.rotary import Rope, Rotary
from fp8kv_inductor.slots import Groups, StepBatch


class RatioStep(NamedTuple):
    """What the layers of one compress ratio share.

    Attributes:
        groups: the groups that may close.
        group_rope: angles of the groups' first tokens, `[G, R / 2]`.
        state_slots: `[T]` state row of each token.
        counts: `[T]` compressed rows that a token sees.
        page_rows: `[R, P]` first compressed row of each page.
        rows_per_page: compressed rows per page.
        indices: `[T, K]` columns of a read of all rows, window columns first; None for layers
            whose indexer selects rows.
    """

    groups: Groups
    group_rope: Rope
    state_slots: Tensor
    counts: Tensor
    page_rows: Tensor
    rows_per_page: int
    indices: Tensor | None


class Step(NamedTuple):
    """What all layers share.

    Attributes:
        tokens: `[T]` token ids.
        positions: `[T]`, -1 for padding.
        request: `[T]` row of the page tables.
        window_slots: `[T]` window slot of each token.
        window_indices: `[T, W]` window columns of each token.
        window_rope, compressed_rope: `[T, R / 2]` angles for layers without and with a compressor.
        ratios: compress ratio -> what its layers share.
    """

    tokens: Tensor
    positions: Tensor
    request: Tensor
    window_slots: Tensor
    window_indices: Tensor
    window_rope: Rope
    compressed_rope: Rope
    ratios: dict[int, RatioStep]

    def rope(self, ratio: int) -> Rope:
        """Angles of the tokens in layers of ``ratio``."""
        return self.compressed_rope if ratio else self.window_rope


def prepare(batch: StepBatch, model: ModelConfig, rotary: Rotary) -> Step:
    """Derive everything from the page tables of ``batch``, on the device."""
    window_indices = slots.window_indices(batch, model.window_size)
    ratios: dict[int, RatioStep] = {}
    for ratio in model.ratios:
        ring = model.state_ring(ratio)
        groups = slots.groups(batch, ratio, ring)
        ratios[ratio] = RatioStep(
            groups=groups,
            group_rope=rotary(groups.positions, compressed=True),
            state_slots=slots.state_slots(batch, ring),
            counts=slots.cmp_counts(batch, ratio),
            page_rows=slots.cmp_page_rows(batch, ratio),
            rows_per_page=PAGE_SIZE // ratio,
            indices=(
                None
                if model.has_indexer(ratio)
                else torch.cat([window_indices, slots.cmp_indices(batch, ratio)], 1)
            ),
        )
    return Step(
        tokens=batch.tokens,
        positions=batch.positions,
        request=batch.request,
        window_slots=slots.window_slots(batch),
        window_indices=window_indices,
        window_rope=rotary(batch.positions, compressed=False),
        compressed_rope=rotary(batch.positions, compressed=True),
        ratios=ratios,
    )
