"""Pools as module buffers: views stay views, wrong tensors are refused, tiers follow the ratio."""

import pytest
import torch

from fp8kv_inductor import CacheConfig, KVPools, Pool, get_format
from fp8kv_inductor.budget import PoolPlan
from fp8kv_inductor.formats import FORMATS


@pytest.mark.parametrize("name", list(FORMATS))
def test_an_empty_pool_holds_zero_rows(name):
    pool = Pool.empty(6, 64, name)
    fmt = get_format(name)
    assert pool.n_slots == 6 and pool.data.shape == (6, 64)
    assert pool.scale.shape == (6, fmt.scales_per_row(64))
    assert (pool.data.dtype, pool.scale.dtype) == (fmt.code_dtype, fmt.scale_dtype)
    assert pool.nbytes() == 6 * fmt.row_bytes(64)
    assert not pool.data.any() and not pool.scale.any()


def test_views_are_wrapped_in_place():
    layers = torch.zeros(3, 8, 64, dtype=torch.uint8)
    buffer = torch.zeros(12, 2, dtype=torch.float16)
    pool = Pool(layers[1], buffer[2:-2], get_format("fp8_e4m3"))
    assert pool.data.data_ptr() == layers[1].data_ptr()
    assert pool.scale.data_ptr() == buffer[2].data_ptr()


def test_buffers_are_static_addresses_and_not_part_of_a_checkpoint():
    pool = Pool.empty(4, 32, "fp8_e4m3")
    assert [name for name, _ in pool.named_buffers()] == ["data", "scale"]
    assert not pool.state_dict() and not list(pool.parameters())


@pytest.mark.parametrize(
    ("data", "scale"),
    [
        (torch.zeros(4, 64), torch.zeros(4, 2, dtype=torch.float16)),
        (torch.zeros(4, 64, dtype=torch.float8_e4m3fn), torch.zeros(4, 2, dtype=torch.float16)),
        (torch.zeros(4, 64, dtype=torch.uint8), torch.zeros(4, 2, dtype=torch.bfloat16)),
        (torch.zeros(4, 64, dtype=torch.uint8), torch.zeros(4, 4, dtype=torch.float16)),
        (torch.zeros(4, 64, dtype=torch.uint8), torch.zeros(3, 2, dtype=torch.float16)),
    ],
)
def test_tensors_of_another_format_are_refused(data, scale):
    with pytest.raises(ValueError, match=r"format 'fp8_e4m3' needs torch.uint8 data"):
        Pool(data, scale, get_format("fp8_e4m3"))


def test_tiers_follow_the_ratio():
    cache = CacheConfig.resolve("tiny", "fp8_e4m3", "cpu")
    pools = KVPools(PoolPlan(cache, 3, 2))
    tiers = [{name for name, pool in layer.named_children()} for layer in pools.layers]
    window, full = {"window"}, {"window", "cmp", "state"}
    indexed = {*full, "idx", "idx_state"}
    assert tiers == [window, indexed, full]
    assert pools.layers[0].cmp is None and pools.layers[2].idx is None
    rows = {name: pool.n_slots for name, pool in pools.layers[1].named_children()}
    assert rows == {"window": 256, "cmp": 96, "state": 16, "idx": 96, "idx_state": 16}


@pytest.mark.gpu
def test_pools_lie_on_the_resolved_device():
    cache = CacheConfig.resolve("tiny", "fp8_e4m3", "cuda")
    assert all(tensor.is_cuda for tensor in KVPools(PoolPlan(cache, 1, 2)).buffers())
