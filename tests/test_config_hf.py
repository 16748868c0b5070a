"""Hugging Face configurations become the same ModelConfig as the presets."""

from dataclasses import fields, replace

import pytest
import torch
from transformers import DeepseekV4Config, LlamaConfig

from fp8kv_inductor import CacheConfig, ConfigError
from fp8kv_inductor.model_config import TINY, V4_FLASH, ModelConfig

YARN = {
    "rope_type": "yarn",
    "factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 65536,
}


def hf_config(model: ModelConfig) -> DeepseekV4Config:
    """``model`` in the words of transformers."""
    return DeepseekV4Config(
        vocab_size=model.vocab_size,
        hidden_size=model.dim,
        moe_intermediate_size=model.moe_inter_dim,
        num_hidden_layers=model.n_layers,
        num_attention_heads=model.n_heads,
        head_dim=model.head_dim,
        q_lora_rank=model.q_lora_rank,
        num_experts_per_tok=model.n_activated_experts,
        n_routed_experts=model.n_routed_experts,
        routed_scaling_factor=model.route_scale,
        max_position_embeddings=model.max_seq_len,
        compress_ratios=[*model.compress_ratios],
        qk_rope_head_dim=model.rope_head_dim,
        num_hash_layers=model.n_hash_layers,
        o_groups=model.o_groups,
        o_lora_rank=model.o_lora_rank,
        index_n_heads=model.index_n_heads,
        index_head_dim=model.index_head_dim,
        index_topk=model.index_topk,
        rope_scaling=YARN,
    )


@pytest.mark.parametrize("model", [V4_FLASH, TINY], ids=lambda model: model.name)
@pytest.mark.parametrize("form", ["config", "dict"])
def test_mapped_field_by_field(model, form):
    config = hf_config(model)
    assert config.rope_parameters["compress"]["rope_type"] == "yarn"
    cache = CacheConfig.resolve(config if form == "config" else config.to_dict(), "fp8_e4m3", "cpu")
    assert replace(cache.model, name=model.name) == model


def test_rope_parameters_are_read_from_where_transformers_keeps_them():
    config = hf_config(TINY)
    config.rope_parameters["compress"] |= {
        "rope_theta": 5e4,
        "factor": 4.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "original_max_position_embeddings": 1024,
    }
    config.rope_theta, config.compress_rope_theta = 2e4, 5e4
    model = ModelConfig.from_any(config)
    assert (model.rope_theta, model.compress_rope_theta) == (2e4, 5e4)
    assert (model.rope_factor, model.original_seq_len) == (4.0, 1024)
    assert (model.beta_fast, model.beta_slow) == (16.0, 2.0)


def test_without_yarn():
    assert ModelConfig.from_any(DeepseekV4Config()).rope_factor == 1.0


def test_a_published_config_file():
    """config.json of V4-Flash: the reference's ratios, with one more entry for the MTP layer."""
    values = hf_config(V4_FLASH).to_dict()
    for name in ("layer_types", "compress_rates", "mlp_layer_types", "rope_parameters"):
        del values[name]
    values |= {
        "compress_ratios": [*V4_FLASH.compress_ratios, 0],
        "num_hash_layers": 3,
        "rope_scaling": {**YARN, "type": "yarn"},
    }
    assert replace(ModelConfig.from_any(values), name=V4_FLASH.name) == V4_FLASH


def test_a_module_with_a_config():
    module = torch.nn.Module()
    module.config = hf_config(TINY)
    assert replace(ModelConfig.from_any(module), name=TINY.name) == TINY


def test_another_architecture():
    with pytest.raises(ConfigError, match=r"found a configuration of model_type 'llama'"):
        CacheConfig.resolve(LlamaConfig(), "auto", "cpu")


def test_every_field_of_the_preset_is_covered():
    """A field that all models share could be mapped wrongly and not be seen above."""
    different = {
        field.name
        for field in fields(ModelConfig)
        if getattr(V4_FLASH, field.name) != getattr(TINY, field.name)
    }
    assert {"dim", "n_heads", "q_lora_rank", "compress_ratios", "index_topk"} <= different
