"""Two processes that talk through gloo run the engine as one process does."""

import pytest
import torch
from engine_small import SMALL
from model_steps import Oracle, per_token
from parallel_ranks import PROMPTS, ROOT, results, torchrun

from fp8kv_inductor.models.deepseek_v4 import random_weights
from fp8kv_inductor.parallel import SINGLE

SCRIPT = ROOT / "tests" / "parallel_ranks.py"


@pytest.mark.parametrize(
    ("options", "graphs"), [((), 0), pytest.param(("--compile",), 2, marks=pytest.mark.slow)]
)
def test_two_ranks(tmp_path, options, graphs):
    """Both have the same logits, to the bit, and those of one process up to fp32 arithmetic."""
    process = torchrun(2, SCRIPT, tmp_path, *options, timeout=600)
    assert process.returncode == 0, process.stderr
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert torch.equal(first["logits"], second["logits"])
    alone = results(SINGLE)
    for tokens in ("greedy", "drawn"):
        assert first[tokens] == second[tokens] == alone[tokens]
    assert first["graphs"] == second["graphs"] == graphs
    weights = random_weights(SMALL, 0, torch.float32)
    oracle = Oracle(SMALL, weights, torch.tensor(PROMPTS[0]), "bf16", rounding=False)
    assert per_token(first["logits"], oracle.exact).max() <= oracle.worst
    assert per_token(first["logits"], alone["logits"]).max() <= oracle.worst


def test_a_rank_that_fails_ends_all(tmp_path):
    process = torchrun(2, SCRIPT, tmp_path, "--leave", timeout=120)
    assert process.returncode != 0
    assert "rank 1 leaves" in process.stderr
    assert not list(tmp_path.iterdir())
