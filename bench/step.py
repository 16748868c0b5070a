"""One decode step of a model with V4-Flash's widths: eager and compiled, on bf16 and on fp8 pools.

    python bench/step.py [--out bench/results] [--batches 1,64] [--contexts 8192] [--columns ...]
    torchrun --nproc-per-node 2 bench/step.py ...

Eager steps call the model as it is: the hand-callable kernels and PyTorch's, launched one by one,
slots checked. Compiled steps are a captured CUDA graph of torch.compile(model), replayed. Both are
timed by CUDA events around one step, its launch included; medians, the order of the columns
alternated. Both modes have the same number of pages, full of random rows. Page tables are as wide
as the longest context, and one graph per batch serves all contexts, as in an engine. On the CPU
nothing is captured, and times are wall times.

FLOP and bytes are what a step cannot do without: every weight once, of the routed experts those
that the batch is expected to choose, and the live rows and index keys. The limit is the larger of
the two times, at the matrix rate and the copy bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from measure import alternated, call_us, copy_bandwidth, header, matmul_rate, report, tracked
from shaped import describe, draw_model, integers, parser, rows_of, shaped, twins
from torch import Tensor

from fp8kv_inductor import KVPools, store
from fp8kv_inductor.budget import PoolPlan
from fp8kv_inductor.demo import CPU_OPTIONS
from fp8kv_inductor.graphs import CapturedStep
from fp8kv_inductor.models.deepseek_v4 import DeepseekV4
from fp8kv_inductor.page_table import PageTable
from fp8kv_inductor.parallel import Parallel, from_environment
from fp8kv_inductor.pools import Pool
from fp8kv_inductor.slots import StepBatch
from fp8kv_inductor.staging import Segment, StepInputs

ROWS_AT_ONCE = 1 << 16
"""Rows that are drawn and stored at a time when pools are filled."""


class Requests:
    """A batch of requests that have all pages of the longest context."""

    def __init__(self, plan: PoolPlan, batch: int, max_context: int) -> None:
        model, device = plan.cache.model, plan.cache.device
        self.vocab_size = model.vocab_size
        self.inputs = StepInputs(
            model.ratios,
            batch,
            batch,
            plan.pages_for(max_context),
            device,
        )
        self.pages = PageTable(plan, self.inputs.page_table, self.inputs.window_table)
        self.rows = [self.pages.admit(max_context) for _ in range(batch)]

    def at(self, context: int) -> StepBatch:
        """The step that stores the last tokens of ``context``, or a few less; contexts must grow.

        Requests are at different places of their pages, so that not all groups close at once.
        """
        segments = []
        for row in self.rows:
            position = context - 1 - row % self.pages.page_size
            self.pages.slide(row, position)
            start = max(0, position + 1 - self.pages.lookback)
            self.pages.extend(row, start, position + 1)
            segments.append(Segment(row, position, [(7 * row + 1) % self.vocab_size]))
        return self.inputs.decode(segments)


def fill(pools: KVPools) -> None:
    """Random rows everywhere, the same in all formats but for their rounding."""
    for pool in pools.modules():
        if not isinstance(pool, Pool):
            continue
        n_slots, width = pool.data.shape
        for slots in torch.arange(n_slots, device=pool.data.device).split(ROWS_AT_ONCE):
            rows = torch.randn(len(slots), width, device=slots.device, dtype=torch.bfloat16)
            store(rows, slots, pool)


def make_step(column: str, model: DeepseekV4, batch: StepBatch) -> Callable[[StepBatch], Tensor]:
    """The model as the column runs it, warmed up on ``batch``."""
    step: Callable[[StepBatch], Tensor] = model
    if column.startswith("compiled"):
        cuda = batch.tokens.is_cuda
        options = None if cuda else CPU_OPTIONS
        step = torch.compile(model, fullgraph=True, dynamic=False, options=options)
        if cuda:
            return CapturedStep(step, model, batch)
    step(batch)
    return step


def work(model: DeepseekV4, batch: int, context: int) -> tuple[float, float]:
    """FLOP and bytes of a step, on one rank."""
    config, kv = model.config, model.cache.kv_format
    named = list(model.named_parameters())
    experts = [weight for name, weight in named if ".experts." in name]
    others = [
        weight
        for name, weight in named
        if ".experts." not in name and not name.startswith("embed.")
    ]
    share = config.n_activated_experts / config.n_routed_experts
    chosen = 1 - (1 - share) ** batch
    elements = sum(w.numel() for w in others) + share * sum(w.numel() for w in experts)
    flop = 2.0 * batch * elements
    moved = sum(w.nbytes for w in others) + chosen * sum(w.nbytes for w in experts)
    heads = model.parallel.share(config.n_heads)
    for ratio in config.compress_ratios:
        rows = context // ratio if ratio else 0
        if config.has_indexer(ratio):
            key_bytes = model.cache.idx_format.row_bytes(config.index_head_dim)
            moved += batch * rows * key_bytes
            flop += 2 * batch * rows * config.index_n_heads * config.index_head_dim
            rows = min(rows, config.index_topk)
        rows += min(context, config.window_size)
        moved += batch * rows * kv.row_bytes(config.head_dim)
        flop += 4 * batch * heads * rows * config.head_dim
    return flop, moved


def measure_batch(
    models: dict[str, DeepseekV4],
    batch: int,
    options: argparse.Namespace,
    ceilings: tuple[float, float] | None,
) -> list[dict[str, Any]]:
    """One row per context."""
    contexts = sorted(options.contexts)
    for model in models.values():
        one = PoolPlan(model.cache, 1, 1)
        pages, window = one.pages_for(contexts[-1]), one.reserve_for(contexts[-1])
        plan = PoolPlan(model.cache, batch * pages, batch * window)
        model.bind(KVPools(plan))
        fill(model.pools)
    # Both modes have the same pages, so one set of tables serves all columns.
    requests = Requests(plan, batch, contexts[-1])
    inputs = requests.at(contexts[0])
    torch._dynamo.reset()
    steps = {name: make_step(name, models[rows_of(name)], inputs) for name in options.columns}
    results = []
    for context in contexts:
        inputs = requests.at(context)
        times = alternated(
            lambda name, inputs=inputs: call_us(lambda: steps[name](inputs), options.device),
            options.columns,
            options.rounds,
        )
        results.append(row_of(models, batch, context, times, ceilings))
    return results


def row_of(
    models: dict[str, DeepseekV4],
    batch: int,
    context: int,
    times: dict[str, float],
    ceilings: tuple[float, float] | None,
) -> dict[str, Any]:
    """A line of the table."""
    row: dict[str, Any] = {"batch": batch, "context": context}
    row |= {f"{name} us": us for name, us in times.items()}
    for fast, slow, title in (
        ("compiled fp8", "eager fp8", "eager / compiled fp8"),
        ("compiled fp8", "compiled bf16", "bf16 / fp8 compiled"),
    ):
        if fast in times and slow in times:
            row[title] = times[slow] / times[fast]
    for rows, model in models.items():
        flop, moved = work(model, batch, context)
        row |= {"GFLOP": flop / 1e9, f"{rows} MB": moved / 1e6}
        if ceilings is not None and f"compiled {rows}" in times:
            bandwidth, rate = ceilings
            limit = max(moved / bandwidth, flop / rate) * 1e6
            row[f"{rows} % of limit"] = 100 * limit / times[f"compiled {rows}"]
    return row


@torch.no_grad()
def run(options: argparse.Namespace, parallel: Parallel) -> list[dict[str, Any]]:
    """Measure everything, writing what is there after every batch; returns the rows."""
    config = shaped(options, parallel)
    names = [rows for rows in ("bf16", "fp8") if any(rows == rows_of(c) for c in options.columns)]
    models = twins(draw_model(config, options, parallel), names, options)
    head = {**header(options.device), **describe(config, parallel)}
    head["eager"] = "kernels launched one by one"
    head["compiled"] = "replay of a CUDA graph" if options.device == "cuda" else "calls"
    ceilings = None
    if options.device == "cuda":
        ceilings = copy_bandwidth(), matmul_rate()
        head["copy TB/s"] = f"{ceilings[0] / 1e12:.2f}"
        head["matmul TFLOP/s"] = f"{ceilings[1] / 1e12:.0f}"
    results: list[dict[str, Any]] = []
    for batch in tracked(options.batches, "batches", parallel.rank):
        results += measure_batch(models, batch, options, ceilings)
        if parallel.rank == 0:
            name = options.name or f"step-tp{parallel.world_size}"
            report(name, head, results, options.out, options.json)
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the steps that the command line asks for."""
    options = parser(__doc__)
    options.add_argument("--batches", type=integers, default=[1, 8, 64, 256])
    options.add_argument("--contexts", type=integers, default=[1024, 8192, 65536])
    options.add_argument("--rounds", type=int, default=5, help="half the samples of a median")
    parsed = options.parse_args(arguments)
    with from_environment(parsed.device) as parallel:
        run(parsed, parallel)


if __name__ == "__main__":
    main()
