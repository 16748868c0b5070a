"""Models to measure: the real widths, few layers, as many experts as fit, random weights."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fp8kv_inductor.config import CacheConfig
from fp8kv_inductor.model_config import PRESETS, ModelConfig
from fp8kv_inductor.models.deepseek_v4 import DeepseekV4, draw_weights
from fp8kv_inductor.parallel import Parallel

MODES = {"bf16": "auto", "fp8": "fp8_e4m3"}
"""Pool rows -> cache mode."""

COLUMNS = ("eager bf16", "eager fp8", "compiled bf16", "compiled fp8")

VOCABULARY = 1024
"""A real one makes embedding and head as expensive as several layers."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options of every benchmark of whole steps."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for JSON and CSV")
    parser.add_argument("--json", type=Path, help="file for JSON alone")
    parser.add_argument("--name", help="of the files in that folder; by default <benchmark>-tp<N>")
    parser.add_argument("--model", choices=PRESETS, default="v4-flash", help="widths")
    parser.add_argument("--layers", type=integers, default=[0, 4, 128], help="compress ratios")
    parser.add_argument(
        "--experts", type=int, help="routed experts of a layer; by default as many as fit"
    )
    parser.add_argument("--columns", type=columns, default=COLUMNS, help=", ".join(COLUMNS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def integers(text: str) -> list[int]:
    """Numbers separated by commas."""
    return [int(part) for part in text.split(",")]


def columns(text: str) -> list[str]:
    """Columns, separated by commas, in the order of all."""
    asked = {part.strip() for part in text.split(",")}
    if unknown := asked - set(COLUMNS):
        raise argparse.ArgumentTypeError(f"found {unknown}; needed: some of {', '.join(COLUMNS)}")
    return [name for name in COLUMNS if name in asked]


def rows_of(column: str) -> str:
    """The pool rows of a column, a key of MODES."""
    return column.rpartition(" ")[2]


def shaped(options: argparse.Namespace, parallel: Parallel) -> ModelConfig:
    """The configuration that the options ask for."""
    base = PRESETS[options.model]
    experts = options.experts or _fitting_experts(base, len(options.layers), options, parallel)
    return replace(
        base,
        name=f"{base.name}-{len(options.layers)}",
        compress_ratios=tuple(options.layers),
        n_routed_experts=experts,
        n_hash_layers=0,
        vocab_size=min(base.vocab_size, VOCABULARY),
    )


def _fitting_experts(
    base: ModelConfig, layers: int, options: argparse.Namespace, parallel: Parallel
) -> int:
    """All experts, or as many as half of the GPU holds; eager mode copies those of a few tokens."""
    if options.device != "cuda":
        return base.n_routed_experts
    expert = 3 * base.dim * parallel.share(base.moe_inter_dim) * torch.bfloat16.itemsize
    return min(base.n_routed_experts, torch.cuda.mem_get_info()[0] // 2 // (layers * expert))


def draw_model(config: ModelConfig, options: argparse.Namespace, parallel: Parallel) -> DeepseekV4:
    """A model with random weights and no pools yet."""
    model = DeepseekV4(_cache(config, "bf16", options), parallel=parallel)
    draw_weights(model, options.seed)
    return model


def twins(
    model: DeepseekV4, names: Sequence[str], options: argparse.Namespace
) -> dict[str, DeepseekV4]:
    """A copy for each name, a column or pool rows, that shares the model's weights."""
    kept: list[Any] = [*model.parameters(), model.parallel]
    copies = {}
    for name in names:
        copies[name] = copy.deepcopy(model, {id(each): each for each in kept})
        copies[name].cache = _cache(model.config, rows_of(name), options)
    return copies


def _cache(config: ModelConfig, rows: str, options: argparse.Namespace) -> CacheConfig:
    return CacheConfig.resolve(config, MODES[rows], options.device)


def describe(config: ModelConfig, parallel: Parallel) -> dict[str, Any]:
    """The model, for the head of a table."""
    return {
        "model": f"widths of {config.name.rpartition('-')[0]}",
        "layers": ", ".join(map(str, config.compress_ratios)),
        "experts": config.n_routed_experts,
        "vocabulary": config.vocab_size,
        "tp": parallel.world_size,
    }
