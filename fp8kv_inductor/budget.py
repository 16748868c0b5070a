"""Bytes per page and tier, and how many pages a memory budget holds.

Runs before any pool exists. The bytes of a row come from the same RowFormat that later allocates
the pools, so planned and allocated bytes cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from fp8kv_inductor.config import CacheConfig, ConfigError
from fp8kv_inductor.formats import RowFormat

WINDOW_RATIO = 0.2
"""Window pages per full-history page."""

MIN_WINDOW_PAGES = 2
"""A window of one page's length touches two pages unless it is aligned."""


@dataclass(frozen=True)
class PoolShape:
    """One pool of one layer: ``n_slots`` rows of ``width`` elements."""

    tier: str
    layer: int
    n_slots: int
    width: int
    row_format: RowFormat

    @property
    def nbytes(self) -> int:
        """Bytes of the pool."""
        return self.n_slots * self.row_format.row_bytes(self.width)


@dataclass(frozen=True)
class PoolPlan:
    """How many pages there are, and the pools that follow from it.

    Attributes:
        cache: the resolved cache mode.
        num_pages: full-history pages; their compressed rows and index keys.
        window_pages: window pages; their window rows and compressor states.
    """

    cache: CacheConfig
    num_pages: int
    window_pages: int

    @property
    def shapes(self) -> list[PoolShape]:
        """Every pool of every layer."""
        cache, model = self.cache, self.cache.model
        shapes: list[PoolShape] = []
        for layer, ratio in enumerate(model.compress_ratios):

            def add(
                tier: str, n_slots: int, width: int, fmt: RowFormat, layer: int = layer
            ) -> None:
                shapes.append(PoolShape(tier, layer, n_slots, width, fmt))

            add("window", self.window_pages * cache.page_size, model.head_dim, cache.kv_format)
            if not ratio:
                continue
            cmp_slots = self.num_pages * (cache.page_size // ratio)
            state_slots = self.window_pages * model.state_ring(ratio)
            add("cmp", cmp_slots, model.head_dim, cache.kv_format)
            add("state", state_slots, model.state_width(ratio, model.head_dim), cache.state_format)
            if model.has_indexer(ratio):
                width = model.index_head_dim
                add("idx", cmp_slots, width, cache.idx_format)
                add("idx_state", state_slots, model.state_width(ratio, width), cache.state_format)
        return shapes

    @property
    def nbytes(self) -> int:
        """Bytes of all pools."""
        return sum(shape.nbytes for shape in self.shapes)

    @property
    def tier_bytes(self) -> dict[str, int]:
        """Bytes by tier."""
        tiers: dict[str, int] = {}
        for shape in self.shapes:
            tiers[shape.tier] = tiers.get(shape.tier, 0) + shape.nbytes
        return tiers

    @property
    def tokens(self) -> int:
        """Tokens of history that the pages hold."""
        return self.num_pages * self.cache.page_size

    def bytes_per_token(self) -> float:
        """Pool bytes per token of history."""
        return self.nbytes / self.tokens


def window_pages_for(num_pages: int, window_ratio: float) -> int:
    """Window pages that go with ``num_pages`` full-history pages."""
    return max(MIN_WINDOW_PAGES, ceil(num_pages * window_ratio))


def plan_pages(
    cache: CacheConfig,
    budget: int,
    window_pages: Callable[[int], int] | None = None,
) -> PoolPlan:
    """The largest plan whose pools fit into ``budget`` bytes.

    Args:
        cache: the resolved cache mode.
        budget: bytes for all pools.
        window_pages: window pages as a non-decreasing function of full-history pages; by default
            ``WINDOW_RATIO`` of them.

    Raises:
        ConfigError: not even one page fits.
    """

    def plan(num_pages: int) -> PoolPlan:
        pages = (
            window_pages_for(num_pages, WINDOW_RATIO)
            if window_pages is None
            else window_pages(num_pages)
        )
        return PoolPlan(cache, num_pages, pages)

    smallest = plan(1)
    if smallest.nbytes > budget:
        raise ConfigError(
            f"found a KV budget of {budget} bytes; {cache.model.name!r} with kv_cache_dtype="
            f"{cache.kv_cache_dtype!r} needs at least {smallest.nbytes} bytes for one page of "
            f"{cache.page_size} tokens and its window; raise the budget"
        )
    fits, too_many = 1, 2
    while plan(too_many).nbytes <= budget:
        fits, too_many = too_many, 2 * too_many
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if plan(middle).nbytes <= budget:
            fits = middle
        else:
            too_many = middle
    return plan(fits)
