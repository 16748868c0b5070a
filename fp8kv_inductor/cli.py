"""The ``fp8kv`` command."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from fp8kv_inductor import demo, doctor, plan
from fp8kv_inductor.budget import WINDOW_RATIO
from fp8kv_inductor.chains import CHAINS
from fp8kv_inductor.config import KV_CACHE_DTYPES, ConfigError
from fp8kv_inductor.formats import FORMATS, WEIGHT_FORMATS
from fp8kv_inductor.model_config import PRESETS
from fp8kv_inductor.parallel import from_environment
from fp8kv_inductor.pools import Pool
from fp8kv_inductor.registration import register

TARGETS = ("sm_89", "sm_90", "sm_100", "sm_120")
"""Compute capabilities that ``fp8kv code`` generates for."""

BENCHMARKS = ("generate", "indexer", "read", "step", "store")
"""Scripts of ``bench/``."""

UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def parse_bytes(text: str) -> int:
    """``"64MiB"``, ``"1.5 GiB"`` or plain bytes.

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(|KiB|MiB|GiB)", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"found {text!r}; needed: a number of bytes, or of KiB, MiB or GiB as in 64MiB"
        )
    return int(float(match[1]) * UNITS[match[2]])


def at_least(least: int) -> Callable[[str], int]:
    """A parser of integers from ``least`` on."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"found {text!r}; needed: {least} or more")
        return int(text)

    return parse


def ratio(text: str) -> float:
    """A positive number.

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    if not re.fullmatch(r"\d*\.?\d+", text) or not float(text):
        raise argparse.ArgumentTypeError(f"found {text!r}; needed: a positive number as in 0.2")
    return float(text)


