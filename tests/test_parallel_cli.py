"""``python -m fp8kv_inductor`` alone and under ``torchrun``."""

import json
import subprocess
import sys

import pytest
from parallel_ranks import ROOT, torchrun

DEMO = ("-m", "fp8kv_inductor", "demo", "--device", "cpu", "--json")
SHORT = ("--new-tokens", "8", "--prompt-bytes", "200")


def test_a_world_size_that_does_not_fit_the_model():
    """Every rank says so, and nothing reaches stdout."""
    process = torchrun(4, *DEMO, timeout=120)
    assert process.returncode != 0
    assert process.stdout == ""
    assert "found world size 4 and o_groups=2 in 'bytes'" in process.stderr
    assert "use 1 or 2" in process.stderr


@pytest.mark.slow
def test_two_ranks_give_the_tokens_of_one():
    alone = subprocess.run(
        [sys.executable, *DEMO, *SHORT], cwd=ROOT, capture_output=True, text=True, check=True
    )
    process = torchrun(2, *DEMO, *SHORT, timeout=1800)
    assert process.returncode == 0, process.stderr
    one, two = json.loads(alone.stdout), json.loads(process.stdout)
    assert (one["world_size"], two["world_size"]) == (1, 2)
    for mode in ("auto", "fp8_e4m3"):
        assert two[mode]["requests"] == one[mode]["requests"]
