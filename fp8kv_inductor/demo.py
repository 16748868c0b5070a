"""``fp8kv demo``: one text through both cache modes, eager and compiled, side by side."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from fp8kv_inductor._compat import generated_kernels
from fp8kv_inductor.budget import plan_pages
from fp8kv_inductor.config import CacheConfig, ConfigError
from fp8kv_inductor.doctor import device_name, versions
from fp8kv_inductor.engine import Engine
from fp8kv_inductor.models.deepseek_v4 import (
    DeepseekV4,
    load_safetensors,
    load_weights,
    random_weights,
    shipped_weights,
)
from fp8kv_inductor.parallel import SINGLE, Parallel

MODES = ("auto", "fp8_e4m3")

REQUESTS = 4
"""Requests in the batch; each is half as long as the one before."""


CPU_OPTIONS = {"cpp.simdlen": 1}
"""C++ without vector instructions compiles in half the time. The tiny model would not gain from
them what four compilations lose."""


@dataclass(frozen=True)
class Options:
    """What to run.

    Attributes:
        model: name of a preset.
        text: its bytes are the tokens of the longest prompt.
        new_tokens: tokens to generate after each prompt.
        device: "cuda", "cpu", or None to choose.
        budget: bytes for the pools of each mode.
        seed: of random weights, where the package has no trained ones.
    """

    model: str
    text: bytes
    new_tokens: int
    device: str | None
    budget: int
    seed: int


@dataclass(frozen=True)
class ModeResult:
    """One cache mode.

    Attributes:
        bytes_per_element: of a KV row, scales included.
        bytes_per_token: of all pools, per token of history.
        num_pages: full-history pages that the budget holds.
        kernels: kernels that Inductor generated for a decode step.
        compile_s: seconds to compile prefill and decode.
        eager_tok_s: decoded tokens per second, without torch.compile.
        compiled_tok_s: the same with it.
        tokens: generated after the longest prompt, compiled.
        text: these tokens as text.
        requests: generated after each prompt, compiled.
    """

    bytes_per_element: float
    bytes_per_token: float
    num_pages: int
    kernels: int
    compile_s: float
    eager_tok_s: float
    compiled_tok_s: float
    tokens: list[int]
    text: str
    requests: list[list[int]]


def run(options: Options, progress: Progress, parallel: Parallel = SINGLE) -> dict[str, Any]:
    """Run the demo, on every rank alike; the result is what ``--json`` prints.

    Raises:
        ConfigError: the device, the memory, the budget, the model's length or the number of ranks
            does not allow it.
    """
    text = list(options.text)
    prompts = [text[: max(1, len(text) >> halvings)] for halvings in range(REQUESTS)]
    caches = [CacheConfig.resolve(options.model, mode, options.device) for mode in MODES]
    for cache in caches:
        plan_pages(cache, options.budget)
    check_memory(caches[0], parallel)
    results: list[ModeResult] = []
    logits: list[Tensor] = []
    for cache in caches:
        result, mode_logits = run_mode(cache, prompts, options, progress, parallel)
        results.append(result)
        logits.append(mode_logits)
    pairs = [
        auto == fp8
        for outputs in zip(*(result.requests for result in results), strict=True)
        for auto, fp8 in zip(*outputs, strict=True)
    ]
    return {
        **{mode: asdict(result) for mode, result in zip(MODES, results, strict=True)},
        "max_logit_diff": (logits[0] - logits[1]).abs().max().item(),
        "token_agreement": sum(pairs) / len(pairs),
        "model": options.model,
        "weights": "trained" if shipped_weights(caches[0].model) else "random",
        "budget_bytes": options.budget,
        "prompt_bytes": [len(prompt) for prompt in prompts],
        "new_tokens": options.new_tokens,
        "device": device_name(caches[0].device),
        "world_size": parallel.world_size,
        "versions": versions(),
    }


def check_memory(cache: CacheConfig, parallel: Parallel) -> None:
    """Raise ConfigError if this rank's weights are larger than the memory that is there."""
    meta = DeepseekV4(replace(cache, device=torch.device("meta")), parallel=parallel)
    needed = sum(tensor.nbytes for tensor in meta.state_dict().values())
    if cache.device.type == "cuda":
        there = torch.cuda.mem_get_info(cache.device)[0]
    else:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise ConfigError(
            f"found {there / 2**30:.1f} GiB of memory on {cache.device}; the weights of "
            f"{cache.model.name!r} need {needed / 2**30:.1f} GiB; use a smaller model"
        )


