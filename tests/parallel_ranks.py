"""What each rank of a small engine computes, and ``torchrun`` to start the ranks.

``python -m torch.distributed.run --nproc-per-node 2 tests/parallel_ranks.py FOLDER`` saves it;
``--compile`` compiles the engine, ``--leave`` lets rank 1 fail while rank 0 waits for it.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch
from engine_small import make_engine, some_tokens
from torch._dynamo.utils import counters

from fp8kv_inductor.parallel import from_environment

ROOT = Path(__file__).parent.parent
PROMPTS = [some_tokens(count, count) for count in (301, 5, 130)]
NEW_TOKENS = 6


def torchrun(world_size, *arguments, timeout):
    """Start ranks, one thread each; the finished process."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *launcher, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def results(parallel, compile=False):
    """Logits along the first prompt, tokens after each, greedy and drawn, and graphs compiled."""
    engine = make_engine(rounding=False, compile=compile, parallel=parallel)
    with torch._dynamo.config.patch(error_on_recompile=True):
        return {
            "logits": engine.score(PROMPTS[0]),
            "greedy": engine.generate(PROMPTS, NEW_TOKENS),
            "drawn": engine.generate(PROMPTS, NEW_TOKENS, temperature=1.0),
            "graphs": counters["stats"]["unique_graphs"],
        }


def main(folder, *options):
    """Run as one rank."""
    with from_environment("cpu") as parallel:
        if "--leave" in options and parallel.rank == 1:
            raise RuntimeError("rank 1 leaves")
        found = results(parallel, "--compile" in options)
    torch.save(found, Path(folder) / f"{parallel.rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
