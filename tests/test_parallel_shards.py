"""What the ranks have and compute adds up to the model, for ranks that are threads of one process.

In fp32, without the model's rounding steps. Bounds: twice the error of fp32 arithmetic in the dense
oracle against fp64.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Barrier

import pytest
import torch
from engine_small import SMALL
from model_steps import Oracle, Requests, decode_step, paged_model, per_token, worst

from fp8kv_inductor.config import CacheConfig, ConfigError
from fp8kv_inductor.models.deepseek_v4 import (
    DeepseekV4,
    load_weights,
    random_weights,
    reference_weights,
    save_safetensors,
)
from fp8kv_inductor.models.deepseek_v4.dense import DenseReference
from fp8kv_inductor.models.deepseek_v4.step import prepare
from fp8kv_inductor.models.deepseek_v4.weights import shard_axis
from fp8kv_inductor.parallel import Parallel

CONFIG = replace(SMALL, o_groups=4)
MANY_EXPERTS = replace(CONFIG, n_routed_experts=48, n_activated_experts=6)
WORLD_SIZES = (1, 2, 4)
RATIOS = (4, 128)
PROMPT = 122
TOKENS = torch.randint(CONFIG.vocab_size, (134,), generator=torch.Generator().manual_seed(0))


class Part(Parallel):
    """A rank that keeps its part of every sum."""

    def all_reduce(self, x):
        return x


class Meeting:
    """Where threads exchange tensors."""

    def __init__(self, world_size):
        self.barrier = Barrier(world_size, timeout=60)
        self.parts = [None] * world_size


@dataclass(frozen=True)
class Thread(Parallel):
    """A rank that is a thread of this process."""

    meeting: Meeting = field(kw_only=True)

    def exchange(self, x):
        self.meeting.parts[self.rank] = x
        self.meeting.barrier.wait()
        parts = list(self.meeting.parts)
        self.meeting.barrier.wait()
        return parts

    def all_reduce(self, x):
        return torch.stack(self.exchange(x)).sum(0)

    def all_gather(self, x):
        return torch.cat(self.exchange(x), -1)


def make_ranks(world_size, config=CONFIG, kind=Part, **kwargs):
    weights = random_weights(config, 0, torch.float32)
    return [
        paged_model(
            config,
            weights,
            "bf16",
            n_pages=2,
            rounding=False,
            parallel=kind(rank, world_size, **kwargs),
        )
        for rank in range(world_size)
    ]


def oracles(config):
    weights = random_weights(config, 0, torch.float32)
    return [
        DenseReference(config, weights, t, rounding=False) for t in (torch.float32, torch.double)
    ]


def assert_adds_up(parts, whole, bound):
    assert worst(sum(part.double() for part in parts), whole) <= bound
    assert worst(sum(part.double() for part in parts[1:]) + 0 * parts[0], whole) > bound


@pytest.mark.parametrize("layer", range(len(CONFIG.compress_ratios)))
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_attention_adds_up(world_size, layer):
    def attend(model):
        step = prepare(Requests(1, 2).step({0: TOKENS}, RATIOS), CONFIG, model.rotary)
        return model.layers[layer].attn(x, step, model.pools.layers[layer])

    x = torch.randn(len(TOKENS), CONFIG.dim)
    rough, exact = (oracle.attention(x.to(oracle.dtype), layer) for oracle in oracles(CONFIG))
    (whole,) = map(attend, make_ranks(1))
    assert_adds_up(list(map(attend, make_ranks(world_size))), whole, 2 * worst(rough, exact))


@pytest.mark.parametrize("layer", [0, 1], ids=["hash", "scored"])
@pytest.mark.parametrize("tokens", [2, 50])
@pytest.mark.parametrize("config", [CONFIG, MANY_EXPERTS], ids=["few", "many"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_experts_add_up(world_size, config, tokens, layer):
    x, ids = torch.randn(tokens, config.dim), TOKENS[:tokens]
    rough, exact = (
        oracle.mixture_of_experts(x.to(oracle.dtype), ids, layer) for oracle in oracles(config)
    )
    parts = [model.layers[layer].ffn(x, ids) for model in make_ranks(world_size, config)]
    assert_adds_up(parts, exact, 2 * worst(rough, exact))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_prefill_and_decode(world_size):
    """The whole model: every rank has the same logits, those of the dense oracle."""

    def run(model):
        requests = Requests(1, 2)
        logits = [model(requests.step({0: TOKENS[:PROMPT]}, RATIOS))]
        for token in TOKENS[PROMPT:]:
            logits.append(model(decode_step(requests.step({0: token[None]}, RATIOS))))
        return torch.cat(logits)

    ranks = make_ranks(world_size, kind=Thread, meeting=Meeting(world_size))
    with ThreadPoolExecutor(world_size) as threads:
        logits = list(threads.map(run, ranks))
    assert all(torch.equal(each, logits[0]) for each in logits)
    weights = random_weights(CONFIG, 0, torch.float32)
    oracle = Oracle(CONFIG, weights, TOKENS, "bf16", rounding=False)
    assert per_token(logits[0], oracle.exact).max() <= oracle.worst


def test_shards_join_to_the_whole_weights():
    whole = random_weights(CONFIG, 0, torch.float32)
    ranks = [reference_weights(model) for model in make_ranks(4)]
    for name, weight in whole.items():
        shards = [rank[name] for rank in ranks]
        axis = shard_axis(name)
        if axis is None:
            assert all(torch.equal(shard, weight) for shard in shards), name
        else:
            assert torch.equal(torch.cat(shards, axis), weight), name


def test_replicated_weights_are_those_that_make_rows_and_picks():
    names = {name.split(".", 2)[-1] for name in random_weights(CONFIG, 0) if "layers.1." in name}
    divided = {name for name in names if shard_axis("layers.1." + name) is not None}
    assert {name for name in divided if name.startswith("attn")} == {
        "attn.attn_sink",
        "attn.wq_b.weight",
        "attn.wo_a.weight",
        "attn.wo_b.weight",
    }
    assert not any("gate" in name or "indexer" in name or "hc_" in name for name in divided)


def test_whole_weights_of_another_shape_are_refused():
    (model, *_) = make_ranks(2)
    weights = random_weights(CONFIG, 0, torch.float32)
    weights["layers.0.attn.wo_b.weight"] = weights["layers.0.attn.wo_b.weight"][:, :-1]
    with pytest.raises(ValueError, match=r"wo_b.weight \(64, 127\), needed \(64, 128\)"):
        load_weights(model, weights)


def test_shards_are_not_saved_as_a_model(tmp_path):
    with pytest.raises(ConfigError, match="found the shards of rank 0 of 2"):
        save_safetensors(make_ranks(2)[0], tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "size"), [("n_heads", 6), ("o_groups", 2), ("moe_inter_dim", 90), ("vocab_size", 66)]
)
def test_uneven_parts_are_refused(name, size):
    config = replace(CONFIG, **{name: size})
    cache = CacheConfig.resolve(config, "auto", "meta")
    with pytest.raises(ConfigError, match=rf"found world size 4 and {name}={size} .*; use 1 or 2"):
        DeepseekV4(cache, parallel=Parallel(0, 4))
