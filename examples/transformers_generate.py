"""transformers' DeepSeek-V4 on fp8 pools: ``generate()`` before and after one call.

    pip install 'fp8kv_inductor[hf]' && python examples/transformers_generate.py

A small model with random weights; a checkpoint comes from ``from_pretrained`` instead.
"""

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from fp8kv_inductor.integrations import hf


def main() -> None:
    torch.manual_seed(0)
    config = DeepseekV4Config(
        vocab_size=64,
        hidden_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=128,
        q_lora_rank=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        compress_ratios=[0, 128],
        num_hash_layers=0,
        o_groups=2,
        o_lora_rank=32,
        partial_rotary_factor=0.5,
        max_position_embeddings=1024,
        attn_implementation="eager",
    )
    model = DeepseekV4ForCausalLM(config).eval()
    prompts = torch.randint(1, 64, (2, 20))
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    mask = torch.ones_like(prompts)
    before = model.generate(prompts, attention_mask=mask, **options)

    # compile=True, the default, compiles prefill and decode into a graph each.
    hf.patch(model, kv_cache_dtype="fp8_e4m3", max_batch=2, max_len=256, compile=False)
    after = model.generate(prompts, attention_mask=mask, **options)
    hf.unpatch(model)
    equal = (before == after)[:, 20:].float().mean()
    print(
        f"{after.shape[0]} sequences of {after.shape[1]} tokens; {equal:.0%} of the new as before"
    )


if __name__ == "__main__":
    main()
