"""The split of a GPU between pages and expert slots: exact, monotone, and as large as it can be."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8kv_inductor import CacheConfig, ConfigError, KVPools
from fp8kv_inductor.budget import PoolPlan, expert_slots_for, plan_capacity
from fp8kv_inductor.config import KV_CACHE_DTYPES
from fp8kv_inductor.formats import WEIGHT_FORMATS
from fp8kv_inductor.model_config import TINY, V4_FLASH
from fp8kv_inductor.page_table import PageTable
from fp8kv_inductor.weight_shapes import expert_weights, other_weights

MODES = list(KV_CACHE_DTYPES)
TP_SIZES = (1, 2, 4, 8)
CONTEXT = 300
WIDE = replace(TINY, name="wide", n_heads=8, o_groups=8)
"""TINY with axes that eight ranks can divide."""

extra_bytes = st.integers(0, 8 << 20)
modes = st.sampled_from(MODES)
tp_sizes = st.sampled_from(TP_SIZES)
weight_dtypes = st.sampled_from(list(WEIGHT_FORMATS))


def resolve(mode, model=WIDE):
    return CacheConfig.resolve(model, mode, "cpu")


def least_vram(mode, **options):
    """Bytes of the smallest plan without a workspace, from its parts."""
    huge = plan_capacity(resolve(mode), 1 << 30, context=CONTEXT, **options)
    slots = WIDE.n_layers * WIDE.n_activated_experts
    pages = PoolPlan(resolve(mode), 1, 2)
    return huge.weight_bytes + slots * huge.slot_bytes + pages.nbytes


def make_plan(mode, extra, **options):
    vram = least_vram(mode, **options) + extra
    return plan_capacity(resolve(mode), vram, context=CONTEXT, workspace=0, **options)


def storage_bytes(tensors):
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def allocate(weight, *leading):
    return [torch.empty(*leading, *shape, dtype=dtype) for shape, dtype in weight.tensors]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tp", TP_SIZES)
@given(extra=extra_bytes, expert_dtype=weight_dtypes, linear_dtype=weight_dtypes)
def test_planned_bytes_are_allocated_bytes(mode, tp, extra, expert_dtype, linear_dtype):
    dtypes = {"expert_dtype": expert_dtype, "linear_dtype": linear_dtype}
    plan = make_plan(mode, 2 * extra + 1, tp=tp, **dtypes)
    experts = [
        tensor
        for weight in expert_weights(WIDE, WEIGHT_FORMATS[expert_dtype]).values()
        for tensor in allocate(weight.shard(tp), plan.expert_slots)
    ]
    others = [
        tensor
        for weight in other_weights(WIDE, WEIGHT_FORMATS[linear_dtype])
        for tensor in allocate(weight.shard(tp))
    ]
    tiers = plan.tier_bytes
    pools = storage_bytes(KVPools(plan.pages).buffers())
    assert storage_bytes(experts) == tiers["experts"]
    assert storage_bytes(others) == tiers["weights"]
    assert pools == plan.pages.nbytes
    assert pools + storage_bytes(experts) + storage_bytes(others) == plan.nbytes
    assert plan.nbytes + plan.unused == plan.vram and plan.unused >= 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tp", TP_SIZES)
def test_v4_flash_equals_an_independent_formula(mode, tp):
    """An expert is 3 * 2048 * 4096 values of 4 bits and a scale byte per 32 of them."""
    plan = plan_capacity(resolve(mode, "v4-flash"), 48 << 30, tp=tp)
    assert plan.slot_bytes == 3 * 2048 * 4096 * 17 // 32 // tp
    assert plan.workspace_bytes == (48 << 30) // 10
    pools = replace(plan.pages, cache=replace(plan.pages.cache, device=torch.device("meta")))
    assert KVPools(pools).nbytes() == plan.pages.nbytes


@given(mode=modes, tp=tp_sizes, extra=extra_bytes, more=st.integers(0, 1 << 20))
def test_more_memory_never_means_fewer_pages_or_slots(mode, tp, extra, more):
    small, large = (make_plan(mode, each, tp=tp) for each in (extra, extra + more))
    assert small.pages.num_pages <= large.pages.num_pages
    assert small.expert_slots <= large.expert_slots


@given(
    gib=st.floats(24, 200),
    tp=tp_sizes,
    context=st.integers(1, V4_FLASH.max_seq_len),
    expert_dtype=st.sampled_from(["fp4", "fp8"]),
)
def test_fp8_has_at_least_the_pages_and_slots_of_bf16(gib, tp, context, expert_dtype):
    auto, fp8 = (
        plan_capacity(
            resolve(mode, V4_FLASH),
            int(gib * 2**30),
            tp=tp,
            context=context,
            expert_dtype=expert_dtype,
        )
        for mode in ("auto", "fp8_e4m3")
    )
    assert fp8.pages.num_pages >= auto.pages.num_pages
    assert fp8.expert_slots >= auto.expert_slots


@pytest.mark.parametrize(("context", "tp"), [(8192, 1), (65536, 2), (1048576, 1)])
def test_fp8_has_more_of_both(context, tp):
    """If the planner did not know the format, both modes would get the same plan."""
    auto, fp8 = (
        plan_capacity(resolve(mode, "v4-flash"), 48 << 30, tp=tp, context=context)
        for mode in ("auto", "fp8_e4m3")
    )
    assert fp8.pages.num_pages > auto.pages.num_pages
    assert fp8.expert_slots > auto.expert_slots


@given(mode=modes, tp=tp_sizes, extra=extra_bytes)
def test_nothing_that_fits_is_left_out(mode, tp, extra):
    """Less is unused than one more page, with its window pages, and one more slot take."""
    plan = make_plan(mode, extra, tp=tp)
    next_page = plan.pages.num_pages + 1
    larger = replace(plan.pages, num_pages=next_page, window_pages=max(2, -(-next_page // 5)))
    wanted = expert_slots_for(WIDE, larger.requests(CONTEXT))
    slots = max(0, wanted - plan.expert_slots)
    assert plan.unused < larger.nbytes - plan.pages.nbytes + slots * plan.slot_bytes
    if slots:
        assert plan.unused < plan.slot_bytes


@given(mode=modes, extra=extra_bytes)
def test_slots_hold_the_working_set_of_the_requests(mode, extra):
    plan = make_plan(mode, extra)
    assert plan.expert_slots >= expert_slots_for(WIDE, plan.pages.requests(CONTEXT))


def test_all_memory_beyond_the_experts_is_for_pages():
    auto, fp8 = (
        plan_capacity(resolve(mode, "v4-flash"), 400 << 30, tp=2) for mode in ("auto", "fp8_e4m3")
    )
    assert auto.expert_slots == fp8.expert_slots == 43 * 256
    assert fp8.pages.num_pages / auto.pages.num_pages == pytest.approx(1.24, abs=1e-3)


def test_longer_requests_take_memory_from_experts():
    short, long = (
        plan_capacity(resolve("auto", "v4-flash"), 48 << 30, context=context)
        for context in (4096, 65536)
    )
    assert long.pages.num_pages > short.pages.num_pages
    assert long.expert_slots < short.expert_slots


def test_tier_shares_of_v4_flash():
    """Of all pool bytes at one window page per five pages: KV, index keys, states of both kinds."""
    pages = plan_capacity(resolve("auto", "v4-flash"), 141 << 30, window_ratio=0.2).pages
    share = {tier: 100 * nbytes / pages.nbytes for tier, nbytes in pages.tier_bytes.items()}
    assert share["window"] + share["cmp"] == pytest.approx(41, abs=0.5)
    assert share["idx"] == pytest.approx(3.7, abs=0.5)
    assert share["state"] == pytest.approx(53, abs=0.5)
    assert share["idx_state"] == pytest.approx(1.5, abs=0.1)


def test_expected_experts_equal_an_enumeration():
    """Mean number of distinct experts over all choices of two of four by three tokens."""
    model = replace(TINY, n_routed_experts=4, n_activated_experts=2)
    choices = [set(chosen) for chosen in itertools.combinations(range(4), 2)]
    distinct = [len(a | b | c) for a, b, c in itertools.product(choices, repeat=3)]
    assert sum(distinct) / len(distinct) == 3.5
    assert expert_slots_for(model, 3) == math.ceil(model.n_layers * 3.5)


@pytest.mark.parametrize("requests", [0, 0.5, 1])
def test_one_token_uses_its_active_experts_of_every_layer(requests):
    assert expert_slots_for(V4_FLASH, requests) == 43 * 6


def test_many_tokens_use_all_experts():
    assert expert_slots_for(V4_FLASH, 1e6) == 43 * 256
    dense = replace(TINY, n_activated_experts=TINY.n_routed_experts)
    assert expert_slots_for(dense, 1) == expert_slots_for(dense, 9) == 3 * 8


@given(mode=modes, extra=extra_bytes, context=st.integers(1, 4096))
def test_as_many_requests_are_admitted_as_planned(mode, extra, context):
    vram = least_vram(mode) + extra
    pages = plan_capacity(resolve(mode), vram, context=context, workspace=0).pages
    planned = int(pages.requests(context))
    tables = (torch.empty(planned + 1, 32, dtype=torch.int64) for _ in range(2))
    table = PageTable(pages, *tables)
    admitted = [table.admit(context) for _ in range(planned + 1)]
    assert admitted.index(None) == planned


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tp", TP_SIZES)
def test_memory_too_small(mode, tp):
    needed = least_vram(mode, tp=tp)
    smallest = make_plan(mode, 0, tp=tp)
    assert (smallest.pages.num_pages, smallest.unused) == (1, 0)
    assert smallest.expert_slots == WIDE.n_layers * WIDE.n_activated_experts
    message = f"found {needed - 1} bytes of GPU memory; .* at least {needed} on each: .*raise the"
    with pytest.raises(ConfigError, match=message):
        make_plan(mode, -1, tp=tp)


@pytest.mark.parametrize("context", [0, WIDE.max_seq_len + 1])
def test_a_context_that_the_model_does_not_have(context):
    with pytest.raises(ConfigError, match=f"found a context of {context} tokens; 'wide' has 4096"):
        plan_capacity(resolve("auto"), 1 << 30, context=context)


def test_a_tensor_parallel_size_that_does_not_divide():
    with pytest.raises(ConfigError, match="size of 3; 'wide' has n_heads=8"):
        plan_capacity(resolve("auto"), 1 << 30, tp=3)
