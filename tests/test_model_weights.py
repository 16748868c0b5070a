"""Weight names, shapes, files and errors."""

import pytest
import torch
from safetensors.torch import save_file

from fp8kv_inductor.config import CacheConfig
from fp8kv_inductor.formats import get_format
from fp8kv_inductor.model_config import TINY, V4_FLASH, V4_PRO, ModelConfig
from fp8kv_inductor.models.deepseek_v4 import (
    DeepseekV4,
    draw_weights,
    load_safetensors,
    load_weights,
    random_weights,
    reference_weights,
    save_safetensors,
)
from fp8kv_inductor.models.deepseek_v4.weights import shard_axis
from fp8kv_inductor.parallel import SINGLE, Parallel


def model_on(device: str, config: ModelConfig = TINY, dtype=torch.bfloat16) -> DeepseekV4:
    return DeepseekV4(CacheConfig(config, "auto", torch.device(device), get_format("bf16")), dtype)


@pytest.fixture(scope="module")
def weights():
    return random_weights(TINY, 0)


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {name: tuple(w.shape) for name, w in reference_weights(model_on("meta", config)).items()}


def test_v4_flash_shapes():
    names = shapes(V4_FLASH)
    expected = {
        "embed.weight": (129280, 4096),
        "head.weight": (129280, 4096),
        "norm.weight": (4096,),
        "hc_head_fn": (4, 16384),
        "hc_head_base": (4,),
        "hc_head_scale": (1,),
        "layers.0.hc_attn_fn": (24, 16384),
        "layers.0.hc_ffn_base": (24,),
        "layers.0.hc_ffn_scale": (3,),
        "layers.0.attn.wq_a.weight": (1024, 4096),
        "layers.0.attn.q_norm.weight": (1024,),
        "layers.0.attn.wq_b.weight": (32768, 1024),
        "layers.0.attn.wkv.weight": (512, 4096),
        "layers.0.attn.kv_norm.weight": (512,),
        "layers.0.attn.attn_sink": (64,),
        "layers.0.attn.wo_a.weight": (8192, 4096),
        "layers.0.attn.wo_b.weight": (4096, 8192),
        "layers.2.attn.compressor.ape": (4, 1024),
        "layers.2.attn.compressor.wkv.weight": (1024, 4096),
        "layers.2.attn.compressor.wgate.weight": (1024, 4096),
        "layers.2.attn.compressor.norm.weight": (512,),
        "layers.2.attn.indexer.wq_b.weight": (8192, 1024),
        "layers.2.attn.indexer.weights_proj.weight": (64, 4096),
        "layers.2.attn.indexer.compressor.ape": (4, 256),
        "layers.2.attn.indexer.compressor.wkv.weight": (256, 4096),
        "layers.2.attn.indexer.compressor.norm.weight": (128,),
        "layers.3.attn.compressor.ape": (128, 512),
        "layers.3.attn.compressor.wgate.weight": (512, 4096),
        "layers.2.ffn.gate.tid2eid": (129280, 6),
        "layers.3.ffn.gate.bias": (256,),
        "layers.3.ffn.gate.weight": (256, 4096),
        "layers.42.ffn.experts.255.w1.weight": (2048, 4096),
        "layers.42.ffn.experts.255.w2.weight": (4096, 2048),
        "layers.42.ffn.experts.255.w3.weight": (2048, 4096),
        "layers.42.ffn.shared_experts.w2.weight": (4096, 2048),
    }
    assert {name: names.get(name) for name in expected} == expected
    for absent in (
        "layers.0.attn.compressor.ape",
        "layers.3.attn.indexer.wq_b.weight",
        "layers.2.ffn.gate.bias",
        "layers.3.ffn.gate.tid2eid",
        "layers.43.attn_norm.weight",
    ):
        assert absent not in names


@pytest.mark.parametrize(
    ("config", "billions", "active"),
    [(V4_FLASH, 284, 13), (V4_PRO, 1600, 49)],
    ids=["flash", "pro"],
)
def test_parameter_counts(config, billions, active):
    """The published sizes of the models, total and per token (its one embedding row aside)."""
    sizes = {
        name: w.numel()
        for name, w in reference_weights(model_on("meta", config)).items()
        if not name.endswith("tid2eid")
    }
    routed = sum(size for name, size in sizes.items() if ".experts." in name)
    unused = routed * (1 - config.n_activated_experts / config.n_routed_experts)
    total = sum(sizes.values())
    assert total == pytest.approx(billions * 1e9, rel=0.02)
    assert total - unused - sizes["embed.weight"] == pytest.approx(active * 1e9, rel=0.03)


