"""Reads with everything that can go wrong, run by the kernels and compared with fp64."""

import math

import torch
from interpreter import launch

from fp8kv_inductor import numerics, reference
from fp8kv_inductor.formats import RowFormat, get_format
from fp8kv_inductor.kernels.attention import sparse_attention

T, H, D, N, K, WINDOW = 3, 5, 96, 64, 75, 37
NAMES = ["bf16", "fp8_e4m3", "fp8_e4m3_amax", "fp8_e4m3_ue8m0"]


def make_pool(fmt: RowFormat, head_dim: int = D, n_slots: int = N):
    return numerics.encode_rows(torch.randn(n_slots, head_dim), fmt)


def make_case(name: str = "fp8_e4m3", dtype: torch.dtype = torch.bfloat16, **sizes: int) -> dict:
    """Arguments of a read with masked columns, counts on both sides of the width, all sinks."""
    tokens, heads, head_dim = sizes.get("tokens", T), sizes.get("heads", H), sizes.get("dim", D)
    columns, n_window = sizes.get("columns", K), sizes.get("n_window", WINDOW)
    fmt = get_format(name)
    indices = torch.randint(0, N, (tokens, columns))
    indices[torch.rand(tokens, columns) < 0.2] = -1
    counts = torch.tensor([1, 1000, 20])
    return dict(
        q=torch.randn(tokens, heads, head_dim).to(dtype),
        window=make_pool(fmt, head_dim),
        cmp=make_pool(fmt, head_dim),
        indices=indices,
        cmp_counts=counts[torch.arange(tokens) % 3],
        sink=torch.randn(heads),
        n_window=n_window,
        softmax_scale=2 * head_dim**-0.5,
        row_format=fmt,
    )


def read(device, case, splits=1):
    return launch(device, sparse_attention, **case, splits=splits)


def exact_read(case, dtype=torch.float64):
    """The oracle, over arguments as the kernel takes them."""
    pools = {
        f"{tier}_{part}": tensor
        for tier in ("window", "cmp")
        for part, tensor in zip(("data", "scale"), case[tier], strict=True)
    }
    rest = {key: case[key] for key in ("q", "indices", "cmp_counts", "sink", "n_window")}
    return reference.sparse_attention(
        **rest,
        **pools,
        softmax_scale=case["softmax_scale"],
        fmt=case["row_format"].name,
        dtype=dtype,
    )


def live_columns(case):
    column = torch.arange(case["indices"].shape[1])
    live = case["indices"] >= 0
    if case["cmp_counts"] is not None:
        live &= column < (case["n_window"] + case["cmp_counts"].clamp_min(0)).unsqueeze(1)
    return live


def low_precision_read(case):
    """A dense read with the precision that the kernel promises: rows and weights in bf16.

    Queries that are not bf16 are computed in fp32.
    """
    if case["q"].dtype != torch.bfloat16:
        return exact_read(case, torch.float32)
    live, in_window = live_columns(case), torch.arange(case["indices"].shape[1]) < case["n_window"]
    window, cmp = (
        numerics.decode_rows(*case[tier], case["row_format"]).bfloat16().float()
        for tier in ("window", "cmp")
    )
    slots = case["indices"].masked_fill(~live, 0).long()
    rows = torch.where(in_window.unsqueeze(-1), window[slots], cmp[slots])
    scores = torch.einsum("thd,tkd->thk", case["q"].float(), rows) * case["softmax_scale"]
    scores = scores.masked_fill(~live.unsqueeze(1), -torch.inf)
    lse = torch.logsumexp(scores, -1)
    lowest = torch.full_like(lse, torch.finfo(torch.float32).min).unsqueeze(-1)
    m = torch.cat([scores, lowest], -1).amax(-1, keepdim=True)
    p = torch.exp(scores - m)
    total = p.sum(-1) + torch.exp(case["sink"] - m.squeeze(-1))
    out = torch.einsum("thk,tkd->thd", p.bfloat16().float(), rows) / total.unsqueeze(-1)
    return out.masked_fill((lse == -torch.inf).unsqueeze(-1), 0.0), lse


def rms(error):
    return error.square().mean().sqrt()


def assert_close_to_exact(device, case, splits):
    """Within twice the error of the low-precision read, rounded to q's dtype like the result.

    Of fp32 results the rms error is compared: the largest depends on the order of the sums.
    lse gets on top what the way through base 2 rounds: scale, sum with log2, and scale back, each
    half a unit in the last place of numbers log2(e) times as large, and the hardware's log2 one.
    """
    out, lse = read(device, case, splits)
    exact_out, exact_lse = exact_read(case)
    low_out, low_lse = low_precision_read(case)
    assert out.dtype == case["q"].dtype and out.shape == case["q"].shape and out.is_contiguous()
    assert lse.dtype == torch.float32 and lse.shape == out.shape[:2]
    assert out.isfinite().all()
    error, low_error = out - exact_out, low_out.to(out.dtype) - exact_out
    assert rms(error) <= 2 * rms(low_error)
    if out.dtype == torch.bfloat16:
        assert error.abs().max() <= 2 * low_error.abs().max()
    dead = exact_lse == -math.inf
    assert torch.equal(lse == -math.inf, dead)
    exact = exact_lse[~dead]
    if exact.numel():
        unit = torch.finfo(lse.dtype).eps * exact.abs().max()
        base_2 = (3 * 0.5 + 1) * math.log2(math.e) * unit
        assert (lse[~dead] - exact).abs().max() <= 2 * (low_lse[~dead] - exact).abs().max() + base_2
    return out, lse
