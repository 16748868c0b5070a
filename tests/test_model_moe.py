"""The mixture of experts in both formulations, in hash layers and in scored ones."""

from dataclasses import replace

import pytest
import torch
from model_steps import worst

from fp8kv_inductor.config import CacheConfig
from fp8kv_inductor.model_config import TINY
from fp8kv_inductor.models.deepseek_v4 import DeepseekV4, load_weights, random_weights
from fp8kv_inductor.models.deepseek_v4.dense import DenseReference

FEW = replace(TINY, compress_ratios=(0, 0), dim=64, moe_inter_dim=32, vocab_size=32)
MANY = replace(FEW, n_routed_experts=48, n_activated_experts=6)


@pytest.mark.parametrize("layer", [0, 1], ids=["hash", "scored"])
@pytest.mark.parametrize("tokens", [0, 1, 7, 8, 50])
@pytest.mark.parametrize("config", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("size", [1.0, 30.0], ids=["plain", "clamped"])
def test_against_the_oracle(config, tokens, layer, size):
    weights = random_weights(config, 0, torch.float32)
    model = DeepseekV4(CacheConfig.resolve(config, "auto", "cpu"), torch.float32)
    load_weights(model, weights)
    x = torch.randn(50, config.dim) * size
    ids = torch.randint(config.vocab_size, (50,))
    expected, exact = (
        DenseReference(config, weights, dtype).mixture_of_experts(x.to(dtype), ids, layer)
        for dtype in (torch.float32, torch.float64)
    )
    actual = model.layers[layer].ffn(x[:tokens], ids[:tokens])
    assert actual.shape == (tokens, config.dim)
    if tokens:
        assert worst(actual, exact[:tokens]) <= 2 * worst(expected, exact)


def test_bias_selects_but_does_not_weigh():
    model = DeepseekV4(CacheConfig.resolve(FEW, "auto", "cpu"), torch.float32)
    load_weights(model, random_weights(FEW, 0, torch.float32))
    gate = model.layers[1].ffn.gate
    x, ids = torch.randn(20, FEW.dim), torch.zeros(20, dtype=torch.int64)
    gate.bias.zero_()
    gate.bias[5] = 1e3
    chosen, weights = gate(x, ids)
    assert (chosen == 5).sum() == 20
    torch.testing.assert_close(weights.sum(1), torch.full((20,), FEW.route_scale))
    assert weights.max() < 0.99 * FEW.route_scale
