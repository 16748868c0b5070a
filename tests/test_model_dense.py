"""The paged graph against the dense oracle, through prefill, chunks, decode and padding.

Bounds: twice the error that fp32 arithmetic makes in the oracle itself, measured against fp64, with
the weights as they are and with every weight moved by up to an ulp. Without the model's rounding
steps that is about 1e-3, from bf16 rows and keys that fall the other way. With them it is the
effect of an fp8 or fp4 code, of an expert or of a pick that does; few tokens see the worst of it,
so over a long sequence the median has a bound of its own.
"""

from dataclasses import replace

import pytest
import torch
from model_steps import Oracle, Requests, decode_step, paged_model, per_token

from fp8kv_inductor.model_config import TINY
from fp8kv_inductor.models.deepseek_v4 import random_weights

CONFIG = replace(
    TINY,
    dim=64,
    compress_ratios=(0, 4, 128),
    q_lora_rank=32,
    o_lora_rank=32,
    index_topk=16,
    moe_inter_dim=64,
    vocab_size=64,
    original_seq_len=256,
)
RATIOS = (4, 128)
PROMPT = 150
DECODED = 310
PAGES = -(-(PROMPT + DECODED) // 128)


@pytest.fixture(scope="module")
def weights():
    return random_weights(CONFIG, 0, torch.float32)


def some_tokens(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(CONFIG.vocab_size, (n,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("kv_format", "rounding"), [("bf16", False), ("bf16", True), ("fp8_e4m3", True)]
)
@torch.no_grad()
def test_prefill_and_decode(weights, kv_format, rounding):
    """310 decode steps over the window ring and three blocks of 128, after a prompt."""
    tokens = some_tokens(PROMPT + DECODED)
    model = paged_model(CONFIG, weights, kv_format, PAGES, rounding=rounding)
    requests = Requests(1, PAGES)
    logits = [model(requests.step({0: tokens[:PROMPT]}, RATIOS))]
    for token in tokens[PROMPT:]:
        logits.append(model(decode_step(requests.step({0: token[None]}, RATIOS))))
    oracle = Oracle(CONFIG, weights, tokens, kv_format, rounding)
    distance = per_token(torch.cat(logits), oracle.exact)
    assert distance.max() <= oracle.worst
    assert distance.median() <= oracle.median


@torch.no_grad()
def test_ragged_prefill_in_chunks_with_padding(weights):
    """Three requests in one batch, one of them shorter than a group; then more of each."""
    sequences = [some_tokens(n, seed) for seed, n in enumerate((270, 133, 20))]
    chunks = [(137, 3, 2), (5, 128, 1), (128, 0, 17), (0, 2, 0)]
    model = paged_model(CONFIG, weights, "bf16", 3 * 3, rounding=False)
    requests = Requests(3, 3)
    logits: list[list[torch.Tensor]] = [[], [], []]
    for chunk in chunks:
        new = {
            request: sequences[request][(start := requests.lengths[request]) : start + count]
            for request, count in enumerate(chunk)
            if count
        }
        batch = requests.step(new, RATIOS, padding=3)
        parts = model(batch).split([len(part) for part in new.values()])
        for request, part in zip(new, parts, strict=True):
            logits[request].append(part)
    for sequence, parts in zip(sequences, logits, strict=True):
        oracle = Oracle(CONFIG, weights, sequence, "bf16", False)
        assert per_token(torch.cat(parts), oracle.exact).max() <= oracle.worst


@torch.no_grad()
def test_padding_is_not_stored(weights):
    """A step of padding only leaves every pool as it was, and finite logits."""
    model = paged_model(CONFIG, weights, "fp8_e4m3", 2)
    requests = Requests(1, 2)
    model(requests.step({0: some_tokens(9)}, RATIOS))
    before = [buffer.clone() for buffer in model.pools.buffers()]
    batch = requests.step({}, RATIOS, padding=4)._replace(last=torch.arange(4))
    assert model(decode_step(batch)).isfinite().all()
    for old, new in zip(before, model.pools.buffers(), strict=True):
        assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))


@torch.no_grad()
def test_decode_batch_of_unequal_requests(weights):
    """Requests at different positions decode together as they would alone."""
    sequences = [some_tokens(n, seed) for seed, n in enumerate((131, 127, 3))]
    together = paged_model(CONFIG, weights, "bf16", 6, rounding=False)
    requests = Requests(3, 2)
    together(requests.step({r: s[:-1] for r, s in enumerate(sequences)}, RATIOS))
    last = {r: s[-1:] for r, s in enumerate(sequences)}
    logits = together(decode_step(requests.step(last, RATIOS)))
    for sequence, row in zip(sequences, logits, strict=True):
        oracle = Oracle(CONFIG, weights, sequence, "bf16", False)
        assert per_token(row, oracle.exact[-1]) <= oracle.worst


def test_bind_refuses_other_pools(weights):
    model = paged_model(CONFIG, weights, "bf16", 1)
    other = paged_model(CONFIG, weights, "fp8_e4m3", 1)
    with pytest.raises(ValueError, match="plan the pools with the model's CacheConfig"):
        model.bind(other.pools)
