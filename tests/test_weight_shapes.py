"""Shapes of weights: the planner's list against the model's own parameters, and its shards."""

from dataclasses import replace

import pytest
import torch

from fp8kv_inductor import CacheConfig, ConfigError
from fp8kv_inductor.formats import WEIGHT_FORMATS
from fp8kv_inductor.model_config import PRESETS, TINY, V4_FLASH
from fp8kv_inductor.models.deepseek_v4 import DeepseekV4
from fp8kv_inductor.models.deepseek_v4.moe import Experts
from fp8kv_inductor.parallel import Parallel
from fp8kv_inductor.weight_shapes import check_tp, expert_weights, other_weights

BF16 = WEIGHT_FORMATS["bf16"]


@pytest.mark.parametrize("name", list(PRESETS))
@pytest.mark.parametrize("tp", [1, 2])
def test_bytes_are_those_of_a_rank_of_the_model(name, tp):
    cache = replace(CacheConfig.resolve(name, "auto", "cpu"), device=torch.device("meta"))
    module = DeepseekV4(cache, parallel=Parallel(world_size=tp))
    total = sum(tensor.nbytes for tensor in module.state_dict().values())
    stacked = [part for part in module.modules() if isinstance(part, Experts)]
    experts = sum(weight.nbytes for part in stacked for weight in part.parameters())
    slot = sum(w.shard(tp).nbytes for w in expert_weights(cache.model, BF16).values())
    assert len(stacked) * cache.model.n_routed_experts * slot == experts
    others = sum(w.shard(tp).nbytes for w in other_weights(cache.model, BF16))
    assert others == total - experts


@pytest.mark.parametrize(
    ("fmt", "bits_per_value"), [("bf16", 16), ("fp8", 8 + 8 / 128**2), ("fp4", 4 + 8 / 32)]
)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_an_expert_of_v4_flash(fmt, bits_per_value, tp):
    weights = expert_weights(V4_FLASH, WEIGHT_FORMATS[fmt])
    values = 3 * 2048 * 4096 / tp
    assert sum(w.shard(tp).nbytes for w in weights.values()) == values * bits_per_value / 8
    assert weights["w1"].shard(tp).n_out == weights["w2"].shard(tp).n_in == 2048 // tp


@pytest.mark.parametrize("fmt", list(WEIGHT_FORMATS))
def test_odd_sizes_round_up_to_whole_codes_and_scales(fmt):
    """A torch tensor of each listed shape has the bytes that the format counts."""
    weight_format = WEIGHT_FORMATS[fmt]
    tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in weight_format.tensors(130, 33)]
    codes, *scales = (tensor.nbytes for tensor in tensors)
    assert codes == {"bf16": 130 * 33 * 2, "fp8": 130 * 33, "fp4": 130 * 17}[fmt]
    assert scales == {"bf16": [], "fp8": [2], "fp4": [130 * 2]}[fmt]
    assert weight_format.nbytes(130, 33) == codes + sum(scales)


def test_ranks_divide_what_is_split_and_copy_the_rest():
    for weight in other_weights(V4_FLASH, BF16):
        copies = 4 if weight.split is None else 1
        assert 4 * weight.shard(4).nbytes == copies * weight.nbytes


@pytest.mark.parametrize("tp", [0, 4, 3])
def test_a_size_that_does_not_divide_the_model(tp):
    with pytest.raises(ConfigError, match=rf"found a tensor-parallel size of {tp}; 'tiny' has"):
        check_tp(TINY, tp)
