"""Quality of a model in every cache format, through the paged engine.

    python -m bench.quality.evaluate --out bench/results --jobs 4

Held-out text is scored in overlapping sequences of 16K, by compiled prefill; codes are recalled by
prefill and compiled decode. Divergence, agreement and selection overlap compare with bf16 pools.
The picks of the indexer come from an eager run, the errors of rows from the rows that this run left
in bf16 pools. Each format is measured in a process of its own, ``--jobs`` of them at a time.

The JSON has ``formats`` (by name: ``bits_per_byte``, ``over_bf16`` with ``percent`` that they are
above those of bf16 pools and its standard ``error`` over the text, ``kl`` in nats,
``top1_agreement``, ``recall`` by distance, ``selection_overlap``, ``row_error`` with ``nope`` and
``rope``, ``lossless``), ``device``, ``versions``, ``heldout_bytes`` and ``recall_prompts``.
``lossless`` says whether logits equal those of bf16 pools bit by bit when the rope tail is kept
aside: rounded alike in both. That is run on the CPU, where every format adds in the same order.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.quality import corpus, recall
from fp8kv_inductor import numerics, ops
from fp8kv_inductor.budget import PoolPlan
from fp8kv_inductor.config import KV_CACHE_DTYPES, CacheConfig
from fp8kv_inductor.demo import CPU_OPTIONS
from fp8kv_inductor.doctor import device_name, versions
from fp8kv_inductor.engine import Engine
from fp8kv_inductor.formats import RowFormat, get_format
from fp8kv_inductor.model_config import PRESETS, ModelConfig
from fp8kv_inductor.models.deepseek_v4 import DeepseekV4, load_safetensors, shipped_weights
from fp8kv_inductor.models.deepseek_v4.attention import Attention
from fp8kv_inductor.models.deepseek_v4.indexer import Indexer

BASE = "bf16"
"""The format that the others are compared with, and the first to be measured."""

MODES = {fmt: mode for mode, fmt in KV_CACHE_DTYPES.items()}
"""Row format -> cache mode, the base first."""


class Settings(NamedTuple):
    """What to measure.

    Attributes:
        config: shapes.
        weights: path of the checkpoint.
        device: "cuda" or "cpu".
        compile: False runs everything eagerly.
        sequence: bytes of a scored sequence.
        starts: sequences that start within the length of one; overlapping ones average over what
            roundings happen to do at other positions.
        heldout_bytes: scored bytes, whole sequences of them.
        picks_bytes: bytes of the eager run.
        aside_bytes: bytes of the run with the rope tail kept aside.
        prompts: recall prompts per distance.
        distances: name -> bytes.
        batch: recall prompts that run together.
        chunk: tokens of a prefill step.
        seed: of the recall prompts.
    """

    config: ModelConfig
    weights: Path
    device: str
    compile: bool = True
    sequence: int = 16384
    starts: int = 4
    heldout_bytes: int = corpus.HELDOUT_BYTES
    picks_bytes: int = 16384
    aside_bytes: int = 2048
    prompts: int = 64
    distances: Mapping[str, int] = recall.DISTANCES
    batch: int = 8
    chunk: int = 2048
    seed: int = 1


class Eager(NamedTuple):
    """What an eager run of the start of the held-out text gives.

    Attributes:
        picks: `[T, K]` rows that the indexers picked, one per ratio-4 layer.
        row_error: what :func:`row_errors` gives, of bf16 pools.
    """

    picks: list[Tensor]
    row_error: dict[str, dict[str, float]]


def make_engine(settings: Settings, fmt: str, compile: bool) -> Engine:
    """An engine with as many window pages as others, the same pages for every format."""
    cache = CacheConfig.resolve(settings.config, MODES[fmt], settings.device)
    model = DeepseekV4(cache)
    load_safetensors(model, settings.weights)
    longest = max(settings.sequence, max(settings.distances.values()) + recall.CODE_BYTES)
    pages = settings.batch * -(-longest // cache.page_size)
    return Engine(
        model,
        PoolPlan(cache, pages, pages),
        max_batch=settings.batch,
        max_len=longest,
        prefill_chunk=settings.chunk,
        compile=compile,
        compile_options=CPU_OPTIONS if cache.device.type == "cpu" else None,
    )


def heldout_sequences(settings: Settings) -> list[list[int]]:
    """The held-out text in overlapping sequences of equal length, in order."""
    text = corpus.heldout()[: settings.heldout_bytes]
    size = min(settings.sequence, len(text))
    step = -(-size // settings.starts)
    return [list(text[i : i + size]) for i in range(0, len(text) - size + 1, step)]


def keep_tail_aside(model: DeepseekV4, block: int) -> None:
    """Let the model round all features of a row onto the grid that a power-of-two pool has.

    Features that ``act_quant`` rounds anyway stay, as the pool's block lies inside its block; the
    rope tail is rounded before the store in every format.
    """
    nope, head_dim = model.config.nope_head_dim, model.config.head_dim

    def rounded(rows: Tensor) -> Tensor:
        return ops.act_quant(ops.act_quant(rows, nope), head_dim, block)

    for module in model.modules():
        if isinstance(module, Attention):
            module.round = rounded  # type: ignore[method-assign]


def recall_rates(engine: Engine, settings: Settings) -> dict[str, float]:
    """By distance, the share of codes that greedy decoding repeats in full."""
    text = np.frombuffer(corpus.heldout(), np.uint8)
    rates = {}
    for name, distance in settings.distances.items():
        questions = recall.prompts(settings.seed, text, distance, settings.prompts)
        outputs = engine.generate([q.tokens for q in questions], recall.DIGITS)
        right = [q.answer == out for q, out in zip(questions, outputs, strict=True)]
        rates[name] = sum(right) / len(right)
    return rates


def row_errors(engine: Engine) -> dict[str, dict[str, float]]:
    """Relative rms error that each format would make of the rows in bf16 pools.

    Returns:
        By format, of the features in front (``nope``) and of the rope tail (``rope``), over the
        window and compressed rows of all layers.
    """
    pools = [p for layer in engine.model.pools.layers for p in (layer.window, layer.cmp) if p]
    rows = torch.cat([pool.data[pool.data.any(1)] for pool in pools]).to(torch.float32)
    first = engine.cache.model.nope_head_dim
    parts = {"nope": slice(0, first), "rope": slice(first, None)}

    def error(fmt: RowFormat, part: slice) -> float:
        read = numerics.decode_rows(*numerics.encode_rows(rows, fmt), fmt)
        off, size = (read - rows)[:, part], rows[:, part]
        return (off.square().sum() / size.square().sum()).sqrt().item()

    return {
        fmt: {name: error(get_format(fmt), part) for name, part in parts.items()} for fmt in MODES
    }


def eager_run(settings: Settings, fmt: str) -> Eager:
    """Run the start of the held-out text eagerly: picks and rows."""
    tokens = heldout_sequences(settings)[0][: settings.picks_bytes]
    engine = make_engine(settings, fmt, compile=False)
    picks: dict[Indexer, list[Tensor]] = {
        module: [] for module in engine.model.modules() if isinstance(module, Indexer)
    }
    hooks = [
        module.register_forward_hook(lambda module, _, out: picks[module].append(out.cpu()))
        for module in picks
    ]
    engine.score(tokens)
    for hook in hooks:
        hook.remove()
    errors = row_errors(engine) if fmt == BASE else {}
    return Eager([torch.cat(parts) for parts in picks.values()], errors)


def logits_aside(settings: Settings, fmt: str) -> Tensor:
    """Logits `[T, vocab_size]` of the start of the text, the rope tail kept aside, on the CPU."""
    engine = make_engine(settings._replace(device="cpu"), fmt, compile=False)
    keep_tail_aside(engine.model, block=pow2_block())
    return engine.score(heldout_sequences(settings)[0][: settings.aside_bytes])


def pow2_block() -> int:
    """Elements per scale of the formats with power-of-two scales."""
    (block,) = {get_format(fmt).block for fmt in MODES if get_format(fmt).rule == "pow2"}
    return block


def overlap(picks: Tensor, base: Tensor) -> float:
    """Mean share of a query's picks that two runs have in common, where there was a choice.

    Args:
        picks, base: `[T, K]` rows, -1 for none.
    """
    full = (base >= 0).all(1)
    # The first query with K rows to see has no choice yet, nor have the next three.
    chosen = full & full.roll(4)
    chosen[:4] = False
    if not chosen.any():
        return 1.0
    ours, theirs = picks[chosen].sort(1).values, base[chosen].sort(1).values
    found = torch.searchsorted(theirs, ours).clamp_max(theirs.shape[1] - 1)
    return (theirs.gather(1, found) == ours).to(torch.float64).mean().item()


def measure(settings: Settings, folder: Path, fmt: str) -> dict[str, Any]:
    """Everything about one format that needs no other; tensors go to ``folder``."""
    torch.set_float32_matmul_precision("highest")
    eager = eager_run(settings, fmt)
    engine = make_engine(settings, fmt, settings.compile)
    sequences = heldout_sequences(settings)
    logits = torch.stack([engine.score(sequence) for sequence in sequences])
    targets = torch.tensor(sequences)[:, 1:]
    pairs = zip(logits, targets, strict=True)
    nats = torch.stack([F.cross_entropy(x[:-1].double(), y) for x, y in pairs])
    aside = logits_aside(settings, fmt)
    tensors = {"logits": logits, "nats": nats, "picks": eager.picks, "aside": aside}
    torch.save(tensors, folder / fmt)
    found = {
        "bits_per_byte": nats.mean().item() / math.log(2),
        "recall": recall_rates(engine, settings),
        "row_errors": eager.row_error,
    }
    print(f"{fmt}: {json.dumps(found)}", flush=True)
    return found


def over_base(nats: Tensor, base: Tensor, starts: int) -> dict[str, float]:
    """By how many percent the mean of ``nats`` `[S]` is above that of ``base``, and how sure.

    The standard error is that of the mean over parts of the text: ``starts`` neighbouring sequences
    share most of theirs and count as one.
    """
    excess = nats - base
    parts = torch.stack([part.mean() for part in excess.split(starts)])
    error = parts.std() / len(parts) ** 0.5 if len(parts) > 1 else torch.tensor(math.nan)
    percent = 100 / base.mean()
    return {
        "percent": (excess.mean() * percent).item(),
        "error": (error * percent).item(),
    }


def compare(settings: Settings, folder: Path, fmt: str) -> dict[str, Any]:
    """What needs the tensors of two formats."""
    ours, base = (torch.load(folder / name) for name in (fmt, BASE))
    kl, same = [], []
    for logits, expected in zip(ours["logits"], base["logits"], strict=True):
        log_p, log_q = (x.double().log_softmax(-1) for x in (expected, logits))
        kl.append((log_p.exp() * (log_p - log_q)).sum(-1).mean())
        same.append((expected.argmax(-1) == logits.argmax(-1)).double().mean())
    overlaps = [overlap(*picks) for picks in zip(ours["picks"], base["picks"], strict=True)]
    return {
        "over_bf16": over_base(ours["nats"], base["nats"], settings.starts),
        "kl": torch.stack(kl).mean().item(),
        "top1_agreement": torch.stack(same).mean().item(),
        "selection_overlap": sum(overlaps) / len(overlaps),
        "lossless": torch.equal(ours["aside"], base["aside"]),
    }


def evaluate(settings: Settings, jobs: int = 1) -> dict[str, Any]:
    """Measure all formats; see the top of this file for the result."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        task = partial(measure, settings, folder)
        if jobs == 1:
            found = dict(zip(MODES, map(task, MODES), strict=True))
        else:
            with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
                found = dict(zip(MODES, pool.map(task, MODES), strict=True))
        errors = found[BASE]["row_errors"]
        formats = {}
        for fmt, own in found.items():
            del own["row_errors"]
            formats[fmt] = own | compare(settings, folder, fmt) | {"row_error": errors[fmt]}
    return {
        "formats": formats,
        "model": settings.config.name,
        "compiled": settings.compile,
        "heldout_bytes": min(settings.heldout_bytes, len(corpus.heldout())),
        "recall_prompts": settings.prompts,
        "device": device_name(torch.device(settings.device)),
        "versions": versions(),
    }


