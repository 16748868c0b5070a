"""``fp8kv plan``: what a GPU holds in each cache mode, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from fp8kv_inductor.budget import CapacityPlan, plan_capacity
from fp8kv_inductor.config import CacheConfig
from fp8kv_inductor.model_config import ModelConfig


@dataclass(frozen=True)
class Options:
    """What to plan; see :func:`plan_capacity`.

    Attributes:
        model: name of a preset.
        modes: strings for ``kv_cache_dtype``.
        vram: bytes of one GPU.
        tp: GPUs that share the model.
        context: tokens of a request.
        window_ratio: window pages per full-history page.
        expert_dtype: of the routed experts.
        linear_dtype: of the other linear layers.
        workspace: bytes left for everything else; None for the planner's default.
    """

    model: str
    modes: Sequence[str]
    vram: int
    tp: int
    context: int
    window_ratio: float
    expert_dtype: str
    linear_dtype: str
    workspace: int | None


def run(options: Options) -> dict[str, Any]:
    """Plan each mode; the result is what ``--json`` prints.

    Raises:
        ConfigError: a mode does not fit.
    """
    return {
        "model": options.model,
        "vram_bytes": options.vram,
        "tp": options.tp,
        "context": options.context,
        "window_ratio": options.window_ratio,
        "expert_dtype": options.expert_dtype,
        "linear_dtype": options.linear_dtype,
        "all_experts": all_experts(ModelConfig.from_any(options.model)),
        "plans": {mode: summary(plan(options, mode), options.context) for mode in options.modes},
    }


def plan(options: Options, mode: str) -> CapacityPlan:
    """The plan of one mode. It is made on the CPU: the GPU that it is for may be elsewhere."""
    return plan_capacity(
        CacheConfig.resolve(options.model, mode, "cpu"),
        options.vram,
        tp=options.tp,
        context=options.context,
        window_ratio=options.window_ratio,
        expert_dtype=options.expert_dtype,
        linear_dtype=options.linear_dtype,
        workspace=options.workspace,
    )


def all_experts(model: ModelConfig) -> int:
    """Routed experts of all layers."""
    return model.n_layers * model.n_routed_experts


def summary(capacity: CapacityPlan, context: int) -> dict[str, Any]:
    """One mode's entry of the result."""
    cache, pages = capacity.pages.cache, capacity.pages
    return {
        "bytes_per_element": cache.kv_format.bytes_per_element(cache.model.head_dim),
        "pages": pages.num_pages,
        "window_pages": pages.window_pages,
        "tokens": pages.tokens,
        "requests": int(pages.requests(context)),
        "expert_slots": capacity.expert_slots,
        "slot_bytes": capacity.slot_bytes,
        "tier_bytes": {**capacity.tier_bytes, "unused": capacity.unused},
    }


def print_table(result: dict[str, Any], console: Console) -> None:
    """Print the result for people."""
    plans = result["plans"].values()
    table = Table(
        title=f"{result['model']}: each of {result['tp']} GPU(s) of {mib(result['vram_bytes'])}"
    )
    table.add_column("")
    for mode in result["plans"]:
        table.add_column(mode, justify="right")
    for label, key, fmt in (
        ("bytes per KV element", "bytes_per_element", ".4f"),
        ("pages", "pages", ","),
        ("window pages", "window_pages", ","),
        (f"expert slots (of {result['all_experts']:,})", "expert_slots", ","),
        ("tokens", "tokens", ","),
        (f"requests of {result['context']:,} tokens", "requests", ","),
    ):
        table.add_row(label, *(format(each[key], fmt) for each in plans))
    table.add_section()
    for tier in next(iter(plans))["tier_bytes"]:
        table.add_row(tier, *(mib(each["tier_bytes"][tier]) for each in plans))
    console.print(table)
    console.print(
        f"routed experts in {result['expert_dtype']}, other linear layers in "
        f"{result['linear_dtype']}; --json gives bytes"
    )


def mib(nbytes: int) -> str:
    """Bytes for people, in one unit for all tiers."""
    return f"{nbytes / 2**20:,.1f} MiB"
