"""The indexer's rounding steps and its picks."""

from dataclasses import replace

import pytest
import torch
from model_steps import Requests, paged_model

from fp8kv_inductor.model_config import TINY
from fp8kv_inductor.models.deepseek_v4 import indexer, random_weights
from fp8kv_inductor.models.deepseek_v4.dense import fp4_round_trip, hadamard_transform
from fp8kv_inductor.models.deepseek_v4.step import prepare

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@pytest.mark.parametrize("exponent", [-100, -20, 0, 1, 100])
def test_fp4_values_midpoints_and_their_neighbours(exponent):
    """Values stay, midpoints go to the even code, and an ulp beside a midpoint decides."""
    middle = (VALUES[1:] + VALUES[:-1]) / 2
    even = torch.where(torch.arange(7) % 2 == 0, VALUES[:-1], VALUES[1:])
    up, down = (torch.nextafter(middle, torch.tensor(limit)) for limit in (7.0, 0.0))
    x = torch.cat([VALUES, middle, up[:-1], down, torch.tensor([6.0, 0.0, 0.0, 0.0])])
    y = torch.cat([VALUES, even, VALUES[1:-1], VALUES[:-1], torch.tensor([6.0, 0.0, 0.0, 0.0])])
    scale = 2.0**exponent
    rows = torch.stack([x, -x]) * scale
    assert torch.equal(indexer.fp4_quant(rows), torch.stack([y, -y]) * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp4_equals_the_oracle(dtype):
    x = (torch.randn(2000, 128) * torch.randn(2000, 1).mul(8).exp()).to(dtype)
    x[0] = 0
    assert torch.equal(indexer.fp4_quant(x), fp4_round_trip(x))


def test_hadamard_is_sylvesters():
    matrix = indexer.hadamard(128)
    x = torch.randn(5, 128, dtype=torch.float64)
    torch.testing.assert_close(x @ matrix.double() * 128**-0.5, hadamard_transform(x))
    assert torch.equal(matrix @ matrix, 128 * torch.eye(128))


@torch.no_grad()
def test_live_picks_are_a_prefix_of_the_requests_rows():
    """Every pick lies on a page of its request, below the count, and none comes twice."""
    config = replace(TINY, compress_ratios=(4,), n_hash_layers=0)
    model = paged_model(config, random_weights(config, 0, torch.float32), "bf16", 4)
    requests = Requests(2, 2)
    tokens = torch.randint(config.vocab_size, (180,))
    batch = requests.step({0: tokens, 1: tokens[:70]}, (4,), padding=2)
    model(batch)
    step = prepare(batch, config, model.rotary)
    n = len(batch.tokens)
    picks = model.layers[0].attn.indexer(
        torch.randn(n, config.dim),
        torch.randn(n, config.q_lora_rank),
        batch.positions,
        batch.request,
        step.rope(4),
        step.ratios[4],
        model.pools.layers[0],
    )
    assert picks.shape == (n, min(config.index_topk, 2 * 32))
    for token, row in enumerate(picks.tolist()):
        count = min(int(step.ratios[4].counts[token]), config.index_topk)
        pages = requests.page_table[batch.request[token]]
        rows = [int(page) * 32 + i for page in pages for i in range(32)]
        live = row[:count]
        assert len(set(live)) == count
        assert set(live) <= set(rows[: int(step.ratios[4].counts[token])])
        assert row[count:] == [-1] * (len(row) - count)