def rows_of(result: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table."""
    formats = result["formats"]
    distances = list(formats[BASE]["recall"])
    head = [
        "format",
        "bits/byte",
        "over bf16",
        "KL, nats",
        "top-1 as bf16",
        *(f"recall at {name}" for name in distances),
        "same picks",
        "error of nope",
        "error of rope",
        "lossless, tail aside",
    ]
    rows = [
        [
            f"`{fmt}`",
            f"{values['bits_per_byte']:.4f}",
            "{percent:+.3f} ± {error:.3f} %".format(**values["over_bf16"]),
            f"{values['kl']:.1e}",
            f"{values['top1_agreement']:.2%}",
            *(f"{values['recall'][name]:.0%}" for name in distances),
            f"{values['selection_overlap']:.2%}",
            f"{values['row_error']['nope']:.2%}",
            f"{values['row_error']['rope']:.2%}",
            "yes" if values["lossless"] else "no",
        ]
        for fmt, values in formats.items()
    ]
    return head, rows


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table for the README."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", choices=PRESETS, default="bytes", help="shapes of the model")
    parser.add_argument("--weights", type=Path, help="checkpoint; by default the package's own")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--eager", action="store_true", help="do without torch.compile")
    parser.add_argument("--prompts", type=int, default=64, help="recall prompts per distance")
    parser.add_argument("--heldout-bytes", type=int, default=corpus.HELDOUT_BYTES, help="to score")
    parser.add_argument("--jobs", type=int, default=1, help="formats measured at the same time")
    parser.add_argument("--out", type=Path, help="folder for quality-<device>.json and .md")
    arguments = parser.parse_args()
    config = PRESETS[arguments.model]
    weights = arguments.weights or shipped_weights(config)
    if weights is None:
        parser.error(f"the package has no weights of {config.name!r}; give --weights")
    settings = Settings(
        config,
        weights,
        arguments.device,
        compile=not arguments.eager,
        prompts=arguments.prompts,
        heldout_bytes=arguments.heldout_bytes,
    )
    result = evaluate(settings, arguments.jobs)
    head, rows = rows_of(result)
    table = Table(*head, title=f"{config.name} on {result['device']}")
    for row in rows:
        table.add_row(*row)
    Console(width=180).print(table)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        device = re.sub(r"[^a-z0-9]+", "-", result["device"].lower().replace("nvidia", "")).strip(
            "-"
        )
        stem = arguments.out / f"quality-{device}"
        stem.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
        stem.with_suffix(".md").write_text(markdown(head, rows) + "\n")


if __name__ == "__main__":
    main()
