"""Train the small model ``bytes`` to write text and to repeat codes from thousands of bytes back.

    python -m bench.quality.train --minutes 8 --out bytes.safetensors

The loss has four parts: bytes of the text, digits of repeated codes, letters of repeated blocks,
and the indexer's (see ``forward.py``). First all compressed rows are visible and sequences are
short; then queries see what the indexer picks, and sequences of up to 16K come in. All stages are
shares of the time budget. The best checkpoint so far, by bits per byte plus missed recall, lies
under ``--out`` all the time: matrices bf16, vectors fp32.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from safetensors.torch import save_file
from torch import Tensor

from bench.quality import corpus, recall
from bench.quality.forward import TrainingForward
from fp8kv_inductor.formats import FORMATS, RowFormat, get_format
from fp8kv_inductor.model_config import BYTES, ModelConfig
from fp8kv_inductor.models.deepseek_v4 import random_weights
from fp8kv_inductor.registration import register

SPARSE_FROM = 0.3
"""Share of the budget after which queries see only what the indexer picks."""

LONG_LENGTH = max(recall.DISTANCES.values()) + 512
STAGES = (
    # until this share of the budget: probabilities of short, middle and long sequences,
    # and what they are
    (SPARSE_FROM, (1.0, 0.0, 0.0), recall.Mix(copies=0.25, dense=0.35)),
    (0.6, (0.6, 0.3, 0.1), recall.Mix(copies=0.1, dense=0.3)),
    (1.0, (0.5, 0.25, 0.25), recall.Mix(copies=0.02, dense=0.25)),
)
WARM_UP_STEPS = 100
FLAT_UNTIL = 0.4
"""Share of the budget after which the learning rate falls, in a line, to nearly nothing."""

LOSS_WEIGHTS = {"text": 1.0, "answer": 1.0, "copy": 0.5, "index": 1.0}
ANSWER_FOCUS = 8.0
"""Weight in the index loss of a query that looks for a digit."""
READ_STEPS = 20
"""Losses are read, and logged, once in so many steps."""
ROUTER_STEP = 1e-3
"""How far a router's bias moves per step against the load of its expert."""


class Schedule(NamedTuple):
    """Sizes of a run.

    Attributes:
        lengths: tokens of short, middle and long sequences.
        tokens: of a step, at least one sequence.
        check_prompts: recall prompts per distance at a check.
        check_bytes: held-out bytes at a check.
        distances: name -> bytes, recall distances of a check.
    """

    lengths: tuple[int, int, int] = (1024, 4096, LONG_LENGTH)
    tokens: int = 32768
    check_prompts: int = 16
    check_bytes: int = 65536
    distances: dict[str, int] = recall.DISTANCES


class Check(NamedTuple):
    """Quality on held-out text, by the training forward, with weights as they are saved.

    Attributes:
        bits_per_byte: of the text.
        recall: by name of the distance, share of codes whose digits are all right.
    """

    bits_per_byte: float
    recall: dict[str, float]

    @property
    def cost(self) -> float:
        """What the best checkpoint has least of."""
        return self.bits_per_byte + sum(1 - r for r in self.recall.values()) / len(self.recall)


