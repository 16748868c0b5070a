"""The dense, differentiable forward that the small model is trained with.

It computes what ``models/deepseek_v4/dense.py`` does (``tests/test_quality_forward.py`` compares
values and gradients), for a batch of sequences of one length, on any device, in time and memory
that grow with tokens times window plus tokens times compressed rows. Roundings are the identity to
gradients. Wide matrix products can be bf16.

The choice of the indexer has no gradient. Its weights learn from a loss of their own, the
divergence of its scores from the attention that a query would pay if it saw all compressed rows,
as published for DeepSeek-V3.2 (https://arxiv.org/abs/2512.02556); nothing else learns from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fp8kv_inductor import numerics
from fp8kv_inductor.formats import RowFormat
from fp8kv_inductor.model_config import ModelConfig
from fp8kv_inductor.models.deepseek_v4.dense import StraightThrough
from fp8kv_inductor.models.deepseek_v4.indexer import fp4_quant, hadamard
from fp8kv_inductor.models.deepseek_v4.rotary import inverse_frequencies

CHUNK_SCORES = 1 << 27
"""Attention scores that are computed at once; longer sequences take several chunks of queries, of
which the backward pass computes the scores again."""

HIDDEN = -1e30
"""Score of an invisible row. Finite, so that a query without any visible row gives no NaN."""


class Result(NamedTuple):
    """What a forward gives.

    Attributes:
        logits: `[B, L, vocab_size]`.
        index_loss: mean over tokens of the indexer's divergence, summed over layers.
        loads: by router name, `[experts]` share of the picks that each expert got.
    """

    logits: Tensor
    index_loss: Tensor
    loads: dict[str, Tensor]


def unit_rms(x: Tensor, eps: float) -> Tensor:
    """Rows `[..., D]` divided by their root mean square."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def doubly_stochastic(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Sinkhorn's normalisation of ``softmax(logits)`` `[T, C, C]`."""
    comb = logits.softmax(2) + eps
    comb = comb / (comb.sum(1, keepdim=True) + eps)
    for _ in range(1, iterations):
        comb = comb / (comb.sum(2, keepdim=True) + eps)
        comb = comb / (comb.sum(1, keepdim=True) + eps)
    return comb


