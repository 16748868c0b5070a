"""Slot maps: from positions and page tables to pool rows, computed on the device.

A request has one row in each table. ``page_table`` maps page ``position // 128`` to a full-history
page, ``window_table`` maps it to a window page, or -1 once the page slid out of the window.
Compressed and index-key rows of a full-history page follow from it by arithmetic; so do state rows
of a window page.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fp8kv_inductor.config import PAGE_SIZE


class StepBatch(NamedTuple):
    """One model step over T tokens of R requests: a ragged prefill chunk, or one token each.

    Tokens of a request are neighbours, in order of position. Padding tokens have position -1, any
    valid token id and request: they are not stored and see no column.

    Attributes:
        tokens: `[T]` int64 token ids.
        positions: `[T]` int64, -1 for padding.
        request: `[T]` int64, row of the tables.
        offset: `[T]` int64, tokens of the same request before this one in this step.
        remaining: `[T]` int64, tokens of the same request after this one in this step.
        page_table: `[R, P]` int64 full-history pages, -1 where there is none.
        window_table: `[R, P]` int64 window pages, -1 where there is none.
        closing: ratio -> `[G]` int64 flat indices of tokens that may close a group, -1 for none.
            Every closing token of the step must be listed; others may be.
        last: `[S]` int64 flat indices of tokens whose logits are wanted.
    """

    tokens: Tensor
    positions: Tensor
    request: Tensor
    offset: Tensor
    remaining: Tensor
    page_table: Tensor
    window_table: Tensor
    closing: dict[int, Tensor]
    last: Tensor


def table_rows(table: Tensor, request: Tensor, positions: Tensor, rows: int, ratio: int) -> Tensor:
    """Pool row of each position, or -1: ``rows`` rows per page, one per ``ratio`` tokens.

    Args:
        table: `[R, P]` pages, -1 for none.
        request: `[...]` rows of ``table``.
        positions: `[...]`, negative for none.
        rows: pool rows per page.
        ratio: tokens per pool row; rows repeat as a ring if the page has fewer.
    """
    position = positions.clamp_min(0)
    page = table[request, position // PAGE_SIZE]
    row = page * rows + position // ratio % rows
    return torch.where((positions >= 0) & (page >= 0), row, -1)


def window_slots(batch: StepBatch) -> Tensor:
    """Window slot `[T]` of each token, -1 for padding."""
    return table_rows(batch.window_table, batch.request, batch.positions, PAGE_SIZE, 1)


def window_indices(batch: StepBatch, window_size: int) -> Tensor:
    """Window columns `[T, W]` of each token as a ring.

    Column j holds the latest position p <= position with p % W == j, -1 if there is none.
    """
    column = torch.arange(window_size, device=batch.positions.device)
    position = batch.positions.unsqueeze(1)
    latest = position - (position - column) % window_size
    latest = torch.where(position >= 0, latest, -1)
    return table_rows(batch.window_table, batch.request.unsqueeze(1), latest, PAGE_SIZE, 1)


def cmp_counts(batch: StepBatch, ratio: int) -> Tensor:
    """Compressed rows `[T]` that a token sees: ``(position + 1) // ratio``."""
    return (batch.positions + 1) // ratio


def cmp_page_rows(batch: StepBatch, ratio: int) -> Tensor:
    """First compressed row `[R, P]` of each page of a request; unused pages point at row 0."""
    return batch.page_table.clamp_min(0) * (PAGE_SIZE // ratio)


def cmp_indices(batch: StepBatch, ratio: int) -> Tensor:
    """All compressed rows `[T, P * 128 / ratio]` of a token's request, in order of position."""
    rows = PAGE_SIZE // ratio
    first = cmp_page_rows(batch, ratio)[batch.request]
    return (first.unsqueeze(-1) + torch.arange(rows, device=first.device)).flatten(1)


class Groups(NamedTuple):
    """The groups that may close in a step, one per entry of ``StepBatch.closing``.

    Attributes:
        slots: `[G]` compressed row that the group becomes, -1 if it does not close.
        positions: `[G]` position of the group's first token, for its rope; 0 if it does not close.
        tokens: `[G, L]` flat index of each pooled token in this step, clamped.
        in_step: `[G, L]` whether the pooled token is part of this step.
        states: `[G, L]` state row of a pooled token of an earlier step; 0, so that few rows are
            read, where there is none to pool.
        exists: `[G, L]` whether the group closes and the pooled position is >= 0.
    """

    slots: Tensor
    positions: Tensor
    tokens: Tensor
    in_step: Tensor
    states: Tensor
    exists: Tensor


def groups(batch: StepBatch, ratio: int, ring: int) -> Groups:
    """Where each closing group's ``ring`` pooled tokens lie, oldest first.

    Args:
        batch: the step.
        ratio: tokens per group.
        ring: pooled tokens per group, and state rows per window page.
    """
    closing = batch.closing[ratio]
    token = closing.clamp_min(0)
    position = torch.where(closing >= 0, batch.positions[token], -1)
    request = batch.request[token]
    closes = (position >= 0) & ((position + 1) % ratio == 0)
    slots = table_rows(batch.page_table, request, position, PAGE_SIZE // ratio, ratio)
    lag = torch.arange(ring - 1, -1, -1, device=closing.device)
    in_step = lag <= batch.offset[token].unsqueeze(1)
    pooled = torch.where(closes, position, -1).unsqueeze(1) - lag
    carried = torch.where(in_step, -1, pooled)
    states = table_rows(batch.window_table, request.unsqueeze(1), carried, ring, 1)
    return Groups(
        slots=torch.where(closes, slots, -1),
        positions=torch.where(closes, position + 1 - ratio, 0),
        tokens=(token.unsqueeze(1) - lag).clamp_min(0),
        in_step=in_step,
        states=states.clamp_min(0),
        exists=pooled >= 0,
    )


def state_slots(batch: StepBatch, ring: int) -> Tensor:
    """State row `[T]` that each token writes; -1 for tokens that no later group can pool."""
    slots = table_rows(batch.window_table, batch.request, batch.positions, ring, 1)
    return torch.where(batch.remaining < ring, slots, -1)
