"""Tokens per second of the engine: eager and compiled, on bf16 and on fp8 pools.

    python bench/generate.py [--out bench/results] [--streams 1,8] [--columns ...]
    torchrun --nproc-per-node 2 bench/generate.py ...

A single stream counts ``192 / (t256 - t64)``: what its generations of 256 and of 64 tokens have in
common, prefill included, cancels. Several streams start together and share one budget of bytes,
the same in both modes: rows decide how many pages that is. Without a free page the youngest request
is preempted and computed again later, so fewer pages are fewer tokens per second; prefill counts.

Eager engines launch kernels one by one. Compiled engines have one graph each for prefill and
decode, and decode is a captured CUDA graph. Times are wall times of whole generations, sampling and
scheduling included; medians, the order of the columns alternated.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from math import ceil
from typing import Any

import torch
from measure import alternated, header, report, tracked
from shaped import MODES, describe, draw_model, integers, parser, rows_of, shaped, twins

from fp8kv_inductor.budget import PoolPlan
from fp8kv_inductor.config import CacheConfig
from fp8kv_inductor.demo import CPU_OPTIONS
from fp8kv_inductor.engine import Engine, window_pages
from fp8kv_inductor.model_config import ModelConfig
from fp8kv_inductor.models.deepseek_v4 import DeepseekV4
from fp8kv_inductor.parallel import Parallel, from_environment

LONG, SHORT = 256, 64
"""Tokens of the two generations of a single stream."""


def budget_bytes(config: ModelConfig, streams: int, options: argparse.Namespace) -> int:
    """Bytes for the pools, in both modes.

    Alone, a stream has pages to spare. Several get ``--fill`` of the pages that all of them need in
    the end, counted in bf16 rows.
    """
    one = PoolPlan(CacheConfig.resolve(config, MODES["bf16"], options.device), 1, 1)
    tokens = options.prompt + new_tokens(streams, options)
    share = 2.0 if streams == 1 else options.fill
    pages = ceil(share * streams * one.pages_for(tokens))
    window = window_pages(one.cache, streams, options.chunk, pages)
    return PoolPlan(one.cache, pages, window).nbytes


def new_tokens(streams: int, options: argparse.Namespace) -> int:
    """Tokens that each stream generates."""
    return LONG if streams == 1 else options.new_tokens


def make_engine(
    column: str, model: DeepseekV4, budget: int, streams: int, options: argparse.Namespace
) -> Engine:
    """An engine, its graphs compiled and captured."""
    compiled = column.startswith("compiled")
    engine = Engine(
        model,
        budget,
        max_batch=streams,
        max_len=options.prompt + new_tokens(streams, options),
        prefill_chunk=options.chunk,
        compile=compiled,
        compile_options=CPU_OPTIONS if options.device == "cpu" else None,
        cuda_graph="capture" if compiled and options.device == "cuda" else None,
        batch_invariant=options.batch_invariant,
    )
    engine.warm_up()
    return engine


def prompts(streams: int, config: ModelConfig, options: argparse.Namespace) -> list[list[int]]:
    """Random tokens, the same for every column and on every rank."""
    generator = torch.Generator().manual_seed(options.seed)
    shape = (streams, options.prompt)
    return torch.randint(config.vocab_size, shape, generator=generator).tolist()


def seconds(engine: Engine, requests: list[list[int]], tokens: int) -> float:
    """Wall time of a generation; the engine waits for the GPU when it samples."""
    begin = time.perf_counter()
    engine.generate(requests, tokens)
    return time.perf_counter() - begin


def rate(engine: Engine, requests: list[list[int]], options: argparse.Namespace) -> float:
    """Generated tokens per second of all streams."""
    if len(requests) == 1:
        long, short = (seconds(engine, requests, tokens) for tokens in (LONG, SHORT))
        return (LONG - SHORT) / (long - short)
    return len(requests) * options.new_tokens / seconds(engine, requests, options.new_tokens)


def measure_streams(streams: int, model: DeepseekV4, options: argparse.Namespace) -> dict[str, Any]:
    """A line of the table."""
    budget = budget_bytes(model.config, streams, options)
    engines = {
        name: make_engine(name, twin, budget, streams, options)
        for name, twin in twins(model, options.columns, options).items()
    }
    requests = prompts(streams, model.config, options)
    for engine in engines.values():
        # Few tokens take another graph where there are many experts; preemptions may leave few.
        for prompt in (requests[0], requests[0][:2])[: 1 if streams == 1 else 2]:
            engine.generate([prompt], 2)
    rates = alternated(
        lambda name: rate(engines[name], requests, options), options.columns, options.rounds
    )
    row: dict[str, Any] = {"streams": streams, "budget MiB": budget / 2**20}
    for rows in MODES:
        for name in (name for name in options.columns if rows_of(name) == rows):
            engine = engines[name]
            row[f"{rows} pages"] = engine.plan.num_pages
            # Every generation preempts the same requests.
            row[f"{rows} preemptions"] = engine.preemptions // (2 * options.rounds)
    return row | {f"{name} tok/s": rates[name] for name in options.columns}


def run(options: argparse.Namespace, parallel: Parallel) -> list[dict[str, Any]]:
    """Measure everything, writing what is there after every line; returns the rows."""
    config = shaped(options, parallel)
    head = {
        **header(options.device),
        **describe(config, parallel),
        "prompt": options.prompt,
        "new tokens of several streams": options.new_tokens,
        "batch invariant": options.batch_invariant,
    }
    model = draw_model(config, options, parallel)
    results: list[dict[str, Any]] = []
    for streams in tracked(options.streams, "streams", parallel.rank):
        results.append(measure_streams(streams, model, options))
        if parallel.rank == 0:
            name = options.name or f"generate-tp{parallel.world_size}"
            report(name, head, results, options.out, options.json)
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the generations that the command line asks for."""
    options = parser(__doc__)
    options.add_argument("--streams", type=integers, default=[1, 8])
    options.add_argument("--prompt", type=int, default=1024, help="tokens of each prompt")
    options.add_argument("--new-tokens", type=int, default=1024, help="of each of several streams")
    options.add_argument("--fill", type=float, default=0.85, help="see budget_bytes")
    options.add_argument("--chunk", type=int, default=512, help="tokens of a prefill step")
    options.add_argument("--rounds", type=int, default=1, help="half the samples of a median")
    options.add_argument(
        "--batch-invariant", action="store_true", help="engines that give requests their own bits"
    )
    parsed = options.parse_args(arguments)
    with from_environment(parsed.device) as parallel:
        run(parsed, parallel)


if __name__ == "__main__":
    main()
