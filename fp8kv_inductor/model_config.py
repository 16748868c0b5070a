"""Shapes of the DeepSeek-V4 family: V4-Flash, V4-Pro, and two small ones for two CPU cores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

HF_MODEL_TYPE = "deepseek_v4"


@dataclass(frozen=True)
class ModelConfig:
    """A DSV4 model. Field names are those of the public reference."""

    name: str
    dim: int
    n_heads: int
    head_dim: int
    rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    window_size: int
    compress_ratios: tuple[int, ...]
    """Per layer: 0 (window only), 4 (overlapping groups, indexer) or 128."""
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    n_activated_experts: int
    moe_inter_dim: int
    route_scale: float
    vocab_size: int
    max_seq_len: int
    n_shared_experts: int = 1
    n_hash_layers: int = 3
    swiglu_limit: float = 10.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_factor: float = 16.0
    """YaRN factor of layers with a compressor; 1 switches YaRN off."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_seq_len: int = 65536

    @property
    def n_layers(self) -> int:
        """Number of backbone layers."""
        return len(self.compress_ratios)

    @property
    def ratios(self) -> list[int]:
        """The ratios that compress, each once, in ascending order."""
        return sorted(set(self.compress_ratios) - {0})

    @property
    def nope_head_dim(self) -> int:
        """Leading features of a KV row that ``act_quant`` rounds."""
        return self.head_dim - self.rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Factor of the attention's dot products."""
        return self.head_dim**-0.5

    def has_indexer(self, ratio: int) -> bool:
        """Only ratio-4 layers select rows; the others read all compressed rows."""
        return ratio == OVERLAP_RATIO

    def overlap(self, ratio: int) -> int:
        """1 if neighbouring groups overlap (ratio 4), else 0."""
        return int(ratio == OVERLAP_RATIO)

    def state_width(self, ratio: int, width: int) -> int:
        """Elements of a compressor-state row: kv and score, `1 + overlap` times ``width`` each."""
        return 2 * (1 + self.overlap(ratio)) * width

    def state_ring(self, ratio: int) -> int:
        """State rows per window page: the slots that a group pools over."""
        return (1 + self.overlap(ratio)) * ratio

    @property
    def lookback(self) -> int:
        """Positions that a step needs, its own included: the window, or what a group pools."""
        return max(self.window_size, *(self.state_ring(ratio) for ratio in self.compress_ratios))

    @classmethod
    def from_any(cls, model: Any) -> ModelConfig:
        """A ModelConfig from itself, a preset's name, a Hugging Face config or its dict.

        Raises:
            ValueError: not a DeepSeek-V4 configuration.
        """
        if isinstance(model, cls):
            return model
        if isinstance(model, str):
            if model in PRESETS:
                return PRESETS[model]
            raise ValueError(f"unknown model {model!r}; known: {', '.join(PRESETS)}")
        config = getattr(model, "config", model)
        if isinstance(config, cls):
            return config
        values = config if isinstance(config, Mapping) else getattr(config, "to_dict", dict)()
        model_type = values.get("model_type")
        if model_type != HF_MODEL_TYPE:
            raise ValueError(
                f"found a configuration of model_type {model_type!r} ({type(model).__name__}); "
                f"needed: {HF_MODEL_TYPE!r}, a ModelConfig or one of {', '.join(PRESETS)}"
            )
        return cls._from_hf(values)

    @classmethod
    def _from_hf(cls, values: Mapping[str, Any]) -> ModelConfig:
        ratios = values.get("compress_ratios")
        if ratios is None:
            rates = values["compress_rates"]
            ratios = [
                0 if kind == "sliding_attention" else rates[kind] for kind in values["layer_types"]
            ]
        rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
        yarn = rope.get("compress", rope)
        mlp_types = values.get("mlp_layer_types")
        rope_head_dim = values.get("qk_rope_head_dim")
        if rope_head_dim is None:
            rope_head_dim = int(values["head_dim"] * values["partial_rotary_factor"])
        return cls(
            name=str(values.get("_name_or_path") or HF_MODEL_TYPE),
            dim=values["hidden_size"],
            n_heads=values["num_attention_heads"],
            head_dim=values["head_dim"],
            rope_head_dim=rope_head_dim,
            q_lora_rank=values["q_lora_rank"],
            o_groups=values["o_groups"],
            o_lora_rank=values["o_lora_rank"],
            window_size=values["sliding_window"],
            compress_ratios=tuple(ratios[: values["num_hidden_layers"]]),
            index_n_heads=values["index_n_heads"],
            index_head_dim=values["index_head_dim"],
            index_topk=values["index_topk"],
            n_routed_experts=values["n_routed_experts"],
            n_activated_experts=values["num_experts_per_tok"],
            moe_inter_dim=values["moe_intermediate_size"],
            route_scale=values["routed_scaling_factor"],
            vocab_size=values["vocab_size"],
            max_seq_len=values["max_position_embeddings"],
            n_shared_experts=values["n_shared_experts"],
            n_hash_layers=(
                values["num_hash_layers"] if mlp_types is None else mlp_types.count("hash_moe")
            ),
            swiglu_limit=values["swiglu_limit"],
            hc_mult=values["hc_mult"],
            hc_sinkhorn_iters=values["hc_sinkhorn_iters"],
            hc_eps=values["hc_eps"],
            norm_eps=values["rms_norm_eps"],
            rope_theta=values.get("rope_theta") or rope["main"]["rope_theta"],
            compress_rope_theta=values.get("compress_rope_theta", yarn.get("rope_theta")),
            rope_factor=yarn.get("factor", 1.0),
            beta_fast=yarn.get("beta_fast", 32.0),
            beta_slow=yarn.get("beta_slow", 1.0),
            original_seq_len=yarn.get("original_max_position_embeddings", 65536),
        )


