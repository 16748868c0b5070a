"""The graph against an implementation that nobody here wrote: transformers' DeepSeek-V4.

It has no fp8 and fp4 round trips, so those are switched off here. Its loader maps the reference's
names, so the names of our weights are checked as well.
"""

from dataclasses import replace

import pytest
import torch
from model_steps import Requests, paged_model, worst

from fp8kv_inductor.formats import get_format
from fp8kv_inductor.model_config import TINY, ModelConfig
from fp8kv_inductor.models.deepseek_v4 import random_weights
from fp8kv_inductor.models.deepseek_v4.dense import DenseReference

transformers = pytest.importorskip("transformers", reason="the oracle is transformers' model")

CONFIG = replace(
    TINY,
    dim=64,
    compress_ratios=(0, 4, 128),
    index_n_heads=32,  # With fewer, all relu(q . k) of a key may be 0, and equal scores tie.
    index_topk=16,
    moe_inter_dim=64,
    vocab_size=64,
    original_seq_len=256,
)
TOKENS = 400


def hugging_face_config(config: ModelConfig):
    return transformers.DeepseekV4Config(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        moe_intermediate_size=config.moe_inter_dim,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        head_dim=config.head_dim,
        qk_rope_head_dim=config.rope_head_dim,
        q_lora_rank=config.q_lora_rank,
        num_experts_per_tok=config.n_activated_experts,
        n_routed_experts=config.n_routed_experts,
        routed_scaling_factor=config.route_scale,
        max_position_embeddings=config.max_seq_len,
        compress_ratios=list(config.compress_ratios),
        num_hash_layers=config.n_hash_layers,
        o_groups=config.o_groups,
        o_lora_rank=config.o_lora_rank,
        index_n_heads=config.index_n_heads,
        index_head_dim=config.index_head_dim,
        index_topk=config.index_topk,
        rope_parameters={
            "rope_type": "yarn",
            "factor": config.rope_factor,
            "beta_fast": config.beta_fast,
            "beta_slow": config.beta_slow,
            "original_max_position_embeddings": config.original_seq_len,
        },
    )


@pytest.fixture(scope="module")
def weights():
    return random_weights(CONFIG, 1, torch.float32)


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(CONFIG.vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def theirs(weights, tokens):
    """Logits of transformers' model, fp32."""
    model, loading = transformers.DeepseekV4ForCausalLM.from_pretrained(
        None,
        config=hugging_face_config(CONFIG),
        state_dict=dict(weights),
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="batched_mm",
        output_loading_info=True,
    )
    assert not any(loading.values()), loading
    with torch.no_grad():
        return model.eval()(tokens[None]).logits[0]


def dense(weights, tokens, dtype, idx_format=None):
    return DenseReference(CONFIG, weights, dtype, rounding=False, idx_format=idx_format).forward(
        tokens
    )


def test_config_is_read_back():
    assert ModelConfig.from_any(hugging_face_config(CONFIG)) == replace(CONFIG, name="deepseek_v4")


def test_dense_reference(weights, tokens, theirs):
    ours = dense(weights, tokens, torch.float32)
    exact = dense(weights, tokens, torch.float64)
    assert worst(ours, theirs) <= 2 * worst(ours, exact)


@torch.no_grad()
def test_paged_model(weights, tokens, theirs):
    """fp32 pools; index keys stay bf16, so queries count until a key's rounding moves a pick."""
    pages = -(-TOKENS // 128)
    model = paged_model(CONFIG, weights, "fp32", pages, rounding=False)
    paged = model(Requests(1, pages).step({0: tokens}, (4, 128)))
    exact = dense(weights, tokens, torch.float64)
    bound = 2 * worst(dense(weights, tokens, torch.float32), exact)

    rounded_keys = dense(weights, tokens, torch.float64, get_format("bf16"))
    moved = (rounded_keys - exact).abs().amax(-1) > bound
    unmoved = ~moved
    assert worst(paged, rounded_keys) <= bound
    assert unmoved.sum() > CONFIG.index_topk * 4, "no query selects rows any more"
    assert worst(paged[unmoved], theirs[unmoved]) <= 2 * bound
