"""A model that reads bytes and is small enough to train and to evaluate in a test."""

from dataclasses import replace

from fp8kv_inductor.model_config import TINY

READER = replace(
    TINY,
    name="reader",
    dim=64,
    q_lora_rank=32,
    o_lora_rank=32,
    n_routed_experts=4,
    moe_inter_dim=32,
    index_topk=16,
    hc_sinkhorn_iters=4,
    original_seq_len=256,
)