def read_text(path: Path | None, size: int) -> bytes:
    """The first ``size`` bytes of a file, or of the text that comes with the package.

    Raises:
        ConfigError: the file is empty.
        OSError: it cannot be read.
    """
    source = path or resources.files("fp8kv_inductor") / "data" / "row.txt"
    text = source.read_bytes()[:size]
    if not text:
        raise ConfigError(f"found an empty file {path}; needed: one byte or more")
    return text


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="fp8kv", description="DeepSeek-V4 on 8-bit KV pools through torch.compile."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "demo",
        help="run one text through bf16 and fp8 pools, eager and compiled",
        epilog="example: fp8kv demo --text README.md --prompt-bytes 512 --json",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="file whose bytes are the tokens; without it, a text that comes with the package",
    )
    command.add_argument("--json", action="store_true", help="print JSON instead of a table")
    command.add_argument("--model", choices=PRESETS, default="bytes", help="which model")
    command.add_argument(
        "--new-tokens", type=at_least(2), default=32, metavar="N", help="tokens to generate"
    )
    command.add_argument(
        "--prompt-bytes", type=at_least(1), default=1024, metavar="N", help="bytes to start from"
    )
    command.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where")
    command.add_argument(
        "--budget", type=parse_bytes, default="64MiB", metavar="BYTES", help="memory for the pools"
    )
    command.add_argument("--seed", type=int, default=0, help="of random weights")
    command.set_defaults(run=run_demo)

    command = commands.add_parser(
        "doctor",
        help="say what runs here and how: versions, device, cache modes, lowerings",
        description="Say what runs here and how. Exits with 1 if fp8 pools cannot be had.",
        epilog="example: fp8kv doctor --json",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where")
    command.add_argument("--json", action="store_true", help="print JSON instead of a table")
    command.set_defaults(run=run_doctor)

    command = commands.add_parser(
        "plan",
        help="split a GPU between KV pages and expert slots; nothing is allocated",
        description="Split a GPU between KV pages and slots for routed experts, per cache mode. "
        "Experts without a slot stay in host memory. All bytes are those of one GPU.",
        epilog="example: fp8kv plan --model v4-flash --vram 48GiB --tp 2 --context 32768 --json",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    needed: dict[str, Any] = {"required": True, "default": argparse.SUPPRESS}
    command.add_argument("--model", choices=PRESETS, **needed, help="shapes of the model")
    command.add_argument(
        "--vram", type=parse_bytes, **needed, metavar="BYTES", help="memory of one GPU"
    )
    command.add_argument(
        "--tp", type=at_least(1), default=1, metavar="N", help="GPUs that share the model"
    )
    command.add_argument(
        "--kv-cache-dtype",
        choices=KV_CACHE_DTYPES,
        nargs="+",
        default=["auto", "fp8_e4m3"],
        help="cache modes to compare",
    )
    command.add_argument(
        "--context", type=at_least(1), default=4096, metavar="N", help="tokens of a request"
    )
    command.add_argument(
        "--window-ratio",
        type=ratio,
        default=WINDOW_RATIO,
        metavar="R",
        help="window pages per full-history page",
    )
    command.add_argument(
        "--expert-dtype", choices=WEIGHT_FORMATS, default="fp4", help="routed experts"
    )
    command.add_argument(
        "--linear-dtype", choices=WEIGHT_FORMATS, default="fp8", help="other linear layers"
    )
    command.add_argument(
        "--workspace",
        type=parse_bytes,
        metavar="BYTES",
        help="left for activations, graphs and libraries; without it, a tenth of --vram",
    )
    command.add_argument("--json", action="store_true", help="print JSON instead of a table")
    command.set_defaults(run=run_plan)

    command = commands.add_parser(
        "code",
        help="show the CUDA code that torch.compile generates; no GPU is needed",
        epilog="example: fp8kv code store-chain --target sm_90 --rows 64 --json",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command.add_argument("chain", choices=CHAINS, help="what to compile")
    command.add_argument("--target", choices=TARGETS, default="sm_90", help="compute capability")
    command.add_argument(
        "--rows", type=at_least(1), default=64, metavar="N", help="tokens of the graph"
    )
    command.add_argument("--fmt", choices=FORMATS, default="fp8_e4m3", help="row format")
    command.add_argument("--json", action="store_true", help="print JSON instead of source")
    command.set_defaults(run=run_code)

    command = commands.add_parser(
        "bench",
        help="run a benchmark of this checkout on a GPU",
        epilog="example: fp8kv bench read --json read.json",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command.add_argument("benchmark", choices=BENCHMARKS, help="what to measure")
    command.add_argument("--json", type=Path, metavar="FILE", help="file for the results as JSON")
    command.add_argument("--out", type=Path, metavar="DIR", help="folder for JSON and CSV")
    command.set_defaults(run=run_bench)
    return parser


def make_progress(disable: bool = False) -> Progress:
    """A bar on stderr for each task, so that stdout has the result alone."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), disable=disable)


def run_demo(arguments: argparse.Namespace) -> None:
    """``fp8kv demo``: the result on stdout, progress on stderr, both of rank 0."""
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("found no CUDA device; --device cuda needs one; use --device cpu")
    options = demo.Options(
        model=arguments.model,
        text=read_text(arguments.text, arguments.prompt_bytes),
        new_tokens=arguments.new_tokens,
        device=None if arguments.device == "auto" else arguments.device,
        budget=arguments.budget,
        seed=arguments.seed,
    )
    with (
        from_environment(options.device) as parallel,
        make_progress(disable=parallel.rank > 0) as progress,
    ):
        result = demo.run(options, progress, parallel)
    if parallel.rank > 0:
        return
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        demo.print_table(result, Console())


def run_doctor(arguments: argparse.Namespace) -> None:
    """``fp8kv doctor``: the result on stdout, then a ConfigError if fp8 pools cannot be had."""
    result = doctor.run(None if arguments.device == "auto" else arguments.device)
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        doctor.print_table(result, Console())
    if result["problem"] is not None:
        raise ConfigError(result["problem"])


def run_plan(arguments: argparse.Namespace) -> None:
    """``fp8kv plan``: the result on stdout."""
    result = plan.run(
        plan.Options(
            model=arguments.model,
            modes=arguments.kv_cache_dtype,
            vram=arguments.vram,
            tp=arguments.tp,
            context=arguments.context,
            window_ratio=arguments.window_ratio,
            expert_dtype=arguments.expert_dtype,
            linear_dtype=arguments.linear_dtype,
            workspace=arguments.workspace,
        )
    )
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        plan.print_table(result, Console())


def run_bench(arguments: argparse.Namespace) -> None:
    """``fp8kv bench``: one of the scripts of ``bench/``, which a wheel does not bring along."""
    script = Path(__file__).parent.parent / "bench" / f"{arguments.benchmark}.py"
    if not script.exists():
        raise ConfigError(f"found no {script}; benchmarks need a checkout of the repository")
    if not torch.cuda.is_available():
        raise ConfigError("found no CUDA device; benchmarks measure GPU kernels and need one")
    command = [sys.executable, str(script)]
    for name in ("json", "out"):
        if getattr(arguments, name):
            command += [f"--{name}", str(getattr(arguments, name))]
    subprocess.run(command, check=True)


def run_code(arguments: argparse.Namespace) -> None:
    """``fp8kv code``: generated source, or JSON about it, on stdout."""
    from fp8kv_inductor.lowerings.cross_compile import cuda_source, launches, pool_copies

    register()
    torch.manual_seed(0)
    fn, args = CHAINS[arguments.chain](arguments.rows, arguments.fmt)
    with make_progress() as progress:
        task = progress.add_task(f"{arguments.chain} for {arguments.target}", total=1)
        code = cuda_source(fn, args, int(arguments.target.removeprefix("sm_")))
        progress.advance(task)
    modules = [value for value in (fn, *args) if isinstance(value, torch.nn.Module)]
    pools = [pool for root in modules for pool in root.modules() if isinstance(pool, Pool)]
    if not arguments.json:
        print(code.wrapper)
        return
    result = {
        "target": arguments.target,
        "kernels": len(launches(code.wrapper)),
        "names": launches(code.wrapper),
        "pool_copies": len(pool_copies(code.wrapper, *(pool.data for pool in pools))),
        "source": code.wrapper,
    }
    print(json.dumps(result, indent=2))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 if it worked, 1 with the reason in one line on stderr, 2 for bad usage."""
    arguments = make_parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except (ConfigError, OSError, subprocess.CalledProcessError) as error:
        print(f"fp8kv {arguments.command}: {error}", file=sys.stderr)
        return 1
    return 0