OVERLAP_RATIO = 4
"""The ratio whose groups overlap and whose rows an indexer selects."""

V4_FLASH = ModelConfig(
    name="v4-flash",
    dim=4096,
    n_heads=64,
    head_dim=512,
    rope_head_dim=64,
    q_lora_rank=1024,
    o_groups=8,
    o_lora_rank=1024,
    window_size=128,
    compress_ratios=(0, 0, *(4, 128) * 20, 4),
    index_n_heads=64,
    index_head_dim=128,
    index_topk=512,
    n_routed_experts=256,
    n_activated_experts=6,
    moe_inter_dim=2048,
    route_scale=1.5,
    vocab_size=129280,
    max_seq_len=1048576,
)

V4_PRO = replace(
    V4_FLASH,
    name="v4-pro",
    dim=7168,
    n_heads=128,
    q_lora_rank=1536,
    o_groups=16,
    compress_ratios=(128, 128, *(4, 128) * 29, 4),
    index_topk=1024,
    n_routed_experts=384,
    moe_inter_dim=3072,
    route_scale=2.5,
)

TINY = ModelConfig(
    name="tiny",
    dim=128,
    n_heads=4,
    head_dim=128,
    rope_head_dim=64,
    q_lora_rank=64,
    o_groups=2,
    o_lora_rank=64,
    window_size=128,
    compress_ratios=(0, 4, 128),
    index_n_heads=8,
    index_head_dim=128,
    index_topk=64,
    n_routed_experts=8,
    n_activated_experts=2,
    moe_inter_dim=128,
    route_scale=1.5,
    vocab_size=256,
    max_seq_len=4096,
    n_hash_layers=1,
)

BYTES = replace(
    TINY,
    name="bytes",
    dim=256,
    head_dim=256,
    q_lora_rank=128,
    o_lora_rank=128,
    n_routed_experts=12,
    max_seq_len=32768,
)
"""Reads and writes bytes; trained by ``bench/quality/train.py``."""

PRESETS = {config.name: config for config in (V4_FLASH, V4_PRO, TINY, BYTES)}
"""Configurations by name."""
