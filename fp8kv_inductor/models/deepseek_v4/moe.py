"""Mixture of experts: a router, stacked experts and one shared expert that every token takes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8kv_inductor.model_config import ModelConfig
from fp8kv_inductor.models.deepseek_v4.layers import Linear, partial_product
from fp8kv_inductor.parallel import SINGLE, Parallel

DENSE_EXPERTS = 16
"""Up to so many experts, computing all of them beats gathering the chosen ones."""


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """``silu(min(gate, limit)) * clamp(up, -limit, limit)`` in fp32."""
    gate, up = gate.to(torch.float32), up.to(torch.float32)
    return F.silu(gate.clamp_max(limit)) * up.clamp(-limit, limit)


class Gate(nn.Module):
    """Chooses experts by score, or in hash layers by a table from token id to experts."""

    tid2eid: Tensor

    def __init__(
        self, model: ModelConfig, hashed: bool, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.active = model.n_activated_experts
        self.route_scale = model.route_scale
        self.hashed = hashed
        self.weight = nn.Parameter(
            torch.empty(model.n_routed_experts, model.dim, dtype=torch.float32, device=device),
            requires_grad=False,
        )
        if hashed:
            table = torch.empty(model.vocab_size, self.active, dtype=torch.int32, device=device)
            self.register_buffer("tid2eid", table)
        else:
            self.bias = nn.Parameter(
                torch.empty(model.n_routed_experts, dtype=torch.float32, device=device),
                requires_grad=False,
            )

    def forward(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Experts and their weights, `[T, active]` int64 and fp32, of `x` `[T, dim]`."""
        scores = F.softplus(F.linear(x.to(torch.float32), self.weight)).sqrt()
        if self.hashed:
            chosen = self.tid2eid[tokens].to(torch.int64)
        else:
            chosen = (scores + self.bias).topk(self.active, -1).indices
        weights = scores.gather(1, chosen)
        return chosen, weights / weights.sum(-1, keepdim=True) * self.route_scale


class Experts(nn.Module):
    """The routed experts, stacked, in one of two formulations without data-dependent shapes.

    Few experts, or enough tokens that most experts are wanted: all experts as one wide MLP whose
    hidden features carry the router's weight, zero for experts that a token did not choose. That is
    `E / active` times the arithmetic that is needed, and `[T, E * inter]` hidden values.

    Few tokens of many experts (decode of V4-Flash): each token multiplies with the weights of its
    own experts. Compiled, the gather fuses into the product and only chosen weights are read; in
    eager mode it holds `T * active` experts at once.

    Long prefill with hundreds of experts is right but slow: that needs a grouped matmul.

    A rank has some columns of every expert, so all ranks do the same work, whatever is chosen.

    Attributes:
        sum_dtype: of their outputs, fp32 if the ranks have none.
        w1, w3: `[E, inter / world_size, dim]`.
        w2: `[E, inter / world_size, dim]`, transposed against the reference, so that hidden
            features of all experts are one contraction.
    """

    def __init__(
        self,
        model: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | None = None,
        parallel: Parallel = SINGLE,
    ) -> None:
        super().__init__()
        self.parallel = parallel
        self.sum_dtype = parallel.sum_dtype or torch.float32
        self.n_experts = model.n_routed_experts
        self.limit = model.swiglu_limit
        shape = (model.n_routed_experts, parallel.share(model.moe_inter_dim), model.dim)
        self.w1, self.w2, self.w3 = (
            nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
            for _ in range(3)
        )

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum `[T, dim]` of the chosen experts' partial outputs, in ``sum_dtype``.

        Args:
            x: `[T, dim]`.
            chosen: `[T, active]` experts.
            weights: `[T, active]` fp32.
        """
        if self.n_experts <= DENSE_EXPERTS or chosen.numel() >= self.n_experts:
            return self._all(x, chosen, weights)
        return self._chosen(x, chosen, weights)

    def _all(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        share = weights.new_zeros(x.shape[0], self.n_experts).scatter(1, chosen, weights)
        gate = F.linear(x, self.w1.flatten(0, 1))
        up = F.linear(x, self.w3.flatten(0, 1))
        hidden = swiglu(gate, up, self.limit).unflatten(-1, (self.n_experts, -1))
        hidden = (hidden * share.unsqueeze(-1)).flatten(1)
        partial = partial_product(hidden, self.w2.flatten(0, 1).T, self.parallel)
        return partial.to(self.sum_dtype)

    def _chosen(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        # A product and a sum instead of bmm: Inductor then reads the weights where they lie.
        wide = x.to(torch.float32)[:, None, None]
        gate = (self.w1[chosen] * wide).sum(-1)
        up = (self.w3[chosen] * wide).sum(-1)
        hidden = (swiglu(gate, up, self.limit) * weights.unsqueeze(-1)).to(x.dtype)
        return (self.w2[chosen] * hidden.to(self.sum_dtype).unsqueeze(-1)).sum((1, 2))


class Expert(nn.Module):
    """One SwiGLU expert, of which a rank has some columns."""

    def __init__(
        self,
        model: ModelConfig,
        inter_dim: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
        parallel: Parallel = SINGLE,
    ) -> None:
        super().__init__()
        self.parallel = parallel
        inter_dim = parallel.share(inter_dim)
        self.limit = model.swiglu_limit
        self.w1 = Linear(model.dim, inter_dim, dtype, device)
        self.w2 = Linear(inter_dim, model.dim, dtype, device)
        self.w3 = Linear(model.dim, inter_dim, dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        """`[T, dim]` to the partial output `[T, dim]`."""
        hidden = swiglu(self.w1(x), self.w3(x), self.limit)
        return partial_product(hidden, self.w2.weight, self.parallel)


class MoE(nn.Module):
    """Routed experts plus the shared one."""

    def __init__(
        self,
        model: ModelConfig,
        hashed: bool,
        dtype: torch.dtype,
        device: torch.device | None = None,
        parallel: Parallel = SINGLE,
    ) -> None:
        super().__init__()
        self.parallel = parallel
        self.gate = Gate(model, hashed, device)
        self.experts = Experts(model, dtype, device, parallel)
        self.shared_experts = Expert(
            model, model.n_shared_experts * model.moe_inter_dim, dtype, device, parallel
        )

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """`x` `[T, dim]` of token ids ``tokens`` `[T]` to `[T, dim]`."""
        routed = self.experts(x, *self.gate(x, tokens))
        return self.parallel.all_reduce(routed + self.shared_experts(x)).to(x.dtype)
