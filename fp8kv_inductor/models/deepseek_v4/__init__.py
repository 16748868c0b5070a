"""DeepSeek-V4 in plain PyTorch plus the ``fp8kv::`` operators, over paged pools."""

from fp8kv_inductor.models.deepseek_v4.model import DeepseekV4
from fp8kv_inductor.models.deepseek_v4.weights import (
    draw_weights,
    load_safetensors,
    load_weights,
    random_weights,
    reference_weights,
    save_safetensors,
    shipped_weights,
)

__all__ = [
    "DeepseekV4",
    "draw_weights",
    "load_safetensors",
    "load_weights",
    "random_weights",
    "reference_weights",
    "save_safetensors",
    "shipped_weights",
]
