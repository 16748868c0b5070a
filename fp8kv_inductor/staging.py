"""Step inputs at fixed device addresses, filled from the host by one copy per step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fp8kv_inductor.slots import StepBatch

ALIGNMENT = 16
"""Elements (128 bytes) that each field starts at a multiple of, as GPU kernels expect of inputs."""

MIN_SIZE = 2
"""Least entries of a field in a prefill step: torch.compile takes sizes 0 and 1 for constants."""

TOKEN_FIELDS = ("tokens", "positions", "request", "offset", "remaining", "last")


class Segment(NamedTuple):
    """Neighbouring tokens of one request in a step.

    Attributes:
        row: the request's row of the tables.
        start: position of the first token.
        tokens: token ids.
    """

    row: int
    start: int
    tokens: Sequence[int]


class StepInputs:
    """One host buffer and one device buffer of int64, divided into the fields of a StepBatch.

    Attributes:
        page_table: `[R, P]` on the host, to be kept up to date by its owner.
        window_table: `[R, P]` on the host, likewise.
    """

    def __init__(
        self,
        ratios: Sequence[int],
        max_tokens: int,
        rows: int,
        pages: int,
        device: torch.device,
    ) -> None:
        """Allocate both buffers.

        Args:
            ratios: compress ratios whose closing tokens a step lists.
            max_tokens: tokens of the largest step, padding included.
            rows: R, requests.
            pages: P, pages per request.
            device: where the model runs.
        """
        self.ratios = tuple(ratios)
        self.max_tokens = max_tokens
        sizes = dict.fromkeys(("page_table", "window_table"), rows * pages)
        sizes |= dict.fromkeys((*TOKEN_FIELDS, *map(_closing, self.ratios)), max_tokens)
        self._fields: dict[str, slice] = {}
        end = 0
        for name, size in sizes.items():
            self._fields[name] = slice(end, end + size)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        self._host = torch.full((end,), -1, dtype=torch.int64)
        if device.type == "cuda":
            self._host = self._host.pin_memory()
        self._device = self._host.to(device)
        self.page_table, self.window_table = (
            self._host[self._fields[name]].view(rows, pages)
            for name in ("page_table", "window_table")
        )

    def prefill(
        self, segments: Sequence[Segment], last: Sequence[int], size: int = MIN_SIZE
    ) -> StepBatch:
        """A ragged chunk.

        Args:
            segments: the chunk, at most one segment per request.
            last: flat indices of the tokens whose logits are wanted, in that order.
            size: tokens to pad the chunk to if it has fewer.
        """
        tokens: list[int] = []
        positions: list[int] = []
        request: list[int] = []
        offset: list[int] = []
        remaining: list[int] = []
        for segment in segments:
            count = len(segment.tokens)
            tokens += segment.tokens
            positions += range(segment.start, segment.start + count)
            request += [segment.row] * count
            offset += range(count)
            remaining += range(count - 1, -1, -1)
        size = max(size, len(tokens))
        closing: dict[int, int] = {}
        for ratio in self.ratios:
            flat = [i for i, position in enumerate(positions) if (position + 1) % ratio == 0]
            closing[ratio] = max(MIN_SIZE, size // ratio, len(flat))
            self._fill(_closing(ratio), flat, closing[ratio], -1)
        self._fill("tokens", tokens, size, 0)
        self._fill("positions", positions, size, -1)
        self._fill("request", request, size, 0)
        self._fill("offset", offset, size, 0)
        self._fill("remaining", remaining, size, 0)
        rows = max(MIN_SIZE, len(last))
        self._fill("last", last, rows, 0)
        return self._upload(size, rows, closing)

    def decode(self, segments: Sequence[Segment]) -> StepBatch:
        """One token of each request, at the flat index of its row; the other rows are padding.

        Every field has R entries whatever the requests are, as a captured graph needs.
        """
        rows = self.page_table.shape[0]
        tokens, positions = [0] * rows, [-1] * rows
        for segment in segments:
            (tokens[segment.row],) = segment.tokens
            positions[segment.row] = segment.start
        self._fill("tokens", tokens, rows, 0)
        self._fill("positions", positions, rows, -1)
        for name in ("offset", "remaining"):
            self._fill(name, [], rows, 0)
        for name in ("request", "last", *map(_closing, self.ratios)):
            self._fill(name, range(rows), rows, 0)
        return self._upload(rows, rows, dict.fromkeys(self.ratios, rows))

    def _fill(self, name: str, values: Sequence[int], size: int, padding: int) -> None:
        start = self._fields[name].start
        end = start + len(values)
        self._host[start:end] = torch.tensor(values, dtype=torch.int64)
        self._host[end : start + size] = padding

    def _upload(self, tokens: int, last: int, closing: dict[int, int]) -> StepBatch:
        # Blocking: the next step must not overwrite the host buffer under a running copy.
        self._device.copy_(self._host)

        def field(name: str, size: int) -> Tensor:
            start = self._fields[name].start
            return self._device[start : start + size]

        def table(name: str, host: Tensor) -> Tensor:
            return field(name, host.numel()).view(host.shape)

        return StepBatch(
            tokens=field("tokens", tokens),
            positions=field("positions", tokens),
            request=field("request", tokens),
            offset=field("offset", tokens),
            remaining=field("remaining", tokens),
            page_table=table("page_table", self.page_table),
            window_table=table("window_table", self.window_table),
            closing={ratio: field(_closing(ratio), size) for ratio, size in closing.items()},
            last=field("last", last),
        )


def _closing(ratio: int) -> str:
    """Field name of a ratio's closing tokens."""
    return f"closing{ratio}"
