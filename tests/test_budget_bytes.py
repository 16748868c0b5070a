"""Planned bytes: an independent formula, and equality with what the pools allocate."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8kv_inductor import CacheConfig, ConfigError, KVPools
from fp8kv_inductor.budget import PoolPlan, plan_pages
from fp8kv_inductor.config import KV_CACHE_DTYPES
from fp8kv_inductor.model_config import TINY
from fp8kv_inductor.pools import Pool

MODES = list(KV_CACHE_DTYPES)
SMALL = replace(TINY, name="small", head_dim=32, rope_head_dim=16, index_head_dim=32)
ROW_BYTES = {"auto": 1024, "fp8_e4m3": 544, "fp8_e4m3_amax": 544, "fp8_e4m3_ue8m0": 528}


def flash_tiers(row: int, pages: int, window_pages: int) -> dict[str, int]:
    """Bytes by tier of V4-Flash: 43 layers, 21 of ratio 4, 20 of ratio 128, in plain numbers."""
    fp32, kv_and_score, both_halves = 4, 2, 2
    return {
        "window": 43 * window_pages * 128 * row,
        "cmp": (21 * 32 + 20 * 1) * pages * row,
        "idx": 21 * 32 * pages * 128 * 2,
        "state": window_pages
        * (21 * 8 * kv_and_score * both_halves + 20 * 128 * kv_and_score)
        * 512
        * fp32,
        "idx_state": window_pages * 21 * 8 * kv_and_score * both_halves * 128 * fp32,
    }


@pytest.mark.parametrize("mode", MODES)
def test_v4_flash_equals_an_independent_formula(mode):
    plan = PoolPlan(CacheConfig.resolve("v4-flash", mode, "cpu"), 1000, 200)
    expected = flash_tiers(ROW_BYTES[mode], 1000, 200)
    assert plan.tier_bytes == expected
    assert plan.nbytes == sum(expected.values())
    assert plan.bytes_per_token() == plan.nbytes / 128000


def test_v4_flash_shares_at_window_ratio_one_fifth():
    tiers = PoolPlan(CacheConfig.resolve("v4-flash", "auto", "cpu"), 1000, 200).tier_bytes
    total = sum(tiers.values())
    assert round(100 * (tiers["window"] + tiers["cmp"]) / total, 1) == 41.3
    assert round(100 * tiers["idx"] / total, 1) == 3.9
    assert round(100 * tiers["state"] / total, 1) == 53.3
    assert round(100 * tiers["idx_state"] / total, 1) == 1.5


def test_fp8_divides_bytes_per_page_of_v4_flash_by_1_24():
    plans = [
        PoolPlan(CacheConfig.resolve("v4-flash", mode, "cpu"), 1000, 200)
        for mode in ("auto", "fp8_e4m3")
    ]
    assert round(plans[0].nbytes / plans[1].nbytes, 3) == 1.24


def test_the_same_budget_holds_more_fp8_pages():
    """If the planner did not know the format, the pools would shrink and num_pages would stay."""
    pages = {
        mode: plan_pages(CacheConfig.resolve("v4-flash", mode, "cpu"), 8 << 30).num_pages
        for mode in MODES
    }
    assert 1.22 < pages["fp8_e4m3"] / pages["auto"] < 1.25
    assert pages["fp8_e4m3_amax"] == pages["fp8_e4m3"] < pages["fp8_e4m3_ue8m0"]


@pytest.mark.parametrize("mode", MODES)
@given(extra=st.integers(0, 3_000_001))
def test_planned_bytes_are_allocated_bytes(mode, extra):
    cache = CacheConfig.resolve(SMALL, mode, "cpu")
    budget = PoolPlan(cache, 1, 2).nbytes + extra
    plan = plan_pages(cache, budget)
    pools = KVPools(plan)
    storages = [
        tensor.untyped_storage().nbytes() for tensor in pools.buffers() if tensor is not None
    ]
    assert plan.nbytes == pools.nbytes() == sum(storages) <= budget


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["v4-flash", "v4-pro"])
def test_planned_bytes_of_real_shapes_are_allocated_bytes(name, mode):
    cache = replace(CacheConfig.resolve(name, mode, "cpu"), device=torch.device("meta"))
    plan = plan_pages(cache, 24 * 10**9 + 7)
    assert plan.nbytes == KVPools(plan).nbytes()


@pytest.mark.parametrize("mode", MODES)
@given(extra=st.integers(0, 10**9))
def test_the_plan_is_the_largest_that_fits(mode, extra):
    cache = CacheConfig.resolve("tiny", mode, "cpu")
    budget = PoolPlan(cache, 1, 2).nbytes + extra
    plan = plan_pages(cache, budget)
    one_more = plan.num_pages + 1
    larger = PoolPlan(cache, one_more, max(2, -(-one_more // 5)))
    assert plan.nbytes <= budget < larger.nbytes


def test_window_pages_may_be_given():
    cache = CacheConfig.resolve("tiny", "fp8_e4m3", "cpu")
    plan = plan_pages(cache, 50 << 20, window_pages=lambda num_pages: 2 * num_pages)
    assert plan.window_pages == 2 * plan.num_pages
    assert (
        plan.nbytes <= 50 << 20 < PoolPlan(cache, plan.num_pages + 1, plan.window_pages + 2).nbytes
    )


@pytest.mark.parametrize("mode", MODES)
def test_budget_too_small(mode):
    cache = CacheConfig.resolve("tiny", mode, "cpu")
    needed = PoolPlan(cache, 1, 2).nbytes
    assert plan_pages(cache, needed).num_pages == 1
    message = f"found a KV budget of {needed - 1} bytes; .* at least {needed} bytes .*raise the"
    with pytest.raises(ConfigError, match=message):
        plan_pages(cache, needed - 1)


def test_every_pool_of_a_plan_has_the_resolved_format():
    cache = CacheConfig.resolve("tiny", "fp8_e4m3", "cpu")
    pools = KVPools(PoolPlan(cache, 2, 2))
    for layer in pools.layers:
        for tier, pool in layer.named_children():
            assert isinstance(pool, Pool)
            expected = {"window": cache.kv_format, "cmp": cache.kv_format, "idx": cache.idx_format}
            assert pool.format is expected.get(tier, cache.state_format)
