"""How the benchmarks measure: CUDA graphs over rotating inputs, a cold L2, medians, ceilings."""

from __future__ import annotations

import csv
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

FLUSH_BYTES = 256 << 20
"""Written between replays: several times the L2 of any GPU so far."""

REPLAYS = 20

Item = TypeVar("Item")


def header(device: str = "cuda") -> dict[str, str]:
    """Device and versions, for the head of every table."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "torch": torch.__version__,
        "triton": metadata.version("triton"),
    }


def compiled(fn: Callable[..., Any], pdl: bool | None = None) -> Callable[..., Any]:
    """``fn`` compiled for the shapes of its first call.

    Args:
        pdl: whether generated kernels start while the ones in front of them end; by default as the
            environment says.
    """
    torch._dynamo.reset()
    options = None if pdl is None else {"triton.enable_pdl": pdl}
    return torch.compile(fn, fullgraph=True, dynamic=False, options=options)


def graph_us(calls: Sequence[Callable[[], Any]]) -> float:
    """Median microseconds per call of a CUDA graph that runs ``calls`` in order.

    Each call should have inputs of its own; the L2 is flushed before every replay.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(REPLAYS):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def call_us(call: Callable[[], Any], device: str = "cuda") -> float:
    """Microseconds from the first launch of a call to the end of its last kernel."""
    if device != "cuda":
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e6
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3


def alternated(
    measure: Callable[[str], float], names: Sequence[str], rounds: int
) -> dict[str, float]:
    """Medians of ``2 * rounds`` values each, measured in turn, every other time backwards."""
    values: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in (*names, *reversed(names)):
            values[name].append(measure(name))
    return {name: statistics.median(found) for name, found in values.items()}


def copy_us(moved: int, calls: int) -> float:
    """Microseconds of a copy that moves ``moved`` bytes, read and written ones counted.

    By an elementwise kernel, with ``calls`` pairs of tensors in turn. Not ``copy_``, which becomes
    a memcpy node and runs on the slower copy engines.
    """
    pairs = [torch.randn(2, max(1, moved // 8), device="cuda") for _ in range(calls)]
    return graph_us([lambda pair=pair: torch.neg(pair[0], out=pair[1]) for pair in pairs])


def copy_bandwidth(moved: int = 2 << 30) -> float:
    """Bytes per second of a large copy, see :func:`copy_us`."""
    return moved / copy_us(moved, 2) * 1e6


def matmul_rate(size: int = 8192) -> float:
    """FLOP per second of a square bf16 matrix product."""
    left, right = torch.randn(2, size, size, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(left)
    return 2 * size**3 / graph_us([lambda: torch.mm(left, right, out=out)] * 8) * 1e6


def tracked(items: Sequence[Item], what: str, rank: int = 0) -> Iterable[Item]:
    """``items``, with a progress bar on stderr of rank 0."""
    return track(items, what, console=Console(stderr=True), disable=rank > 0)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def report(
    name: str,
    head: dict[str, Any],
    rows: list[dict[str, Any]],
    out: Path | None,
    json_file: Path | None = None,
) -> None:
    """Print a table for people and write what else is asked for.

    Args:
        name: of the benchmark.
        head: device, versions and ceilings.
        rows: one dictionary per line of the table, with the same keys.
        out: folder for ``<name>.json`` and ``<name>.csv``.
        json_file: another place for the JSON.
    """
    table = Table(title=f"{name}: " + ", ".join(f"{k} {v}" for k, v in head.items()))
    for column in rows[0]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    Console(width=200).print(table)
    text = json.dumps({**head, "rows": rows}, indent=2) + "\n"
    if json_file is not None:
        json_file.write_text(text)
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(text)
    with (out / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
