"""One attention layer over pool rows, in data-path order: q, window row, compressed row, read."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fp8kv_inductor import ops
from fp8kv_inductor.model_config import ModelConfig
from fp8kv_inductor.models.deepseek_v4.compressor import Compressor
from fp8kv_inductor.models.deepseek_v4.indexer import Indexer
from fp8kv_inductor.models.deepseek_v4.layers import (
    Linear,
    RMSNorm,
    partial_product,
    rms_norm,
)
from fp8kv_inductor.models.deepseek_v4.step import Step
from fp8kv_inductor.parallel import SINGLE, Parallel
from fp8kv_inductor.pools import LayerPools


class Attention(nn.Module):
    """Multi-query attention whose single row is both K and V.

    Rows stay whole `[T, head_dim]` from norm to store: rope, act_quant and store address the part
    of a row that they change, so that Inductor can fuse the chain into one kernel.

    A rank has some heads and the output groups that they form. Rows, and the indexer with all its
    heads, are the same on all ranks: a partial sum of scores, reduced in another order, could pick
    other rows than one process does.
    """

    def __init__(
        self,
        model: ModelConfig,
        ratio: int,
        dtype: torch.dtype,
        rounding: bool,
        device: torch.device | None = None,
        parallel: Parallel = SINGLE,
    ) -> None:
        super().__init__()
        self.model = model
        self.ratio = ratio
        self.rounding = rounding
        self.parallel = parallel
        self.n_heads = parallel.share(model.n_heads)
        self.o_groups = parallel.share(model.o_groups)
        heads = self.n_heads * model.head_dim
        self.attn_sink = nn.Parameter(
            torch.empty(self.n_heads, dtype=torch.float32, device=device), requires_grad=False
        )
        self.wq_a = Linear(model.dim, model.q_lora_rank, dtype, device)
        self.q_norm = RMSNorm(model.q_lora_rank, model.norm_eps, device)
        self.wq_b = Linear(model.q_lora_rank, heads, dtype, device)
        self.wkv = Linear(model.dim, model.head_dim, dtype, device)
        self.kv_norm = RMSNorm(model.head_dim, model.norm_eps, device)
        latent = self.o_groups * model.o_lora_rank
        self.wo_a = Linear(heads // self.o_groups, latent, dtype, device)
        self.wo_b = Linear(latent, model.dim, dtype, device)
        self.compressor = Compressor(model, ratio, model.head_dim, device) if ratio else None
        self.indexer = (
            Indexer(model, ratio, dtype, rounding, device) if model.has_indexer(ratio) else None
        )

    def round(self, rows: Tensor) -> Tensor:
        """The model's own fp8 round trip of KV rows `[T, head_dim]`."""
        return ops.act_quant(rows, self.model.nope_head_dim) if self.rounding else rows

    def forward(self, x: Tensor, step: Step, pools: LayerPools) -> Tensor:
        """Store the rows of `x` `[T, dim]` and attend; returns `[T, dim]`."""
        model = self.model
        rope = step.rope(self.ratio)
        q_latent = self.q_norm(self.wq_a(x))
        q = self.wq_b(q_latent).unflatten(-1, (self.n_heads, model.head_dim))
        q = ops.rope(rms_norm(q, None, model.norm_eps), *rope)

        row = ops.rope(self.kv_norm(self.wkv(x)), *rope)
        ops.store(self.round(row), step.window_slots, pools.window)

        if self.compressor is None:
            cmp, indices, counts = pools.window, step.window_indices, None
        else:
            assert pools.cmp is not None and pools.state is not None
            ratio_step = step.ratios[self.ratio]
            states = self.compressor.states(x, step.positions)
            rows = self.compressor(states, ratio_step, pools.state, x.dtype)
            ops.store(self.round(rows), ratio_step.groups.slots, pools.cmp)
            ops.store(states, ratio_step.state_slots, pools.state)
            cmp, counts = pools.cmp, ratio_step.counts
            if self.indexer is None:
                assert ratio_step.indices is not None
                indices = ratio_step.indices
            else:
                picks = self.indexer(
                    x, q_latent, step.positions, step.request, rope, ratio_step, pools
                )
                indices = torch.cat([step.window_indices, picks], 1)

        out, _ = ops.sparse_attention(
            q,
            pools.window,
            cmp,
            indices,
            counts,
            self.attn_sink,
            step.window_indices.shape[1],
            model.softmax_scale,
        )
        out = ops.rope(out, *rope, inverse=True)
        grouped = out.flatten(1).unflatten(-1, (self.o_groups, -1))
        wo_a = self.wo_a.weight.unflatten(0, (self.o_groups, model.o_lora_rank))
        latent = torch.einsum("tgd,grd->tgr", grouped, wo_a).flatten(1)
        partial = partial_product(latent, self.wo_b.weight, self.parallel)
        return self.parallel.all_reduce(partial).to(x.dtype)
