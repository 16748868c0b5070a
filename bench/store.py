"""The store chain: norm -> rope -> act_quant -> store, compiled against what is called by hand.

    python bench/store.py [--out bench/results] [--json FILE]

Bytes of a row: bf16 input, fp32 cos and sin, slot, and the pool row that is written. The ceiling is
a copy of as many bytes, measured in the same run; the bandwidth of a large copy is in the head.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from measure import compiled, copy_bandwidth, copy_us, graph_us, header, report, tracked

from fp8kv_inductor import Pool, get_format, numerics
from fp8kv_inductor.chains import MODEL, angles, rms_norm, store_chain
from fp8kv_inductor.kernels import act_quant, rope, store

FORMAT = get_format("fp8_e4m3")
N_SLOTS = 1 << 18
ROWS = (1, 64, 8192, 65536)


def plain_chain(x, weight, cos, sin, slots, pool):
    """The same bytes from plain PyTorch, without our operators."""
    row = numerics.rope(rms_norm(x, weight), cos, sin)
    row = numerics.act_quant(row, MODEL.nope_head_dim)
    pool.data[slots], pool.scale[slots] = numerics.encode_rows(row, FORMAT)


def hand_called_chain(x, weight, cos, sin, slots, pool):
    """The hand-callable kernels, one after the other, behind a norm in plain PyTorch."""
    row = rope.rope(rms_norm(x, weight), cos, sin, False)
    row = act_quant.act_quant(row, MODEL.nope_head_dim, 64)
    store.store(row, slots, pool.data, pool.scale, FORMAT)


def bytes_per_row() -> int:
    """Bytes that one row has to move."""
    read = MODEL.head_dim * 2 + MODEL.rope_head_dim * 4 + 8
    return read + FORMAT.row_bytes(MODEL.head_dim)


def main() -> None:
    """Measure every variant at every number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for JSON and CSV")
    parser.add_argument("--json", type=Path, help="file for JSON alone")
    options = parser.parse_args()
    pool = Pool.empty(N_SLOTS, MODEL.head_dim, FORMAT, "cuda")
    weight = (torch.rand(MODEL.head_dim) + 0.5).cuda()
    bandwidth = copy_bandwidth()
    results = []
    for rows in tracked(ROWS, "rows"):
        calls = max(4, min(64, (1 << 16) // rows))
        slots = torch.randperm(N_SLOTS)[: rows * min(calls, N_SLOTS // rows)].split(rows)
        inputs = [
            (
                torch.randn(rows, MODEL.head_dim, device="cuda").bfloat16(),
                weight,
                *(table.cuda() for table in angles(rows)),
                # A tensor of its own: part of one may start anywhere, and compiled code copies what
                # is less aligned than at its first call.
                slots[i % len(slots)].cuda(),
                pool,
            )
            for i in range(calls)
        ]
        variants = {
            "ours": store_chain,
            "plain": plain_chain,
            "hand-called": hand_called_chain,
            "eager": plain_chain,
        }
        row = {"rows": rows}
        for name, fn in variants.items():
            if name in ("ours", "plain"):
                fn = compiled(fn)
            row[f"{name} us"] = graph_us([lambda a=a, fn=fn: fn(*a) for a in inputs])
        moved = rows * bytes_per_row()
        row["copy us"] = copy_us(moved, calls)
        row["GB/s"] = moved / row["ours us"] / 1e3
        row["% of copy"] = 100 * row["copy us"] / row["ours us"]
        row["% of large copy"] = 1e8 * moved / bandwidth / row["ours us"]
        results.append(row)
    head = {
        **header(),
        "bytes per row": bytes_per_row(),
        "copy TB/s": f"{bandwidth / 1e12:.2f}",
    }
    report("store", head, results, options.out, options.json)


if __name__ == "__main__":
    main()
