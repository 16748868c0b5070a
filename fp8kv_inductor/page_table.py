"""Which pages belong to which request: free lists and the two tables that the model reads.

Host side only. A request holds the full-history pages of all its tokens so far. Of window pages it
holds those that a coming position can still look back to; older ones return to the free list while
it runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8kv_inductor.budget import PoolPlan
from fp8kv_inductor.config import ConfigError


class FreeList:
    """Pages 0 .. n - 1, each either free or owned by one taker."""

    def __init__(self, n: int) -> None:
        self.size = n
        self._free = list(reversed(range(n)))
        self._owned: set[int] = set()

    def __len__(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def take(self, n: int) -> list[int]:
        """Take ``n`` free pages.

        Raises:
            RuntimeError: fewer are free.
        """
        if n > len(self._free):
            raise RuntimeError(f"{n} pages wanted, {len(self._free)} of {self.size} are free")
        pages = [self._free.pop() for _ in range(n)]
        self._owned.update(pages)
        return pages

    def give(self, pages: list[int]) -> None:
        """Return pages.

        Raises:
            RuntimeError: one of them is not taken.
        """
        for page in pages:
            if page not in self._owned:
                raise RuntimeError(f"page {page} was returned, but nobody holds it")
            self._owned.remove(page)
            self._free.append(page)


@dataclass
class Holding:
    """Pages of one request.

    Attributes:
        full: full-history pages, by page of the request.
        window: page of the request -> window page.
        reserved: window pages that the request may always come to hold.
    """

    full: list[int]
    window: dict[int, int]
    reserved: int


class PageTable:
    """Pages of up to R requests of up to P pages each.

    Admission takes the full-history pages that a request starts with; it grows by more, as long as
    some are free. The window pages that its lookback can touch are reserved to its end. A prefill
    chunk may hold more window pages for one step; those come from what nobody has reserved.

    Attributes:
        page_table: `[R, P]` int64 host tensor, full-history pages, -1 where there is none.
        window_table: `[R, P]` int64 host tensor, window pages, -1 where there is none.
        lookback: the model's, see :attr:`ModelConfig.lookback`.
    """

    def __init__(self, plan: PoolPlan, page_table: Tensor, window_table: Tensor) -> None:
        self.plan = plan
        self.page_size = plan.cache.page_size
        self.lookback = plan.cache.model.lookback
        self.page_table = page_table.fill_(-1)
        self.window_table = window_table.fill_(-1)
        self.full = FreeList(plan.num_pages)
        self.window = FreeList(plan.window_pages)
        self._idle_rows = list(reversed(range(page_table.shape[0])))
        self._holdings: dict[int, Holding] = {}

    def pages_for(self, tokens: int) -> int:
        """Full-history pages of a request of ``tokens`` tokens."""
        return self.plan.pages_for(tokens)

    def reserve_for(self, tokens: int) -> int:
        """Window pages that ``lookback`` positions of such a request can touch."""
        return self.plan.reserve_for(tokens)

    def check(self, tokens: int) -> None:
        """Raise unless a request of ``tokens`` tokens fits when it is alone.

        Raises:
            ConfigError: it never fits, however long it waits.
        """
        columns = self.page_table.shape[1]
        for what, needed, there, remedy in (
            ("pages per request", self.pages_for(tokens), columns, "raise max_len"),
            ("full-history pages", self.pages_for(tokens), self.full.size, "raise the budget"),
            ("window pages", self.reserve_for(tokens), self.window.size, "raise the budget"),
        ):
            if needed > there:
                raise ConfigError(
                    f"found {there} {what}; a request of {tokens} tokens needs {needed}; "
                    f"{remedy} or shorten the request"
                )

    def admit(self, tokens: int, first: int | None = None) -> int | None:
        """A row, and pages for the ``first`` of a request's tokens; None if it must wait.

        Args:
            tokens: of the whole request; its window pages are reserved.
            first: tokens that get their full-history pages at once; by default all.
        """
        pages = self.pages_for(tokens if first is None else first)
        reserved = self.reserve_for(tokens)
        if not self._idle_rows or pages > len(self.full) or reserved > self._unreserved():
            return None
        row = self._idle_rows.pop()
        holding = Holding(self.full.take(pages), {}, reserved)
        self._holdings[row] = holding
        self.page_table[row, :pages] = torch.tensor(holding.full)
        return row

    def grow(self, row: int, end: int) -> bool:
        """Take full-history pages up to position ``end - 1``; False if too few are free."""
        full = self._holdings[row].full
        missing = self.pages_for(end) - len(full)
        if missing > len(self.full):
            return False
        if missing > 0:
            pages = self.full.take(missing)
            self.page_table[row, len(full) : len(full) + missing] = torch.tensor(pages)
            full += pages
        return True

    def extend(self, row: int, start: int, end: int) -> int:
        """Give a request window pages for its positions ``start .. end - 1``, as far as they go.

        Returns:
            The end that the pages reach: at most ``end``, always beyond ``start`` if ``start``
            is the request's next position and :meth:`slide` was called for it.
        """
        holding = self._holdings[row]
        available = self._unreserved() + max(0, holding.reserved - len(holding.window))
        for column in range(start // self.page_size, self.pages_for(end)):
            if column in holding.window:
                continue
            if not available:
                return column * self.page_size
            available -= 1
            (holding.window[column],) = self.window.take(1)
            self.window_table[row, column] = holding.window[column]
        return end

    def slide(self, row: int, position: int) -> None:
        """Free the window pages that no position from ``position`` on looks back to."""
        oldest_page = max(0, position - self.lookback + 1) // self.page_size
        window = self._holdings[row].window
        for column in [column for column in window if column < oldest_page]:
            self.window.give([window.pop(column)])
            self.window_table[row, column] = -1

    def release(self, row: int) -> None:
        """End a request: all its pages and its row are free again."""
        holding = self._holdings.pop(row)
        self.full.give(holding.full)
        self.window.give(list(holding.window.values()))
        self.page_table[row] = -1
        self.window_table[row] = -1
        self._idle_rows.append(row)

    def _unreserved(self) -> int:
        """Free window pages that no admitted request may still claim."""
        claims = (max(0, h.reserved - len(h.window)) for h in self._holdings.values())
        return len(self.window) - sum(claims)
