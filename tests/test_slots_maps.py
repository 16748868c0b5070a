"""Slot maps against brute force: what each token reads is what its own request wrote."""

import random

import pytest
import torch

from fp8kv_inductor import slots
from fp8kv_inductor.config import PAGE_SIZE
from fp8kv_inductor.model_config import TINY
from fp8kv_inductor.slots import StepBatch

REQUESTS, PAGES, WINDOW_PAGES = 3, 4, 10
RATIOS = TINY.ratios
WINDOW = TINY.window_size


class Requests:
    """Requests that advance by random chunks, with pages in random order.

    Window pages are recycled as soon as no coming token looks back to them.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        pages = list(range(REQUESTS * PAGES))
        self.random.shuffle(pages)
        self.page_table = torch.tensor(pages).view(REQUESTS, PAGES)
        self.window_table = torch.full((REQUESTS, PAGES), -1)
        self.free = list(range(WINDOW_PAGES))
        self.done = [0] * REQUESTS

    def step(self, longest: int) -> StepBatch:
        """The next chunk of every request, of 0 to ``longest`` tokens, and two padding tokens."""
        columns: dict[str, list[int]] = {
            name: [] for name in ("positions", "request", "offset", "remaining")
        }
        order = list(range(REQUESTS))
        self.random.shuffle(order)
        for request in order:
            start = self.done[request]
            length = min(self.random.randint(0, longest), PAGES * PAGE_SIZE - start)
            self.hold_window_pages(request, start, start + length)
            columns["positions"] += range(start, start + length)
            columns["request"] += [request] * length
            columns["offset"] += range(length)
            columns["remaining"] += range(length - 1, -1, -1)
            self.done[request] += length
        for name, padding in (("positions", -1), ("request", 0), ("offset", 0), ("remaining", 0)):
            columns[name] += [padding] * 2
        positions = columns["positions"]
        closing = {
            ratio: [i for i, p in enumerate(positions) if (p + 1) % ratio == 0 and p >= 0]
            + [-1, 0, len(positions) - 1]
            for ratio in RATIOS
        }
        return StepBatch(
            tokens=torch.zeros(len(positions), dtype=torch.int64),
            page_table=self.page_table,
            window_table=self.window_table.clone(),
            closing={ratio: torch.tensor(tokens) for ratio, tokens in closing.items()},
            last=torch.tensor([0]),
            **{name: torch.tensor(values) for name, values in columns.items()},
        )

    def hold_window_pages(self, request: int, start: int, end: int) -> None:
        table = self.window_table[request]
        oldest = max(0, start - WINDOW + 1) // PAGE_SIZE
        for page in range(oldest):
            if table[page] >= 0:
                self.free.append(int(table[page]))
                table[page] = -1
        for page in range(oldest, -(-end // PAGE_SIZE)):
            if table[page] < 0:
                table[page] = self.free.pop(0)


def written(where: torch.Tensor, batch: StepBatch) -> dict[int, tuple[int, int]]:
    """Slot -> (request, position) of what the step writes; no slot is written twice."""
    entries = {
        slot: (int(batch.request[token]), int(batch.positions[token]))
        for token, slot in enumerate(where.tolist())
        if slot >= 0
    }
    assert len(entries) == int((where >= 0).sum())
    return entries


def live_tokens(batch: StepBatch):
    """(flat index, request, position) of every token that is not padding."""
    for token, (request, position) in enumerate(
        zip(batch.request.tolist(), batch.positions.tolist(), strict=True)
    ):
        if position >= 0:
            yield token, request, position


CHUNKS = pytest.mark.parametrize("longest", [1, 2, 40, 200], ids="chunks up to {}".format)


@CHUNKS
def test_window_columns_are_the_last_positions(longest):
    requests, rows = Requests(longest), {}
    for _ in range(300 if longest <= 2 else 20):
        batch = requests.step(longest)
        slot = slots.window_slots(batch)
        assert (slot[batch.positions < 0] == -1).all()
        rows |= written(slot, batch)
        indices = slots.window_indices(batch, WINDOW)
        assert (indices[batch.positions < 0] == -1).all()
        for token, request, position in live_tokens(batch):
            expected = [-1] * WINDOW
            for earlier in range(max(0, position - WINDOW + 1), position + 1):
                expected[earlier % WINDOW] = earlier
            for index, earlier in zip(indices[token].tolist(), expected, strict=True):
                assert rows[index] == (request, earlier) if earlier >= 0 else index == -1


@CHUNKS
@pytest.mark.parametrize("ratio", RATIOS)
def test_groups_pool_their_own_tokens_and_become_the_right_row(ratio, longest):
    """Pooled tokens come from the step itself or from the state ring, across pages and chunks."""
    ring = TINY.state_ring(ratio)
    requests, states, rows = Requests(longest), {}, {}
    for _ in range(300 if longest <= 2 else 20):
        batch = requests.step(longest)
        groups = slots.groups(batch, ratio, ring)
        for entry, token in enumerate(batch.closing[ratio].tolist()):
            position = int(batch.positions[token]) if token >= 0 else -1
            if (position + 1) % ratio or position < 0:
                assert groups.slots[entry] == -1 and groups.positions[entry] == 0
                assert not groups.exists[entry].any()
                continue
            request = int(batch.request[token])
            page, within = divmod(position, PAGE_SIZE)
            slot = int(requests.page_table[request, page]) * (PAGE_SIZE // ratio) + within // ratio
            assert groups.slots[entry] == slot
            assert groups.positions[entry] == position + 1 - ratio
            rows[slot] = (request, position // ratio)
            for pooled, lag in enumerate(range(ring - 1, -1, -1)):
                assert groups.exists[entry, pooled] == (position >= lag)
                if position < lag:
                    continue
                expected = (request, position - lag)
                if groups.in_step[entry, pooled]:
                    source = int(groups.tokens[entry, pooled])
                    assert (batch.request[source], batch.positions[source]) == expected
                else:
                    assert states[int(groups.states[entry, pooled])] == expected
        states |= written(slots.state_slots(batch, ring), batch)
        assert_cmp_columns(batch, ratio, rows)


def assert_cmp_columns(batch: StepBatch, ratio: int, rows: dict[int, tuple[int, int]]) -> None:
    """Columns below the count name the rows of closed groups, in order."""
    counts, indices = slots.cmp_counts(batch, ratio), slots.cmp_indices(batch, ratio)
    assert indices.shape[1] == PAGES * PAGE_SIZE // ratio
    assert (counts[batch.positions < 0] == 0).all()
    first = slots.cmp_page_rows(batch, ratio)
    for token, request, position in live_tokens(batch):
        count = int(counts[token])
        assert count == (position + 1) // ratio
        read = [rows[index] for index in indices[token, :count].tolist()]
        assert read == [(request, block) for block in range(count)]
        for block in range(count):
            page, offset = divmod(block, PAGE_SIZE // ratio)
            assert int(first[request, page]) + offset == int(indices[token, block])


def test_missing_pages_have_no_row():
    table = torch.tensor([[3, -1]])
    request = torch.zeros(3, dtype=torch.int64)
    positions = torch.tensor([-1, 5, PAGE_SIZE])
    row = slots.table_rows(table, request, positions, PAGE_SIZE, 1)
    assert row.tolist() == [-1, 3 * PAGE_SIZE + 5, -1]


def test_unused_pages_point_at_a_row_that_exists():
    """The index-key scan may form their address before it sees the count."""
    batch = Requests(0).step(4)._replace(page_table=torch.full((REQUESTS, PAGES), -1))
    for ratio in RATIOS:
        assert not slots.cmp_page_rows(batch, ratio).any()
