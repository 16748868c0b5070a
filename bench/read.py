"""The read: compiled on fp8 and on bf16 pools, against what else there is.

    python bench/read.py [--out bench/results] [--json FILE] [--heads 64,128]

Columns are 128 of the window and random compressed rows; pools of 131,072 rows each are larger than
the L2, inputs rotate. FLOPs of a read are 4 * queries * heads * columns * head_dim; its bytes are
the rows, the queries and the output. The limit is the larger of the two times, at the copy
bandwidth and the matrix rate measured in the same run. Reads return the output alone, as those of
an attention layer. Generated kernels are launched programmatically (``triton.enable_pdl``) but for
the column that says otherwise; reads have some only for few queries, to add up parts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import compiled, copy_bandwidth, graph_us, header, matmul_rate, report, tracked

from fp8kv_inductor import Pool, numerics, store
from fp8kv_inductor.chains import MODEL, read

N_SLOTS = 1 << 17
SHAPES = ((1, 640), (8, 640), (64, 640), (128, 640), (256, 640), (256, 2176), (4096, 640))
FORMATS = ("fp8_e4m3", "bf16")


def plain_read(q, window, cmp, indices, counts, sink):
    """Gather, dequantize and SDPA in plain PyTorch; without counts and sink, which SDPA lacks."""
    n_window = MODEL.window_size
    rows = torch.cat(
        [
            numerics.decode_rows(pool.data[part], pool.scale[part], pool.format)
            for pool, part in ((window, indices[:, :n_window]), (cmp, indices[:, n_window:]))
        ],
        1,
    ).to(q.dtype)
    rows = rows.unsqueeze(1)
    out = F.scaled_dot_product_attention(q.unsqueeze(1), rows, rows, scale=MODEL.softmax_scale)
    return out.squeeze(1)


def output(*arguments: Any) -> torch.Tensor:
    """What :func:`read` returns, but for lse."""
    return read(*arguments)[0]


def filled_pool(fmt: str) -> Pool:
    """A pool of random rows."""
    pool = Pool.empty(N_SLOTS, MODEL.head_dim, fmt, "cuda")
    rows = torch.randn(N_SLOTS, MODEL.head_dim, device="cuda", dtype=torch.bfloat16)
    store(rows, torch.arange(N_SLOTS, device="cuda"), pool)
    return pool


def arguments(queries: int, heads: int, columns: int, pools: tuple[Pool, Pool]) -> tuple[Any, ...]:
    """Arguments of a read on the GPU."""
    counts = torch.full((queries,), columns - MODEL.window_size, dtype=torch.int32)
    return (
        torch.randn(queries, heads, MODEL.head_dim, device="cuda", dtype=torch.bfloat16),
        *pools,
        torch.randint(0, N_SLOTS, (queries, columns), dtype=torch.int32, device="cuda"),
        counts.cuda(),
        torch.randn(heads, device="cuda"),
    )


def main() -> None:
    """Measure every variant at every shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for JSON and CSV")
    parser.add_argument("--json", type=Path, help="file for JSON alone")
    parser.add_argument("--heads", default="64,128", help="heads, separated by commas")
    options = parser.parse_args()
    bandwidth, flops = copy_bandwidth(), matmul_rate()
    pools = {fmt: (filled_pool(fmt), filled_pool(fmt)) for fmt in FORMATS}
    results = []
    for heads in map(int, options.heads.split(",")):
        for queries, columns in tracked(SHAPES, f"{heads} heads"):
            calls = max(2, min(20, 4096 // queries))
            inputs = {
                fmt: [arguments(queries, heads, columns, pools[fmt]) for _ in range(calls)]
                for fmt in FORMATS
            }
            # A variant that is not for so many queries has no time. To gather their rows, plain
            # PyTorch would need more memory than the device has.
            variants: dict[str, tuple[Callable[..., Any], str] | None] = {
                "fp8": (compiled(output, pdl=True), "fp8_e4m3"),
                "bf16": (compiled(output, pdl=True), "bf16"),
                "hand-called": (output, "fp8_e4m3"),
                "fp8 without pdl": (compiled(output, pdl=False), "fp8_e4m3")
                if queries <= 64
                else None,
                "plain": (compiled(plain_read, pdl=True), "fp8_e4m3") if queries <= 256 else None,
            }
            row: dict[str, Any] = {"heads": heads, "queries": queries, "columns": columns}
            for name, variant in variants.items():
                row[f"{name} us"] = None
                if variant is not None:
                    fn, fmt = variant
                    row[f"{name} us"] = graph_us([lambda a=a, fn=fn: fn(*a) for a in inputs[fmt]])
            work = 4 * queries * heads * columns * MODEL.head_dim
            for fmt, name in zip(FORMATS, ("fp8", "bf16"), strict=True):
                row_bytes = pools[fmt][0].format.row_bytes(MODEL.head_dim)
                moved = queries * (columns * row_bytes + 4 * heads * MODEL.head_dim)
                limit = max(moved / bandwidth, work / flops) * 1e6
                row[f"{name} % of limit"] = 100 * limit / row[f"{name} us"]
            row["fp8 TFLOP/s"] = work / row["fp8 us"] / 1e6
            row["fp8 / bf16"] = row["fp8 us"] / row["bf16 us"]
            results.append(row)
    head = {
        **header(),
        "copy TB/s": f"{bandwidth / 1e12:.2f}",
        "matmul TFLOP/s": f"{flops / 1e12:.0f}",
    }
    report("read", head, results, options.out, options.json)


if __name__ == "__main__":
    main()
