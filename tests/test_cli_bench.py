"""``fp8kv bench`` and the scripts behind it, as far as a machine without a GPU can tell."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fp8kv_inductor import cli

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", cli.BENCHMARKS)
def test_scripts_know_their_options(name):
    script = str(ROOT / "bench" / f"{name}.py")
    shown = subprocess.run(
        [sys.executable, script, "--help"], capture_output=True, text=True, check=True
    )
    assert "--json" in shown.stdout and "--out" in shown.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_gpu_is_said_in_one_line(capsys):
    assert cli.main(["bench", "read"]) == 1
    error = capsys.readouterr().err
    assert "found no CUDA device" in error and error.count("\n") == 1
