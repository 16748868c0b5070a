"""The scan of index keys in a decode step: compiled, against what else there is.

    python bench/indexer.py [--out bench/results] [--json FILE] [--contexts 4096,32768,...]

Every request has one token; its keys, one per four tokens of its context, lie in pages of a pool
that is in random order. Half of the calls' keys may be dead (`--live 0.5`): a captured step is as
wide as the longest context, and works on what the counts say. FLOPs of a scan are 2 * tokens *
heads * live keys * width; its bytes are the live keys and the scores. The limit is the larger of
the two times, at the copy bandwidth and the matrix rate measured in the same run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import compiled, copy_bandwidth, graph_us, header, matmul_rate, report, tracked
from torch import Tensor

from fp8kv_inductor import Pool, indexer_scores
from fp8kv_inductor.chains import MODEL
from fp8kv_inductor.config import PAGE_SIZE
from fp8kv_inductor.model_config import OVERLAP_RATIO

ROWS_PER_PAGE = PAGE_SIZE // OVERLAP_RATIO
LARGEST_GATHER = 8 << 30
"""Bytes of keys that the plain variant may copy."""


def scores(
    q: Tensor, weights: Tensor, idx: Pool, page_rows: Tensor, request: Tensor, counts: Tensor
) -> Tensor:
    """The operator."""
    return indexer_scores(q, weights, idx, page_rows, request, counts, ROWS_PER_PAGE)


def plain_scores(
    q: Tensor, weights: Tensor, idx: Pool, page_rows: Tensor, request: Tensor, counts: Tensor
) -> Tensor:
    """The same in plain PyTorch: gather the pages, multiply, mask."""
    within = torch.arange(ROWS_PER_PAGE, device=q.device)
    rows = (page_rows[request].unsqueeze(-1) + within).flatten(1)
    dots = torch.relu(torch.einsum("thd,tkd->thk", q, idx.data[rows]).float())
    result = (weights.unsqueeze(-1) * dots).sum(1)
    live = torch.arange(rows.shape[1], device=q.device) < counts.unsqueeze(1)
    return result.masked_fill(~live, -torch.inf)


def arguments(tokens: int, context: int, live: float, idx: Pool) -> tuple[Any, ...]:
    """Arguments of a scan, with pages in random order."""
    pages, device = context // PAGE_SIZE, idx.data.device
    order = torch.randperm(idx.n_slots // ROWS_PER_PAGE, device=device)[: tokens * pages]
    return (
        torch.randn(tokens, MODEL.index_n_heads, MODEL.index_head_dim, device=device).bfloat16(),
        torch.randn(tokens, MODEL.index_n_heads, device=device),
        idx,
        (order * ROWS_PER_PAGE).view(tokens, pages),
        torch.arange(tokens, device=device),
        torch.full((tokens,), int(live * pages * ROWS_PER_PAGE), device=device),
    )


def main() -> None:
    """Measure every variant at every context and number of requests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for JSON and CSV")
    parser.add_argument("--json", type=Path, help="file for JSON alone")
    parser.add_argument("--contexts", default="4096,32768,131072,1048576", help="tokens, by commas")
    parser.add_argument("--tokens", default="1,8,64", help="requests, by commas")
    parser.add_argument("--live", type=float, default=1.0, help="share of keys that are live")
    options = parser.parse_args()
    bandwidth, flops = copy_bandwidth(), matmul_rate()
    results = []
    for context in tracked([int(part) for part in options.contexts.split(",")], "contexts"):
        for tokens in map(int, options.tokens.split(",")):
            keys = tokens * context // OVERLAP_RATIO
            # At least twice the largest L2, so that calls in turn find their keys cold.
            idx = Pool.empty(max(keys, 1 << 20), MODEL.index_head_dim, "bf16", "cuda")
            idx.data.normal_()
            inputs = [arguments(tokens, context, options.live, idx) for _ in range(4)]
            variants: dict[str, Callable[..., Any]] = {
                "compiled": compiled(scores),
                "hand-called": scores,
            }
            row_bytes = idx.format.row_bytes(MODEL.index_head_dim)
            if keys * row_bytes <= LARGEST_GATHER:
                variants["plain"] = compiled(plain_scores)
            row: dict[str, Any] = {"context": context, "tokens": tokens}
            for name, fn in variants.items():
                row[f"{name} us"] = graph_us([lambda a=a, fn=fn: fn(*a) for a in inputs])
            row.setdefault("plain us", None)
            live = int(options.live * keys)
            moved = live * row_bytes + keys * torch.float32.itemsize
            work = 2 * MODEL.index_n_heads * MODEL.index_head_dim * live
            row["TB/s"] = moved / row["compiled us"] / 1e6
            row["TFLOP/s"] = work / row["compiled us"] / 1e6
            row["% of limit"] = 100e6 * max(moved / bandwidth, work / flops) / row["compiled us"]
            results.append(row)
    head = {
        **header(),
        "live": options.live,
        "copy TB/s": f"{bandwidth / 1e12:.2f}",
        "matmul TFLOP/s": f"{flops / 1e12:.0f}",
    }
    report("indexer", head, results, options.out, options.json)


if __name__ == "__main__":
    main()
