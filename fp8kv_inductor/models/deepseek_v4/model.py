"""The DeepSeek-V4 graph: one forward for ragged prefill and for batched decode."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8kv_inductor.config import CacheConfig
from fp8kv_inductor.model_config import ModelConfig
from fp8kv_inductor.models.deepseek_v4 import hyper_connections
from fp8kv_inductor.models.deepseek_v4.attention import Attention
from fp8kv_inductor.models.deepseek_v4.layers import Linear, RMSNorm
from fp8kv_inductor.models.deepseek_v4.moe import MoE
from fp8kv_inductor.models.deepseek_v4.rotary import Rotary
from fp8kv_inductor.models.deepseek_v4.step import Step, prepare
from fp8kv_inductor.parallel import SINGLE, Parallel
from fp8kv_inductor.pools import KVPools, LayerPools
from fp8kv_inductor.slots import StepBatch


def _float32(device: torch.device, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=torch.float32, device=device), requires_grad=False)


class Embedding(nn.Module):
    """Rows of a table by token id."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(model.vocab_size, model.dim, dtype=dtype, device=device),
            requires_grad=False,
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """`[T]` to `[T, dim]`."""
        return F.embedding(tokens, self.weight)


class Block(nn.Module):
    """Attention and mixture of experts, each between hyper-connections."""

    def __init__(
        self,
        model: ModelConfig,
        layer: int,
        dtype: torch.dtype,
        rounding: bool,
        device: torch.device,
        parallel: Parallel,
    ) -> None:
        super().__init__()
        self.model = model
        ratio = model.compress_ratios[layer]
        self.attn = Attention(model, ratio, dtype, rounding, device, parallel)
        self.ffn = MoE(model, layer < model.n_hash_layers, dtype, device, parallel)
        self.attn_norm = RMSNorm(model.dim, model.norm_eps, device)
        self.ffn_norm = RMSNorm(model.dim, model.norm_eps, device)
        streams = model.hc_mult
        mixes = (2 + streams) * streams
        self.hc_attn_fn = _float32(device, mixes, streams * model.dim)
        self.hc_attn_base = _float32(device, mixes)
        self.hc_attn_scale = _float32(device, 3)
        self.hc_ffn_fn = _float32(device, mixes, streams * model.dim)
        self.hc_ffn_base = _float32(device, mixes)
        self.hc_ffn_scale = _float32(device, 3)

    def forward(self, x: Tensor, step: Step, pools: LayerPools) -> Tensor:
        """Streams `[T, C, dim]` to streams `[T, C, dim]`."""
        y, post, comb = hyper_connections.enter(
            x, self.hc_attn_fn, self.hc_attn_scale, self.hc_attn_base, self.model
        )
        x = hyper_connections.leave(self.attn(self.attn_norm(y), step, pools), x, post, comb)
        y, post, comb = hyper_connections.enter(
            x, self.hc_ffn_fn, self.hc_ffn_scale, self.hc_ffn_base, self.model
        )
        return hyper_connections.leave(self.ffn(self.ffn_norm(y), step.tokens), x, post, comb)


class DeepseekV4(nn.Module):
    """The backbone and head over bound pools.

    Parameters carry the names of the public reference (except that routed experts are stacked and
    the two weights of a compressor are one) and are allocated, not initialised: see ``weights``.
    Router, hyper-connections, compressors, norms and head are fp32, the other weights ``dtype``.

    For one graph over changing numbers of tokens mark those axes of the batch dynamic;
    ``dynamic=True`` would also turn every float of the configuration into an input.

    Args:
        cache: shapes, formats and device.
        dtype: of activations and weights, bf16 or fp32.
        rounding: False leaves out the model's own rounding steps, the fp8 round trip of KV rows and
            the indexer's Hadamard transform with its fp4 round trip, to compare with
            implementations that lack them.
        parallel: the ranks that divide heads, experts and vocabulary; everything else, pools
            included, is the same on all of them.

    Raises:
        ConfigError: the ranks cannot have equal parts of the model.
    """

    pools: KVPools

    def __init__(
        self,
        cache: CacheConfig,
        dtype: torch.dtype = torch.bfloat16,
        rounding: bool = True,
        parallel: Parallel = SINGLE,
    ) -> None:
        super().__init__()
        model, device = cache.model, cache.device
        parallel.check(model)
        self.parallel = parallel
        self.cache = cache
        self.config = model
        self.embed = Embedding(model, dtype, device)
        self.layers = nn.ModuleList(
            Block(model, layer, dtype, rounding, device, parallel)
            for layer in range(model.n_layers)
        )
        self.norm = RMSNorm(model.dim, model.norm_eps, device)
        self.head = Linear(model.dim, parallel.share(model.vocab_size), torch.float32, device)
        self.hc_head_fn = _float32(device, model.hc_mult, model.hc_mult * model.dim)
        self.hc_head_base = _float32(device, model.hc_mult)
        self.hc_head_scale = _float32(device, 1)
        self.rotary = Rotary(model, device)

    def bind(self, pools: KVPools) -> None:
        """Make ``pools`` part of the module, so that torch.compile sees module buffers.

        Raises:
            ValueError: the pools were planned for another cache mode.
        """
        if pools.plan.cache != self.cache:
            raise ValueError(
                f"pools of {pools.plan.cache.model.name!r} with kv_cache_dtype="
                f"{pools.plan.cache.kv_cache_dtype!r} on {pools.plan.cache.device}; the model has "
                f"{self.cache.model.name!r} with {self.cache.kv_cache_dtype!r} on "
                f"{self.cache.device}; plan the pools with the model's CacheConfig"
            )
        self.pools = pools

    def forward(self, batch: StepBatch) -> Tensor:
        """Run a step: store the rows of all tokens, attend, and return the wanted logits.

        Returns:
            `[S, vocab_size]` fp32, of the tokens ``batch.last``. Every rank gets the same bits,
            joined from the ranks' parts of the vocabulary.
        """
        model = self.config
        step = prepare(batch, model, self.rotary)
        x = self.embed(batch.tokens).unsqueeze(1).expand(-1, model.hc_mult, -1)
        for layer, pools in zip(self.layers, self.pools.layers, strict=True):
            x = layer(x, step, pools)
        x = hyper_connections.head(
            x[batch.last], self.hc_head_fn, self.hc_head_scale, self.hc_head_base, model
        )
        return self.parallel.all_gather(self.head(self.norm(x)))