def test_random_weights_depend_on_the_seed_only(weights):
    again, other = random_weights(TINY, 0), random_weights(TINY, 1)
    assert weights.keys() == again.keys()
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert not any(torch.equal(weights[name], other[name]) for name in weights)


def test_random_weights_use_every_mechanism(weights):
    """Nothing is left at a value that would switch a mechanism off."""
    for name, weight in weights.items():
        assert weight.count_nonzero() > 0, name
        assert weight.numel() == 1 or weight.float().std() > 0, name
    table = weights["layers.0.ffn.gate.tid2eid"]
    assert all(len(set(row)) == TINY.n_activated_experts for row in table.tolist())
    assert table.max() == TINY.n_routed_experts - 1


def test_dtypes(weights):
    """Linear weights are bf16; accumulating parts are fp32."""
    full = {name for name, weight in weights.items() if weight.dtype == torch.float32}
    assert "layers.1.attn.compressor.wkv.weight" in full
    assert "layers.1.ffn.gate.weight" in full
    assert "head.weight" in full
    assert weights["layers.1.attn.wq_a.weight"].dtype == torch.bfloat16
    assert weights["layers.1.ffn.experts.0.w2.weight"].dtype == torch.bfloat16


def test_round_trip_through_a_file(weights, tmp_path):
    first, second = model_on("cpu"), model_on("cpu")
    load_weights(first, weights)
    save_safetensors(first, tmp_path / "model.safetensors")
    load_safetensors(second, tmp_path / "model.safetensors")
    for name, weight in reference_weights(second).items():
        assert torch.equal(weight, weights[name]), name


def test_folder_of_shards(weights, tmp_path):
    names = sorted(weights)
    for shard in range(3):
        part = {name: weights[name] for name in names[shard::3]}
        save_file(part, tmp_path / f"model-{shard}.safetensors")
    model = model_on("cpu")
    load_safetensors(model, tmp_path)
    assert torch.equal(
        model.layers[1].ffn.experts.w2[3].T, weights["layers.1.ffn.experts.3.w2.weight"]
    )


def test_empty_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no \.safetensors file"):
        load_safetensors(model_on("meta"), tmp_path)


def test_dtypes_are_converted(weights):
    model = model_on("cpu")
    load_weights(model, {name: weight.to(torch.float32) for name, weight in weights.items()})
    assert torch.equal(model.embed.weight, weights["embed.weight"])


def test_multi_token_prediction_is_ignored(weights):
    load_weights(model_on("cpu"), {**weights, "mtp.0.norm.weight": torch.ones(3)})


def test_one_error_names_all_problems(weights):
    wrong = dict(weights)
    del wrong["layers.0.attn.attn_sink"]
    wrong["layers.0.attn.wq_a.scale"] = torch.ones(1)
    wrong["norm.weight"] = torch.ones(7)
    model = model_on("cpu")
    load_weights(model, weights)
    with pytest.raises(ValueError) as error:
        load_weights(model, wrong)
    message = str(error.value)
    assert "1 missing (layers.0.attn.attn_sink)" in message
    assert "1 unknown (layers.0.attn.wq_a.scale)" in message
    assert "norm.weight (7,), needed (128,)" in message
    assert torch.equal(model.norm.weight, weights["norm.weight"]), "a failed load changes nothing"


def drawn(seed: int, parallel: Parallel = SINGLE) -> dict[str, torch.Tensor]:
    cache = CacheConfig(TINY, "auto", torch.device("cpu"), get_format("bf16"))
    model = DeepseekV4(cache, parallel=parallel)
    for tensor in model.state_dict().values():
        tensor.fill_(torch.nan if tensor.is_floating_point() else -1)
    draw_weights(model, seed)
    return reference_weights(model)


def test_drawn_weights_fill_the_model_alike_for_the_same_seed(weights):
    first, again, other = drawn(3), drawn(3), drawn(4)
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]) and not torch.equal(tensor, other[name])
        assert tensor.isfinite().all()
        # Of the same size as those that random_weights makes.
        if tensor.is_floating_point() and tensor.numel() > 1000:
            expected = weights[name].float().std().item()
            assert tensor.float().std().item() == pytest.approx(expected, rel=0.2)


def test_ranks_draw_the_same_whole_weights_and_other_shards():
    ranks = [drawn(3, Parallel(rank, 2)) for rank in range(2)]
    for name, tensor in ranks[0].items():
        assert torch.equal(tensor, ranks[1][name]) == (shard_axis(name) is None)