def initial_weights(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Random fp32 weights on the CPU, with residual streams that start out nearly apart.

    Comb matrices begin near the identity, and what is written to the streams begins small.
    """
    weights = random_weights(config, seed, torch.float32)
    streams = config.hc_mult
    for name, weight in weights.items():
        if name.endswith(("gate.bias", "attn_sink")):
            weight.zero_()
        elif name.endswith(("hc_attn_base", "hc_ffn_base")):
            weight[2 * streams :] += 3 * torch.eye(streams).flatten()
        elif name.endswith("_scale"):
            weight.fill_(0.3)
        elif name.endswith((".wo_b.weight", ".w2.weight")):
            weight.mul_(0.5)
    return weights


def as_saved(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights as the checkpoint holds them: matrices bf16, everything else as it is."""
    return {
        name: w.detach().to(torch.bfloat16) if w.dim() > 1 and w.is_floating_point() else w.detach()
        for name, w in weights.items()
    }


def to_tokens(array: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """`[...]` numbers to int64 on the device; bool stays bool."""
    tensor = torch.from_numpy(array.copy()).to(device)
    return tensor if tensor.dtype == torch.bool else tensor.to(torch.int64)


def losses(
    model: TrainingForward, sequences: recall.Sequences, device: torch.device, sparse: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Text, answer, copy and index losses (nats per byte), and the routers' loads."""
    tokens = to_tokens(sequences.tokens, device)
    text, answers, copies = (
        to_tokens(mask[:, 1:], device)
        for mask in (sequences.text, sequences.answers, sequences.copies)
    )
    focus = F.pad(1 + (ANSWER_FOCUS - 1) * answers.to(model.dtype), (0, 1), value=1.0)
    result = model(tokens, sparse, focus)
    nats = F.cross_entropy(
        result.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    ).view_as(text)
    parts = {
        name: (nats * mask).sum() / mask.sum().clamp_min(1)
        for name, mask in (("text", text), ("answer", answers), ("copy", copies))
    }
    return parts | {"index": result.index_loss}, result.loads


@torch.no_grad()
def check(
    model: TrainingForward, text: recall.Bytes, schedule: Schedule, device: torch.device
) -> Check:
    """Measure on held-out text."""
    plain = model.again(
        {
            name: w.to(model.dtype) if w.is_floating_point() else w
            for name, w in as_saved(dict(model.weights)).items()
        }
    )
    length = schedule.lengths[1]
    rows = text[: max(length, schedule.check_bytes) // length * length].reshape(-1, length)
    nats = []
    for row in rows:
        tokens = to_tokens(row[None], device)
        logits = plain(tokens).logits[0, :-1]
        nats.append(F.cross_entropy(logits, tokens[0, 1:]))
    rates = {}
    for name, distance in schedule.distances.items():
        right = 0
        for question in recall.prompts(0, text, distance, schedule.check_prompts):
            tokens = torch.tensor([question.tokens + question.answer], device=device)
            count = tokens.shape[1]
            padded = F.pad(tokens, (0, -count % model.config.window_size))
            logits = plain(padded).logits[0, count - recall.DIGITS - 1 : count - 1]
            right += torch.equal(logits.argmax(-1), tokens[0, -recall.DIGITS :])
        rates[name] = right / schedule.check_prompts
    return Check(torch.stack(nats).mean().item() / math.log(2), rates)


def learning_rate(peak: float, step: int, elapsed: float) -> float:
    """Rate at a step, ``elapsed`` being the share of the budget that is used up."""
    fall = 1 - max(0.0, elapsed - FLAT_UNTIL) / (1 - FLAT_UNTIL)
    return peak * min(1.0, (step + 1) / WARM_UP_STEPS) * max(0.02, fall)


def snapshot(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A copy of the weights."""
    return {name: w.detach().clone() for name, w in weights.items()}


@torch.no_grad()
def restore(weights: dict[str, Tensor], good: dict[str, Tensor]) -> None:
    """Go back to a snapshot."""
    for name, weight in weights.items():
        weight.copy_(good[name])


def save(weights: dict[str, Tensor], path: Path, about: dict[str, Any]) -> None:
    """Write a checkpoint with ``about`` as its metadata, in one move."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    tensors = {name: w.cpu().contiguous() for name, w in as_saved(weights).items()}
    save_file(tensors, partial, {key: str(value) for key, value in about.items()})
    partial.replace(path)


def compiled_if_possible(model: TrainingForward, schedule: Schedule) -> TrainingForward:
    """The same model compiled if a step of it works here, else as it is."""
    register()  # for its kernels that load what they have stored: lowerings/reloads.py
    compiled = model.again(model.weights, compile=True)
    device = next(iter(model.weights.values())).device
    length = schedule.lengths[0]
    tokens = torch.zeros(max(1, schedule.tokens // length), length, dtype=torch.int64)
    try:
        compiled(tokens.to(device)).logits.square().mean().backward()
    except Exception as error:  # whatever a compiler can raise: training goes on without it
        print(f"torch.compile does not work here, training eagerly: {error}", flush=True)
        return model
    return compiled


def train(
    config: ModelConfig,
    minutes: float,
    out: Path,
    device: torch.device,
    *,
    text: bytes,
    schedule: Schedule | None = None,
    peak: float = 2e-3,
    seed: int = 0,
    compile: bool = False,
    row_format: RowFormat | None = None,
    max_steps: int | None = None,
    started: float | None = None,
) -> Check:
    """Train for ``minutes`` and leave the best checkpoint in ``out``, its log beside it.

    A device with little memory takes fewer ``schedule.tokens``; long sequences are computed in
    chunks of queries, so what they need grows with their length alone.

    Args:
        config: shapes.
        minutes: budget, from ``started`` on.
        out: the checkpoint; ``.jsonl`` beside it is the log.
        device: where to train. On CUDA wide products are bf16.
        text: to train on.
        schedule: sizes, by default those of the GPU run.
        peak: learning rate.
        seed: of weights and sequences.
        compile, row_format: see :class:`TrainingForward`.
        max_steps: stop earlier.
        started: ``time.monotonic()`` when the budget began, by default now.

    Returns:
        The best check.
    """
    schedule = schedule or Schedule()
    started = time.monotonic() if started is None else started
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    weights = {name: w.to(device) for name, w in initial_weights(config, seed).items()}
    trained = {
        name: w.requires_grad_()
        for name, w in weights.items()
        if w.is_floating_point() and not name.endswith("gate.bias")
    }
    optimizer = torch.optim.AdamW(
        [
            {"params": [w for w in trained.values() if w.dim() > 1], "weight_decay": 0.05},
            {"params": [w for w in trained.values() if w.dim() == 1], "weight_decay": 0.0},
        ],
        lr=peak,
        betas=(0.9, 0.95),
        fused=device.type == "cuda",
    )
    products = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = TrainingForward(config, weights, torch.float32, products, row_format=row_format)
    if compile:
        model = compiled_if_possible(model, schedule)
    source = np.frombuffer(text, np.uint8)
    held = np.frombuffer(corpus.heldout(), np.uint8)
    rng = np.random.default_rng(seed)
    best: Check | None = None
    next_check, step, seconds = 0.1, 0, 0.0
    means: dict[str, Tensor] = {}
    good = snapshot(weights)
    log = out.with_suffix(".jsonl")
    log.parent.mkdir(parents=True, exist_ok=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console) as progress, log.open("w") as lines:

        def note(**values: Any) -> None:
            lines.write(json.dumps(values) + "\n")
            lines.flush()

        task = progress.add_task("", total=1.0)
        while True:
            elapsed = (time.monotonic() - started) / (60 * minutes)
            # A last check and a last step have to fit.
            last = elapsed + 2 * seconds / (60 * minutes) >= 1 or step == max_steps
            if last or elapsed >= next_check:
                next_check = elapsed + 0.1
                begun = time.monotonic()
                now = check(model, held, schedule, device)
                seconds = time.monotonic() - begun
                if math.isfinite(now.bits_per_byte):
                    good = snapshot(weights)
                note(step=step, elapsed=elapsed, check=now._asdict(), seconds=seconds)
                rates = ", ".join(f"{k} {v:.0%}" for k, v in now.recall.items())
                progress.console.print(
                    f"step {step}, {elapsed:.0%}: {now.bits_per_byte:.3f} bits/byte, recall {rates}"
                )
                if math.isfinite(now.cost) and (best is None or now.cost < best.cost):
                    best = now
                    about = {
                        "model": config.name,
                        "steps": step,
                        "minutes": minutes,
                        "seed": seed,
                        "rows": row_format.name if row_format else "bf16",
                        "bits_per_byte": now.bits_per_byte,
                        "recall": json.dumps(now.recall),
                    }
                    save(weights, out, about)
                if last:
                    return best or now
            _, shares, mix = next(s for s in STAGES if elapsed < s[0])
            length = schedule.lengths[int(rng.choice(3, p=shares))]
            size = max(1, schedule.tokens // length)
            rate = learning_rate(peak, step, elapsed)
            for group in optimizer.param_groups:
                group["lr"] = rate
            parts, loads = losses(
                model,
                recall.batch(rng, source, size, length, mix),
                device,
                sparse=elapsed >= SPARSE_FROM,
            )
            total = sum(LOSS_WEIGHTS[name] * part for name, part in parts.items())
            optimizer.zero_grad(set_to_none=True)
            total.backward()
            norm = torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
            optimizer.step()
            balance(config, weights, loads)
            step += 1
            with torch.no_grad():
                for name, part in (parts | {"norm": norm}).items():
                    means[name] = means.get(name, part).lerp(part, 0.05)
            if step % READ_STEPS:
                continue
            # The only place where the host waits for the device.
            values = {name: mean.item() for name, mean in means.items()}
            note(step=step, elapsed=elapsed, rate=rate, length=length, **values)
            described = ", ".join(f"{name} {value:.3f}" for name, value in values.items())
            progress.update(task, completed=elapsed, description=f"step {step}: {described}")
            if step % 200 == 0 and not console.is_terminal:
                console.print(f"step {step}, {elapsed:.1%}: {described}")
            if not all(map(math.isfinite, values.values())):
                console.print(f"step {step}: not finite; back to the weights of the last check")
                restore(weights, good)
                optimizer.state.clear()
                means.clear()


@torch.no_grad()
def balance(config: ModelConfig, weights: dict[str, Tensor], loads: dict[str, Tensor]) -> None:
    """Move routers' biases against the load of their experts."""
    for name, load in loads.items():
        if (bias := weights.get(f"{name}.bias")) is not None:
            bias += ROUTER_STEP * torch.sign(1 / config.n_routed_experts - load)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="budget, corpus included")
    parser.add_argument("--out", type=Path, default=Path("bytes.safetensors"), help="checkpoint")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0, help="of weights and sequences")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--tokens", type=int, default=Schedule().tokens, help="of a step")
    parser.add_argument(
        "--rows", choices=FORMATS, default="bf16", help="format of the pools to get used to"
    )
    parser.add_argument("--eager", action="store_true", help="do without torch.compile")
    arguments = parser.parse_args()
    started = time.monotonic()
    text = corpus.training_text()
    print(f"{len(text)} bytes of text after {time.monotonic() - started:.0f} s", flush=True)
    device = torch.device(arguments.device)
    best = train(
        BYTES,
        arguments.minutes,
        arguments.out,
        device,
        text=text,
        schedule=Schedule(tokens=arguments.tokens),
        peak=arguments.rate,
        seed=arguments.seed,
        compile=device.type == "cuda" and not arguments.eager,
        row_format=None if arguments.rows == "bf16" else get_format(arguments.rows),
        started=started,
    )
    if device.type == "cuda":
        print(f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB of GPU memory at most")
    print(json.dumps(best._asdict()))


if __name__ == "__main__":
    main()