def run_mode(
    cache: CacheConfig,
    prompts: Sequence[list[int]],
    options: Options,
    progress: Progress,
    parallel: Parallel,
) -> tuple[ModeResult, Tensor]:
    """One cache mode, eager and compiled; also the compiled logits `[T, V]` along the text."""
    mode = cache.kv_cache_dtype

    def make_engine(compile: bool) -> Engine:
        model = DeepseekV4(cache, parallel=parallel)
        if path := shipped_weights(cache.model):
            load_safetensors(model, path)
        else:
            # Drawn anew each time: only this rank's shards of them stay in memory.
            load_weights(model, random_weights(cache.model, options.seed))
        return Engine(
            model,
            options.budget,
            max_batch=len(prompts),
            max_len=len(prompts[0]) + options.new_tokens,
            compile=compile,
            compile_options=CPU_OPTIONS if cache.device.type == "cpu" else None,
        )

    eager = make_engine(compile=False)
    eager.warm_up()
    _, eager_tok_s = generate(eager, prompts, options.new_tokens, f"{mode}: eager", progress)
    engine = make_engine(compile=True)
    task = progress.add_task(f"{mode}: compile", total=2)
    start = time.perf_counter()
    engine.warm_up(["prefill"])
    progress.advance(task)
    kernels_before = generated_kernels()
    engine.warm_up(["decode"])
    progress.advance(task)
    kernels = generated_kernels() - kernels_before
    compile_s = time.perf_counter() - start
    logits = engine.score(prompts[0])
    outputs, compiled_tok_s = generate(
        engine, prompts, options.new_tokens, f"{mode}: compiled", progress
    )
    result = ModeResult(
        bytes_per_element=cache.kv_format.bytes_per_element(cache.model.head_dim),
        bytes_per_token=engine.plan.bytes_per_token(),
        num_pages=engine.plan.num_pages,
        kernels=kernels,
        compile_s=compile_s,
        eager_tok_s=eager_tok_s,
        compiled_tok_s=compiled_tok_s,
        tokens=outputs[0],
        text=text_of(outputs[0]),
        requests=outputs,
    )
    return result, logits


def text_of(tokens: Sequence[int]) -> str:
    """Tokens below 256 as UTF-8; what is not becomes U+FFFD."""
    return bytes(min(token, 255) for token in tokens).decode(errors="replace")


def generate(
    engine: Engine,
    prompts: Sequence[list[int]],
    new_tokens: int,
    description: str,
    progress: Progress,
) -> tuple[list[list[int]], float]:
    """Generate greedily; returns the tokens and the decoded tokens per second."""
    task = progress.add_task(description, total=len(prompts) * new_tokens)
    ids = [engine.add_request(prompt, new_tokens) for prompt in prompts]
    decoded, seconds = 0, 0.0
    while engine.unfinished:
        start = time.perf_counter()
        result = engine.step()
        if result.kind == "decode":
            decoded += len(result.tokens)
            seconds += time.perf_counter() - start
        progress.advance(task, len(result.tokens))
    outputs = [engine.finished(request_id) for request_id in ids]
    return [tokens for tokens in outputs if tokens is not None], decoded / seconds


def print_table(result: dict[str, Any], console: Console) -> None:
    """Print the result for people."""
    ranks = f", {result['world_size']} ranks" if result["world_size"] > 1 else ""
    table = Table(
        title=f"{result['model']} on {result['device']}{ranks}, torch.compile with inductor"
    )
    table.add_column("")
    for mode in MODES:
        table.add_column(mode, justify="right")
    for label, key, fmt in (
        ("bytes per KV element", "bytes_per_element", ".4f"),
        ("bytes per token, all pools", "bytes_per_token", ",.0f"),
        (f"pages of {result['budget_bytes']:,} bytes", "num_pages", ","),
        ("kernels generated per decode step", "kernels", ","),
        ("seconds to compile", "compile_s", ".1f"),
        ("tokens/s eager", "eager_tok_s", ",.1f"),
        ("tokens/s compiled", "compiled_tok_s", ",.1f"),
    ):
        table.add_row(label, *(format(result[mode][key], fmt) for mode in MODES))
    console.print(table)
    console.print(
        f"prompts of {', '.join(map(str, result['prompt_bytes']))} bytes, "
        f"{result['new_tokens']} new tokens each"
    )
    console.print(f"largest logit difference between the modes: {result['max_logit_diff']:.4g}")
    console.print(f"generated tokens that agree: {result['token_agreement']:.1%}")
    if result["weights"] == "trained":
        for mode in MODES:
            console.print(f"{mode} writes: {result[mode]['text']!r}", markup=False)
