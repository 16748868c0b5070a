"""Bytes per page and tier, and how many pages and expert slots a memory budget holds.

Runs before any pool exists. The bytes of a row come from the same RowFormat that later allocates
the pools, so planned and allocated bytes cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

from fp8kv_inductor.config import CacheConfig, ConfigError
from fp8kv_inductor.formats import WEIGHT_FORMATS, RowFormat
from fp8kv_inductor.model_config import ModelConfig
from fp8kv_inductor.weight_shapes import check_tp, expert_weights, other_weights

WINDOW_RATIO = 0.2
"""Window pages per full-history page."""

MIN_WINDOW_PAGES = 2
"""A window of one page's length touches two pages unless it is aligned."""

WORKSPACE_DIVISOR = 10
"""A tenth of a GPU stays free for activations, captured graphs and libraries."""


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

    def pages_for(self, tokens: int) -> int:
        """Full-history pages of a request of ``tokens`` tokens."""
        return -(-tokens // self.cache.page_size)

    def reserve_for(self, tokens: int) -> int:
        """Window pages that such a request may hold at the same time while it decodes."""
        lookback = lookback_pages(self.cache.model.lookback, self.cache.page_size)
        return min(self.pages_for(tokens), lookback)

    def requests(self, tokens: int) -> float:
        """Requests of ``tokens`` tokens that full-history and window pages hold at the same time.

        The fraction says how far the pages go towards one more.
        """
        return min(
            self.num_pages / self.pages_for(tokens), self.window_pages / self.reserve_for(tokens)
        )


def lookback_pages(lookback: int, page_size: int) -> int:
    """Pages that ``lookback`` neighbouring positions touch at most."""
    return -(-(lookback - 1) // page_size) + 1


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
    return plan(_largest(lambda num_pages: plan(num_pages).nbytes <= budget))


def _largest(fits: Callable[[int], bool]) -> int:
    """The largest n that ``fits``, which holds for 1 and, from some n on, no longer."""
    good, bad = 1, 2
    while fits(bad):
        good, bad = bad, 2 * bad
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good


@dataclass(frozen=True)
class CapacityPlan:
    """What one GPU of a tensor-parallel group holds. All bytes are those of one GPU.

    Attributes:
        pages: the pools, which every GPU has in full.
        expert_slots: slots for routed experts of any layer; a GPU's slot holds its share of one.
        vram: bytes of a GPU.
        workspace_bytes: left for activations, captured graphs and libraries.
        weight_bytes: all weights but the routed experts'.
        slot_bytes: of one expert slot.
    """

    pages: PoolPlan
    expert_slots: int
    vram: int
    workspace_bytes: int
    weight_bytes: int
    slot_bytes: int

    @property
    def tier_bytes(self) -> dict[str, int]:
        """Bytes by tier: workspace, weights, experts, then the tiers of the pools."""
        return {
            "workspace": self.workspace_bytes,
            "weights": self.weight_bytes,
            "experts": self.expert_slots * self.slot_bytes,
            **self.pages.tier_bytes,
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all tiers."""
        return sum(self.tier_bytes.values())

    @property
    def unused(self) -> int:
        """Bytes left over: the next page does not fit, nor does a slot that it would ask for."""
        return self.vram - self.nbytes


def expert_slots_for(model: ModelConfig, requests: float) -> int:
    """Slots for all experts that a decode step of ``requests`` requests uses, in all layers.

    Expected number of distinct experts per layer when n tokens each take k of E experts at random:
    ``E * (1 - (1 - k / E)^n)``. Equal odds are the worst case, because ``1 - (1 - p)^n`` is
    concave in p: tokens that prefer some experts use fewer of them. At least one token is counted.
    """
    experts, idle = model.n_routed_experts, model.n_routed_experts - model.n_activated_experts
    # (1 - k / E)^n, with one factor taken out so that one token gives exactly k experts.
    unused = idle * (idle / experts) ** (max(1.0, requests) - 1)
    return ceil(model.n_layers * (experts - unused))


def plan_capacity(
    cache: CacheConfig,
    vram: int,
    *,
    tp: int = 1,
    context: int = 4096,
    window_ratio: float = WINDOW_RATIO,
    expert_dtype: str = "fp4",
    linear_dtype: str = "fp8",
    workspace: int | None = None,
) -> CapacityPlan:
    """Split a GPU between KV pages and slots for routed experts, whose rest stays in host memory.

    Workspace and the other weights come first. What is left holds as many requests as possible
    together with the experts that one decode step of theirs uses (:func:`expert_slots_for`), their
    working set (https://doi.org/10.1145/363095.363141): layers take turns, so with fewer slots a
    least-recently-used cache of experts forgets a layer's before the next step comes back to it,
    while slots beyond that are better spent on one more request.

    Pages and slots grow together, one page at a time, so neither shrinks when memory grows or
    when a format makes pages smaller. Once all experts have a slot, only pages grow. Memory too
    small for the next page goes to the slots that it will ask for.

    Args:
        cache: the resolved cache mode; its formats give the bytes of a page.
        vram: bytes of one GPU.
        tp: GPUs that share the model. Each holds all pools and its part of each expert.
        context: tokens of a request.
        window_ratio: window pages per full-history page.
        expert_dtype: of the routed experts, a key of ``WEIGHT_FORMATS``.
        linear_dtype: of the other linear layers, likewise.
        workspace: bytes for everything else; by default a tenth of ``vram``.

    Raises:
        ConfigError: one page and the experts of one token do not fit, ``tp`` does not divide the
            model, or the model has fewer than ``context`` positions.
    """
    model = cache.model
    check_tp(model, tp)
    if not 1 <= context <= model.max_seq_len:
        raise ConfigError(
            f"found a context of {context} tokens; {model.name!r} has {model.max_seq_len} "
            "positions; choose one of 1 to as many"
        )
    reserved = vram // WORKSPACE_DIVISOR if workspace is None else workspace
    weights = sum(w.shard(tp).nbytes for w in other_weights(model, WEIGHT_FORMATS[linear_dtype]))
    experts = expert_weights(model, WEIGHT_FORMATS[expert_dtype])
    slot = sum(weight.shard(tp).nbytes for weight in experts.values())

    def plan(num_pages: int) -> CapacityPlan:
        pages = PoolPlan(cache, num_pages, window_pages_for(num_pages, window_ratio))
        slots = expert_slots_for(model, pages.requests(context))
        return CapacityPlan(pages, slots, vram, reserved, weights, slot)

    smallest = plan(1)
    if smallest.unused < 0:
        raise ConfigError(_too_small(smallest, tp))
    largest = plan(_largest(lambda num_pages: plan(num_pages).unused >= 0))
    wanted = plan(largest.pages.num_pages + 1).expert_slots
    slots = min(wanted, largest.expert_slots + largest.unused // slot)
    return replace(largest, expert_slots=slots)


def _too_small(smallest: CapacityPlan, tp: int) -> str:
    tiers = smallest.tier_bytes
    cache = smallest.pages.cache
    return (
        f"found {smallest.vram} bytes of GPU memory; {cache.model.name!r} with kv_cache_dtype="
        f"{cache.kv_cache_dtype!r} on {tp} GPU(s) needs at least {smallest.nbytes} on each: "
        f"workspace {tiers['workspace']}, weights {tiers['weights']}, {smallest.expert_slots} "
        f"expert slots {tiers['experts']}, one page and its window {smallest.pages.nbytes}; raise "
        "the memory or the tensor-parallel size, or lower the workspace"
    )
