"""The whole model again, without pools and paging: the oracle of the paged graph.

One sequence at a time, every layer over all tokens at once, plain PyTorch in fp32 or fp64. It
shares nothing with the other modules of this package but ``numerics``, which defines what a pool
holds. It is differentiable: to gradients, roundings are the identity.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8kv_inductor import numerics
from fp8kv_inductor.formats import RowFormat
from fp8kv_inductor.model_config import ModelConfig

E2M1_VALUES = (0.0, 1.0, 2.0, 4.0, 0.5, 1.5, 3.0, 6.0)
"""Magnitudes of fp4 codes, even codes first: the first of two nearest values is the even one."""


def fp4_round_trip(x: Tensor, block: int = 32) -> Tensor:
    """Nearest e2m1 value times 2^ceil(log2(max(amax, 6 * 2^-126) / 6)), in blocks of `[..., D]`."""
    blocks = x.unflatten(-1, (-1, block)).to(torch.float64)
    largest = E2M1_VALUES[-1]
    amax = blocks.abs().amax(-1, keepdim=True).clamp_min(largest * 2.0**-126)
    mantissa, exponent = torch.frexp(amax / largest)
    scale = torch.ldexp(torch.ones_like(amax), exponent - (mantissa == 0.5).to(exponent.dtype))
    values = blocks.new_tensor(E2M1_VALUES)
    nearest = ((blocks / scale).abs().unsqueeze(-1) - values).abs().argmin(-1)
    return (values[nearest].copysign(blocks) * scale).flatten(-2).to(x.dtype)


def hadamard_transform(x: Tensor) -> Tensor:
    """Normalised Walsh-Hadamard transform of `[..., D]`, D a power of two, in Sylvester's order."""
    n = x.shape[-1]
    if n == 1:
        return x
    low, high = hadamard_transform(x.unflatten(-1, (2, n // 2))).unbind(-2)
    return torch.cat([low + high, low - high], -1) * 0.5**0.5


class StraightThrough(torch.autograd.Function):
    """``rounded`` as a value, ``x`` as far as gradients go."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor) -> Tensor:
        """``rounded``, of the shape of ``x``."""
        return rounded.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The gradient of ``x`` is that of the result."""
        return gradient, None


class DenseReference:
    """DeepSeek-V4 of one sequence.

    Args:
        config: shapes.
        weights: tensors by reference name, any dtype.
        dtype: of all arithmetic, fp32 or fp64.
        rounding: False leaves out the model's own rounding steps (fp8 round trip of KV rows,
            Hadamard transform and fp4 round trip of the indexer).
        kv_format: pass KV rows through this pool format; None keeps them as they are.
        idx_format: the same for index keys.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype = torch.float32,
        rounding: bool = True,
        kv_format: RowFormat | None = None,
        idx_format: RowFormat | None = None,
    ) -> None:
        self.config = config
        self.weights = {
            name: weight.to(dtype) if weight.is_floating_point() else weight
            for name, weight in weights.items()
        }
        self.dtype = dtype
        self.rounding = rounding
        self.kv_format = kv_format
        self.idx_format = idx_format

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits `[T, vocab_size]` of every token of `[T]` token ids."""
        config = self.config
        x = self.weights["embed.weight"][tokens].unsqueeze(1).repeat(1, config.hc_mult, 1)
        for layer in range(config.n_layers):
            prefix = f"layers.{layer}."
            pre, post, comb = self.hyper_connection(x, prefix + "hc_attn")
            y = self.norm((pre.unsqueeze(-1) * x).sum(1), prefix + "attn_norm")
            y = self.attention(y, layer)
            x = torch.einsum("tq,td->tqd", post, y) + torch.einsum("tpq,tpd->tqd", comb, x)
            pre, post, comb = self.hyper_connection(x, prefix + "hc_ffn")
            y = self.norm((pre.unsqueeze(-1) * x).sum(1), prefix + "ffn_norm")
            y = self.mixture_of_experts(y, tokens, layer)
            x = torch.einsum("tq,td->tqd", post, y) + torch.einsum("tpq,tpd->tqd", comb, x)
        mixes = self.mixes(x, "hc_head") * self.weights["hc_head_scale"]
        pre = torch.sigmoid(mixes + self.weights["hc_head_base"]) + config.hc_eps
        return self.linear(self.norm((pre.unsqueeze(-1) * x).sum(1), "norm"), "head")

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[name + ".weight"].T

    def unit_rms(self, x: Tensor) -> Tensor:
        return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + self.config.norm_eps)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return self.unit_rms(x) * self.weights[name + ".weight"]

    def mixes(self, x: Tensor, name: str) -> Tensor:
        return self.unit_rms(x.flatten(1)) @ self.weights[name + "_fn"].T

    def hyper_connection(self, x: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """pre `[T, C]`, post `[T, C]` and the doubly stochastic comb `[T, C, C]`."""
        config = self.config
        streams, eps = config.hc_mult, config.hc_eps
        mixes, scale, base = (
            self.mixes(x, name),
            self.weights[name + "_scale"],
            self.weights[name + "_base"],
        )
        pre = torch.sigmoid(mixes[:, :streams] * scale[0] + base[:streams]) + eps
        second = slice(streams, 2 * streams)
        post = 2 * torch.sigmoid(mixes[:, second] * scale[1] + base[second])
        logits = mixes[:, 2 * streams :] * scale[2] + base[2 * streams :]
        comb = torch.softmax(logits.reshape(-1, streams, streams), 2) + eps
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        for _ in range(1, config.hc_sinkhorn_iters):
            comb = comb / (comb.sum(2, keepdim=True) + eps)
            comb = comb / (comb.sum(1, keepdim=True) + eps)
        return pre, post, comb

    def turns(self, positions: Tensor, compressed: bool) -> Tensor:
        """exp(i angle) of each feature pair, `[T, R / 2]` complex; YaRN in compressed layers."""
        config = self.config
        dim = config.rope_head_dim
        base = config.compress_rope_theta if compressed else config.rope_theta
        frequencies = []
        for pair in range(dim // 2):
            frequency = base ** (-2 * pair / dim)
            if compressed:
                first, last = (
                    dim
                    * math.log(config.original_seq_len / (beta * 2 * math.pi))
                    / (2 * math.log(base))
                    for beta in (config.beta_fast, config.beta_slow)
                )
                first, last = max(math.floor(first), 0), min(math.ceil(last), dim - 1)
                share = min(max((pair - first) / max(last - first, 0.001), 0.0), 1.0)
                frequency *= 1 - share + share / config.rope_factor
            frequencies.append(frequency)
        angles = torch.outer(positions.to(self.dtype), torch.tensor(frequencies, dtype=self.dtype))
        return torch.polar(torch.ones_like(angles), angles)

    def turn(self, x: Tensor, turns: Tensor) -> Tensor:
        """Rotate the last features of `[T, D]` or `[T, H, D]`, neighbouring pairs."""
        first = x.shape[-1] - self.config.rope_head_dim
        pairs = torch.view_as_complex(x[..., first:].unflatten(-1, (-1, 2)).contiguous())
        turned = pairs * (turns if x.dim() == 2 else turns.unsqueeze(1))
        return torch.cat([x[..., :first], torch.view_as_real(turned).flatten(-2)], -1)

    def pool_row(self, rows: Tensor, row_format: RowFormat | None) -> Tensor:
        """What a pool of that format gives back."""
        if row_format is None:
            return rows
        values = rows.detach()
        read = numerics.decode_rows(*numerics.encode_rows(values, row_format), row_format)
        return StraightThrough.apply(rows, read.to(self.dtype))

    def kv_row(self, rows: Tensor) -> Tensor:
        """The model's fp8 round trip, then the pool's."""
        if self.rounding:
            rounded = numerics.act_quant(rows.detach(), self.config.nope_head_dim)
            rows = StraightThrough.apply(rows, rounded)
        return self.pool_row(rows, self.kv_format)

    def compressed_rows(self, x: Tensor, name: str, ratio: int, width: int) -> Tensor:
        """Normalised and rotated rows `[T // ratio, width]` of the groups that are complete."""
        kv, score = self.linear(x, name + ".wkv"), self.linear(x, name + ".wgate")
        ape = self.weights[name + ".ape"]
        overlap = kv.shape[1] == 2 * width
        rows = []
        for first in range(0, x.shape[0] - ratio + 1, ratio):
            own = slice(first, first + ratio)
            group_kv, group_score = kv[own, -width:], (score[own] + ape)[:, -width:]
            if overlap and first:
                before = slice(first - ratio, first)
                group_kv = torch.cat([kv[before, :width], group_kv])
                group_score = torch.cat([(score[before] + ape)[:, :width], group_score])
            rows.append((group_score.softmax(0) * group_kv).sum(0))
        if not rows:
            return x.new_zeros(0, width)
        turns = self.turns(torch.arange(len(rows)) * ratio, compressed=True)
        return self.turn(self.norm(torch.stack(rows), name + ".norm"), turns)

    def index_row(self, x: Tensor) -> Tensor:
        """Hadamard transform and fp4 round trip of index keys and queries."""
        if not self.rounding:
            return x
        turned = hadamard_transform(x)
        return StraightThrough.apply(turned, fp4_round_trip(turned.detach()))

    def selected(
        self, x: Tensor, q_latent: Tensor, turns: Tensor, visible: Tensor, name: str, ratio: int
    ) -> Tensor:
        """The best ``index_topk`` of the visible compressed rows, `[T, C]` bool."""
        config = self.config
        heads, width = config.index_n_heads, config.index_head_dim
        keys = self.index_row(self.compressed_rows(x, name + ".compressor", ratio, width))
        keys = self.pool_row(keys, self.idx_format)
        q = self.linear(q_latent, name + ".wq_b").unflatten(-1, (heads, width))
        q = self.index_row(self.turn(q, turns))
        weights = self.linear(x, name + ".weights_proj") * (width**-0.5 * heads**-0.5)
        scores = torch.einsum("th,thc->tc", weights, torch.einsum("thd,cd->thc", q, keys).relu())
        chosen = torch.zeros_like(visible)
        for token, count in enumerate(visible.sum(1).tolist()):
            picks = scores[token, :count].topk(min(config.index_topk, count)).indices
            chosen[token, picks] = True
        return chosen

    def attention(self, x: Tensor, layer: int) -> Tensor:
        config = self.config
        ratio = config.compress_ratios[layer]
        name = f"layers.{layer}.attn"
        position = torch.arange(x.shape[0])
        turns = self.turns(position, compressed=ratio > 0)
        q_latent = self.norm(self.linear(x, name + ".wq_a"), name + ".q_norm")
        q = self.linear(q_latent, name + ".wq_b").unflatten(-1, (config.n_heads, config.head_dim))
        q = self.turn(self.unit_rms(q), turns)
        rows = self.turn(self.norm(self.linear(x, name + ".wkv"), name + ".kv_norm"), turns)
        rows = self.kv_row(rows)
        age = position.unsqueeze(1) - position
        visible = (age >= 0) & (age < config.window_size)
        if ratio:
            compressed = self.compressed_rows(x, name + ".compressor", ratio, config.head_dim)
            complete = torch.arange(len(compressed)) < (position.unsqueeze(1) + 1) // ratio
            if ratio == 4:
                complete = self.selected(x, q_latent, turns, complete, name + ".indexer", ratio)
            rows = torch.cat([rows, self.kv_row(compressed)])
            visible = torch.cat([visible, complete], 1)
        scores = torch.einsum("thd,kd->thk", q, rows) * config.head_dim**-0.5
        scores = scores.masked_fill(~visible.unsqueeze(1), -torch.inf)
        sink = self.weights[name + ".attn_sink"].expand(len(x), -1).unsqueeze(-1)
        shares = torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1]
        out = self.turn(torch.einsum("thk,kd->thd", shares, rows), turns.conj())
        grouped = out.reshape(len(x), config.o_groups, -1)
        wo_a = self.weights[name + ".wo_a.weight"].unflatten(0, (config.o_groups, -1))
        return self.linear(torch.einsum("tgd,grd->tgr", grouped, wo_a).flatten(1), name + ".wo_b")

    def expert(self, x: Tensor, name: str) -> Tensor:
        limit = self.config.swiglu_limit
        gate = self.linear(x, name + ".w1").clamp(max=limit)
        up = self.linear(x, name + ".w3").clamp(-limit, limit)
        return self.linear(F.silu(gate) * up, name + ".w2")

    def mixture_of_experts(self, x: Tensor, tokens: Tensor, layer: int) -> Tensor:
        config = self.config
        name = f"layers.{layer}.ffn"
        scores = F.softplus(self.linear(x, name + ".gate")).sqrt()
        if layer < config.n_hash_layers:
            chosen = self.weights[name + ".gate.tid2eid"][tokens].to(torch.int64)
        else:
            biased = scores + self.weights[name + ".gate.bias"]
            chosen = biased.topk(config.n_activated_experts).indices
        share = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
        share = share / share.sum(1, keepdim=True) * config.route_scale
        out = self.expert(x, name + ".shared_experts")
        for expert in range(config.n_routed_experts):
            routed = self.expert(x, f"{name}.experts.{expert}")
            out = out + share[:, expert : expert + 1] * routed
        return out