def enter(
    x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm: Tensor, config: ModelConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Input of a sublayer, normalised, and how its output goes back.

    Args:
        x: `[T, C, dim]` streams.
        fn, scale, base: of the hyper-connection.
        norm: `[dim]` weight of the sublayer's norm.
        config: streams and eps.

    Returns:
        `[T, dim]`, post `[T, C]` and the logits `[T, C, C]` of comb.
    """
    streams, eps = config.hc_mult, config.hc_eps
    flat = x.flatten(1)
    mixes = F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + config.norm_eps)
    first, second = slice(streams), slice(streams, 2 * streams)
    pre = torch.sigmoid(mixes[:, first] * scale[0] + base[first]) + eps
    post = 2 * torch.sigmoid(mixes[:, second] * scale[1] + base[second])
    logits = mixes[:, 2 * streams :] * scale[2] + base[2 * streams :]
    y = (pre.unsqueeze(-1) * x).sum(1)
    return unit_rms(y, config.norm_eps) * norm, post, logits.unflatten(1, (streams, streams))


def leave(y: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Streams `[T, C, dim]` after a sublayer with output ``y`` `[T, dim]`."""
    mixed = sum(comb[:, p].unsqueeze(-1) * x[:, p].unsqueeze(1) for p in range(x.shape[1]))
    return post.unsqueeze(-1) * y.unsqueeze(1) + mixed


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """``silu(min(gate, limit)) * clamp(up, -limit, limit)``."""
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def experts(x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, share: Tensor, limit: float) -> Tensor:
    """Sum of all experts as one wide MLP.

    Args:
        x: `[T, dim]` in the dtype of the weights.
        w1, w3: `[E * I, dim]`.
        w2: `[dim, E * I]`.
        share: `[T, E]` weight of each expert, zero for those that were not chosen.
        limit: of the activations.

    Returns:
        `[T, dim]` in the dtype of ``share``.
    """
    gate, up = F.linear(x, w1).to(share.dtype), F.linear(x, w3).to(share.dtype)
    hidden = swiglu(gate, up, limit).unflatten(-1, (share.shape[1], -1)) * share.unsqueeze(-1)
    return F.linear(hidden.flatten(1).to(x.dtype), w2).to(share.dtype)


class TrainingForward:
    """The small model as a function of its weights.

    Args:
        config: shapes.
        weights: by reference name; floating ones in ``dtype``.
        dtype: of everything but wide products.
        product_dtype: of wide products, by default ``dtype``.
        compile: let Inductor fuse what happens token by token.
        row_format: of the pools that rows are rounded as in, None for rows that no pool rounds.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype = torch.float32,
        product_dtype: torch.dtype | None = None,
        compile: bool = False,
        row_format: RowFormat | None = None,
    ) -> None:
        self.config = config
        self.row_format = row_format
        self.weights = weights
        self.dtype = dtype
        self.product_dtype = product_dtype or dtype
        device = next(iter(weights.values())).device
        self.hadamard = hadamard(config.index_head_dim).to(device, dtype)
        self.frequencies = [
            inverse_frequencies(config, compressed).to(device, dtype)
            for compressed in (False, True)
        ]
        wrap: Callable[..., Any] = (
            partial(torch.compile, dynamic=False) if compile else lambda function: function
        )
        self.enter, self.leave, self.experts = wrap(enter), wrap(leave), wrap(experts)

    def again(self, weights: Mapping[str, Tensor], compile: bool = False) -> TrainingForward:
        """The same function of other weights, or of these ones compiled."""
        return TrainingForward(
            self.config, weights, self.dtype, self.product_dtype, compile, self.row_format
        )

    def __call__(self, tokens: Tensor, sparse: bool = True, focus: Tensor | None = None) -> Result:
        """Logits of every token.

        Args:
            tokens: `[B, L]`, L a multiple of the window.
            sparse: False lets queries see all compressed rows, whatever the indexer picks.
            focus: `[B, L]` weights of the tokens in the index loss, None for 1.
        """
        config, weights = self.config, self.weights
        batch, length = tokens.shape
        if length % config.window_size:
            raise ValueError(
                f"found sequences of {length} tokens; needed: a multiple of {config.window_size}"
            )
        positions = torch.arange(length, device=tokens.device)
        angles = [positions.to(self.dtype).unsqueeze(1) * f for f in self.frequencies]
        turns = [(angle.cos(), angle.sin()) for angle in angles]
        index_loss = torch.zeros((), dtype=self.dtype, device=tokens.device)
        loads: dict[str, Tensor] = {}
        x = weights["embed.weight"][tokens.flatten()].unsqueeze(1).repeat(1, config.hc_mult, 1)
        for layer in range(config.n_layers):
            name = f"layers.{layer}."
            y, post, logits = self.enter(x, *self.connection(name, "attn"), config)
            comb = self.comb(logits)
            y, loss = self.attention(y.unflatten(0, (batch, length)), layer, turns, sparse, focus)
            index_loss = index_loss + loss
            x = self.leave(y.flatten(0, 1), x, post, comb)
            y, post, logits = self.enter(x, *self.connection(name, "ffn"), config)
            comb = self.comb(logits)
            y, loads[f"{name}ffn.gate"] = self.mixture(y, tokens.flatten(), layer)
            x = self.leave(y, x, post, comb)
        flat = x.flatten(1)
        mixes = unit_rms(flat, config.norm_eps) @ weights["hc_head_fn"].T
        pre = torch.sigmoid(mixes * weights["hc_head_scale"] + weights["hc_head_base"])
        y = self.norm(((pre + config.hc_eps).unsqueeze(-1) * x).sum(1), "norm")
        logits = F.linear(y, weights["head.weight"])
        return Result(logits.unflatten(0, (batch, length)), index_loss, loads)

    def connection(self, prefix: str, sublayer: str) -> tuple[Tensor, ...]:
        """fn, scale and base of a hyper-connection, and the weight of the norm behind it."""
        names = [f"{prefix}hc_{sublayer}_{part}" for part in ("fn", "scale", "base")]
        return tuple(self.weights[n] for n in (*names, f"{prefix}{sublayer}_norm.weight"))

    def comb(self, logits: Tensor) -> Tensor:
        """Not compiled: so many small dependent steps compile slowly, and run no faster."""
        return doubly_stochastic(logits, self.config.hc_sinkhorn_iters, self.config.hc_eps)

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMS norm with a weight."""
        return unit_rms(x, self.config.norm_eps) * self.weights[name + ".weight"]

    def product(self, x: Tensor, name: str) -> Tensor:
        """A wide product, ``x @ weight.T`` in ``product_dtype``, given back in ``dtype``."""
        weight = self.weights[name + ".weight"].to(self.product_dtype)
        return F.linear(x.to(self.product_dtype), weight).to(self.dtype)

    def exact(self, x: Tensor, name: str) -> Tensor:
        """A product in ``dtype``, for what the model keeps in fp32."""
        return F.linear(x, self.weights[name + ".weight"])

    def turn(self, x: Tensor, turns: tuple[Tensor, Tensor], inverse: bool = False) -> Tensor:
        """Rotate the last features of `[B, L, D]` or `[B, L, H, D]`, neighbouring pairs."""
        cos, sin = (t if x.dim() == 3 else t.unsqueeze(1) for t in turns)
        if inverse:
            sin = -sin
        first = x.shape[-1] - 2 * cos.shape[-1]
        even, odd = x[..., first:].unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
        return torch.cat([x[..., :first], turned.flatten(-2)], -1)

    def kv_row(self, rows: Tensor) -> Tensor:
        """The model's fp8 round trip of KV rows, then the pool's."""
        rounded = numerics.act_quant(rows.detach(), self.config.nope_head_dim)
        if self.row_format is not None:
            stored = numerics.encode_rows(rounded, self.row_format)
            rounded = numerics.decode_rows(*stored, self.row_format).to(rows.dtype)
        return StraightThrough.apply(rows, rounded)

    def index_row(self, x: Tensor) -> Tensor:
        """Hadamard transform and fp4 round trip of index keys and queries."""
        turned = (x @ self.hadamard) * self.config.index_head_dim**-0.5
        return StraightThrough.apply(turned, fp4_quant(turned.detach()))

    def compressed_rows(
        self, x: Tensor, name: str, ratio: int, width: int, turns: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Normalised and rotated rows `[B, L // ratio, width]`."""
        halves = 1 + self.config.overlap(ratio)

        def grouped(values: Tensor) -> Tensor:
            return values.unflatten(1, (-1, ratio)).unflatten(-1, (halves, width))

        kv = grouped(self.exact(x, name + ".wkv"))
        score = grouped(self.exact(x, name + ".wgate"))
        score = score + self.weights[name + ".ape"].unflatten(-1, (halves, width))
        own_kv, own_score = kv[..., -1, :], score[..., -1, :]
        if halves == 2:
            # The previous group's first halves; the first group has none.
            before_kv = F.pad(kv[:, :-1, :, 0], (0, 0, 0, 0, 1, 0))
            before_score = F.pad(score[:, :-1, :, 0], (0, 0, 0, 0, 1, 0), value=HIDDEN)
            own_kv = torch.cat([before_kv, own_kv], 2)
            own_score = torch.cat([before_score, own_score], 2)
        rows = (own_score.softmax(2) * own_kv).sum(2)
        first_of_group = tuple(t[::ratio][: rows.shape[1]] for t in turns)
        return self.turn(self.norm(rows, name + ".norm"), first_of_group)

    def attention(
        self,
        x: Tensor,
        layer: int,
        turns: list[tuple[Tensor, Tensor]],
        sparse: bool,
        focus: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Output `[B, L, dim]` of `x` `[B, L, dim]`, and the indexer's loss."""
        config = self.config
        batch, length, _ = x.shape
        ratio = config.compress_ratios[layer]
        name = f"layers.{layer}.attn"
        turn = turns[ratio > 0]
        q_latent = self.norm(self.product(x, name + ".wq_a"), name + ".q_norm")
        q = self.product(q_latent, name + ".wq_b").unflatten(-1, (config.n_heads, -1))
        q = self.turn(unit_rms(q, config.norm_eps), turn).to(self.product_dtype)
        row = self.turn(self.norm(self.product(x, name + ".wkv"), name + ".kv_norm"), turn)
        rows = self.kv_row(row).to(self.product_dtype)
        window = F.pad(rows, (0, 0, config.window_size, 0))
        cmp = rows[:, :0]
        index: tuple[Tensor, ...] = ()
        if ratio:
            cmp = self.compressed_rows(x, name + ".compressor", ratio, config.head_dim, turn)
            cmp = self.kv_row(cmp).to(self.product_dtype)
        if config.has_indexer(ratio):
            index = self.index_inputs(x.detach(), q_latent.detach(), name + ".indexer", ratio, turn)

        sink = self.weights[name + ".attn_sink"]
        per_query = batch * config.n_heads * (2 * config.window_size + cmp.shape[1])
        if index:
            per_query += batch * config.index_n_heads * cmp.shape[1]
        blocks = max(1, CHUNK_SCORES // (per_query * config.window_size))
        step = blocks * config.window_size
        outputs, loss = [], torch.zeros((), dtype=self.dtype, device=x.device)
        for first in range(0, length, step):
            part = slice(first, first + step)
            arguments = (
                first,
                q[:, part],
                window[:, first : first + step + config.window_size],
                cmp,
                sink,
                ratio,
                sparse,
                None if focus is None else focus[:, part],
                *((index[0][:, part], index[1][:, part], index[2]) if index else ()),
            )
            if torch.is_grad_enabled() and step < length:
                out, part_loss = checkpoint(self.read, *arguments, use_reentrant=False)
            else:
                out, part_loss = self.read(*arguments)
            outputs.append(out)
            loss = loss + part_loss
        out = self.turn(torch.cat(outputs, 1).to(self.dtype), turn, inverse=True)
        grouped = out.flatten(2).unflatten(-1, (config.o_groups, -1)).to(self.product_dtype)
        wo_a = self.weights[name + ".wo_a.weight"].unflatten(0, (config.o_groups, -1))
        latent = torch.einsum("blgd,grd->blgr", grouped, wo_a.to(self.product_dtype))
        return self.product(latent.flatten(2), name + ".wo_b"), loss / (batch * length)

    def index_inputs(
        self, x: Tensor, q_latent: Tensor, name: str, ratio: int, turn: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Index queries `[B, L, HI, DI]`, weights `[B, L, HI]` and keys `[B, C, DI]`."""
        config = self.config
        heads, width = config.index_n_heads, config.index_head_dim
        keys = self.compressed_rows(x, name + ".compressor", ratio, width, turn)
        q = self.product(q_latent, name + ".wq_b").unflatten(-1, (heads, width))
        weights = self.product(x, name + ".weights_proj") * (heads * width) ** -0.5
        queries, keys = self.index_row(self.turn(q, turn)), self.index_row(keys)
        return queries.to(self.product_dtype), weights, keys.to(self.product_dtype)

    def read(
        self,
        first: int,
        q: Tensor,
        window: Tensor,
        cmp: Tensor,
        sink: Tensor,
        ratio: int,
        sparse: bool,
        focus: Tensor | None,
        *index: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Attention of a chunk of neighbouring queries.

        Args:
            first: position of the first query.
            q: `[B, N, H, D]`, N a multiple of the window size W.
            window: `[B, W + N, D]` rows of the queries' positions and of the W before.
            cmp: `[B, C, D]` all compressed rows.
            sink: `[H]`.
            ratio: tokens per compressed row.
            sparse: see only what the indexer picks.
            focus: `[B, N]` weights of the index loss, or None.
            index: queries `[B, N, HI, DI]`, weights `[B, N, HI]`, keys `[B, C, DI]`, or nothing.

        Returns:
            out `[B, N, H, D]`, and the sum over the chunk of the indexer's loss.
        """
        config = self.config
        size, scale = config.window_size, config.softmax_scale
        batch, count, heads, width = q.shape
        blocks, n_cmp = count // size, cmp.shape[1]
        # Block b of queries sees the rows of block b - 1 and its own.
        before, own = (
            part.unflatten(1, (blocks, size)) for part in (window[:, :-size], window[:, size:])
        )
        near = torch.cat([before, own], 2)
        near_scores = (q.reshape(batch, blocks, size * heads, width) @ near.mT).to(self.dtype)
        near_scores = near_scores.view(batch, count, heads, 2 * size)
        far_scores = (q.reshape(batch, count * heads, width) @ cmp.mT).to(self.dtype)
        far_scores = far_scores.view(batch, count, heads, n_cmp)
        position = first + torch.arange(count, device=q.device)
        column = torch.arange(2 * size, device=q.device)
        age = (position % size).unsqueeze(1) + size - column
        exists = (position // size).unsqueeze(1) * size - size + column >= 0
        near_visible = ((age >= 0) & (age < size) & exists).view(1, count, 1, 2 * size)
        complete = torch.arange(n_cmp, device=q.device) < (
            (position + 1) // max(ratio, 1)
        ).unsqueeze(1)
        far_visible = complete.view(1, count, n_cmp)
        loss = sink.new_zeros(())
        scores = torch.cat([near_scores, far_scores], -1) * scale
        sinks = sink.view(1, 1, heads, 1).expand(batch, count, heads, 1)

        def shares(far: Tensor) -> Tensor:
            visible = torch.cat([near_visible.expand(batch, -1, -1, -1), far.unsqueeze(2)], -1)
            masked = torch.where(visible, scores, HIDDEN)
            return torch.cat([masked, sinks], -1).softmax(-1)

        if index:
            index_scores = self.index_scores(*index)
            index_scores = torch.where(far_visible, index_scores, HIDDEN)
            with torch.no_grad():
                mass = shares(far_visible.expand(batch, -1, -1))[..., 2 * size : -1].mean(2)
            loss = divergence(mass, index_scores, focus)
            if sparse and n_cmp > config.index_topk:
                picks = index_scores.detach().topk(config.index_topk, -1).indices
                chosen = torch.zeros_like(index_scores, dtype=torch.bool).scatter(2, picks, True)
                far_visible = far_visible & chosen
        share = shares(far_visible.expand(batch, -1, -1)).to(q.dtype)
        near_share = share[..., : 2 * size].reshape(batch, blocks, size * heads, 2 * size)
        out = (near_share @ near).view(batch, count, heads, width)
        if n_cmp:
            far_share = share[..., 2 * size : -1].reshape(batch, count * heads, n_cmp)
            out = out + (far_share @ cmp).view(batch, count, heads, width)
        return out, loss

    def index_scores(self, queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
        """Scores `[B, N, C]` of index queries `[B, N, HI, DI]` and keys `[B, C, DI]`."""
        batch, count, heads, _ = queries.shape
        dots = (queries.flatten(1, 2) @ keys.mT).relu().view(batch, count, heads, -1)
        return (weights.to(dots.dtype).unsqueeze(2) @ dots).squeeze(2).to(self.dtype)

    def mixture(self, x: Tensor, tokens: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Experts' output `[T, dim]`, and each routed expert's share of the picks."""
        config = self.config
        name = f"layers.{layer}.ffn"
        scores = F.softplus(self.exact(x, name + ".gate")).sqrt()
        if layer < config.n_hash_layers:
            chosen = self.weights[name + ".gate.tid2eid"][tokens].to(torch.int64)
        else:
            biased = scores.detach() + self.weights[name + ".gate.bias"]
            chosen = biased.topk(config.n_activated_experts).indices
        share = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
        share = share / share.sum(1, keepdim=True) * config.route_scale
        load = torch.zeros_like(share).scatter(1, chosen, 1.0).mean(0) / chosen.shape[1]
        # The shared expert is as wide as n_shared_experts routed ones, each with weight 1.
        share = torch.cat([share, share.new_ones(len(x), config.n_shared_experts)], 1)
        w1, w2, w3 = (
            torch.cat(
                [
                    self.weights[f"{name}.{expert}.{leaf}.weight"]
                    for expert in (
                        *(f"experts.{i}" for i in range(config.n_routed_experts)),
                        "shared_experts",
                    )
                ],
                1 if leaf == "w2" else 0,
            ).to(self.product_dtype)
            for leaf in ("w1", "w2", "w3")
        )
        limit = config.swiglu_limit
        return self.experts(x.to(self.product_dtype), w1, w3, w2, share, limit), load


def divergence(mass: Tensor, scores: Tensor, focus: Tensor | None) -> Tensor:
    """How far softmax(``scores``) is from ``mass``, a query counting as much as its mass.

    Args:
        mass: `[B, N, C]` attention on compressed rows, not normalised, without gradient.
        scores: `[B, N, C]`.
        focus: `[B, N]` weights of the queries, or None.

    Returns:
        The sum of ``mass * log(mass / total / softmax(scores))``.
    """
    total = mass.sum(-1, keepdim=True).clamp_min(torch.finfo(mass.dtype).tiny)
    per_query = (torch.xlogy(mass, mass / total) - mass * scores.log_softmax(-1)).sum(-1)
    return (per_query if focus is None else per_query * focus).sum()
