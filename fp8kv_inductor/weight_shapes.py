"""Shapes of a model's weights, and what one rank of a tensor-parallel group holds of them.

The planner counts with these before any module exists. The split is that of ``parallel``: heads,
output groups, the hidden features of experts and the head's vocabulary are divided among the ranks;
everything else is on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from fp8kv_inductor.config import ConfigError
from fp8kv_inductor.formats import WEIGHT_FORMATS, WeightFormat
from fp8kv_inductor.model_config import ModelConfig
from fp8kv_inductor.parallel import DIVIDED_SIZES

BF16 = WEIGHT_FORMATS["bf16"]
FP32 = WeightFormat("fp32", torch.float32)
INT32 = WeightFormat("int32", torch.int32)


@dataclass(frozen=True)
class Weight:
    """A matrix `[n_out, n_in]`, or a vector as one column.

    Attributes:
        n_out: rows.
        n_in: columns.
        format: how it lies in memory.
        split: the axis that is divided among ranks; None for a copy on every rank.
    """

    n_out: int
    n_in: int
    format: WeightFormat
    split: Literal["out", "in"] | None = None

    def shard(self, tp: int) -> Weight:
        """The part of one of ``tp`` ranks, which :func:`check_tp` allows."""
        if self.split == "out":
            return Weight(self.n_out // tp, self.n_in, self.format)
        if self.split == "in":
            return Weight(self.n_out, self.n_in // tp, self.format)
        return self

    @property
    def tensors(self) -> list[tuple[tuple[int, int], torch.dtype]]:
        """Shape and dtype of each tensor that holds it."""
        return self.format.tensors(self.n_out, self.n_in)

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix and its scales."""
        return self.format.nbytes(self.n_out, self.n_in)


def check_tp(model: ModelConfig, tp: int) -> None:
    """Raise unless ``tp`` ranks can share the model.

    Raises:
        ConfigError: ``tp`` does not divide an axis that is split.
    """
    for axis in DIVIDED_SIZES:
        size = getattr(model, axis)
        if tp < 1 or size % tp:
            raise ConfigError(
                f"found a tensor-parallel size of {tp}; {model.name!r} has {axis}={size}, which "
                "it must divide; choose another size"
            )


def expert_weights(model: ModelConfig, fmt: WeightFormat) -> dict[str, Weight]:
    """w1, w2 and w3 of one routed expert of one layer: what an expert slot holds."""
    return _swiglu_weights(model.dim, model.moe_inter_dim, fmt)


def other_weights(model: ModelConfig, fmt: WeightFormat) -> list[Weight]:
    """All weights but those of the routed experts.

    Args:
        model: the shapes.
        fmt: of the attention's and the shared experts' linear layers. The embedding and the
            indexer's head weights are bf16; router, compressors, hyper-connections, norms and
            head are fp32, as in ``models/deepseek_v4``.
    """
    weights = [
        Weight(model.vocab_size, model.dim, BF16),
        Weight(model.vocab_size, model.dim, FP32, "out"),
        _vector(model.dim),
        *_mix_weights(model, model.hc_mult, n_scales=1),
    ]
    mixes = (2 + model.hc_mult) * model.hc_mult
    for layer, ratio in enumerate(model.compress_ratios):
        weights += _attention_weights(model, ratio, fmt)
        weights += _router_weights(model, hashed=layer < model.n_hash_layers)
        shared = model.n_shared_experts * model.moe_inter_dim
        weights += _swiglu_weights(model.dim, shared, fmt).values()
        weights += 2 * [_vector(model.dim), *_mix_weights(model, mixes, n_scales=3)]
    return weights


def _vector(size: int, split: Literal["out"] | None = None) -> Weight:
    return Weight(size, 1, FP32, split)


def _swiglu_weights(dim: int, hidden: int, fmt: WeightFormat) -> dict[str, Weight]:
    return {
        "w1": Weight(hidden, dim, fmt, "out"),
        "w2": Weight(dim, hidden, fmt, "in"),
        "w3": Weight(hidden, dim, fmt, "out"),
    }


def _mix_weights(model: ModelConfig, mixes: int, n_scales: int) -> list[Weight]:
    """fn, base and scale of one hyper-connection."""
    return [Weight(mixes, model.hc_mult * model.dim, FP32), _vector(mixes), _vector(n_scales)]


def _router_weights(model: ModelConfig, hashed: bool) -> list[Weight]:
    choice = (
        Weight(model.vocab_size, model.n_activated_experts, INT32)
        if hashed
        else _vector(model.n_routed_experts)
    )
    return [Weight(model.n_routed_experts, model.dim, FP32), choice]


def _compressor_weights(model: ModelConfig, ratio: int, width: int) -> list[Weight]:
    """ape, wkv, wgate and norm."""
    wide = (1 + model.overlap(ratio)) * width
    projection = Weight(wide, model.dim, FP32)
    return [Weight(ratio, wide, FP32), projection, projection, _vector(width)]


def _attention_weights(model: ModelConfig, ratio: int, fmt: WeightFormat) -> list[Weight]:
    heads = model.n_heads * model.head_dim
    outputs = model.o_groups * model.o_lora_rank
    weights = [
        _vector(model.n_heads, "out"),  # sink
        Weight(model.q_lora_rank, model.dim, fmt),
        _vector(model.q_lora_rank),
        Weight(heads, model.q_lora_rank, fmt, "out"),
        Weight(model.head_dim, model.dim, fmt),
        _vector(model.head_dim),
        Weight(outputs, heads // model.o_groups, fmt, "out"),
        Weight(model.dim, outputs, fmt, "in"),
    ]
    if ratio:
        weights += _compressor_weights(model, ratio, model.head_dim)
    if model.has_indexer(ratio):
        index_heads = model.index_n_heads * model.index_head_dim
        weights += [
            Weight(index_heads, model.q_lora_rank, fmt),
            Weight(model.index_n_heads, model.dim, BF16),
            *_compressor_weights(model, ratio, model.index_head_dim),
        ]
    return weights
