"""Every example runs, and says what it should."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.usefixtures("one_thread")

EXAMPLES = Path(__file__).parent.parent / "examples"
RUNS = {
    "compile_your_model.py": ([], "100 tokens, 8704 bytes"),
    "cuda_graph.py": (["--device", "cpu"], "8 steps on cpu: each equals the eager layer"),
    "engine_backend.py": ([], "fp8 rows give the bits that bf16 rows give"),
    "plan_capacity.py": ([], "6025 pages of 128 tokens, 11"),
    "transformers_generate.py": ([], "2 sequences of 32 tokens"),
}


def run(name, arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_all_of_them_are_here():
    assert {path.name for path in EXAMPLES.glob("*.py")} == RUNS.keys()


@pytest.mark.parametrize("name", RUNS)
def test_runs(name, monkeypatch, capsys):
    arguments, says = RUNS[name]
    assert says in run(name, arguments, monkeypatch, capsys)


@pytest.mark.gpu
def test_captures_a_graph(monkeypatch, capsys):
    assert "8 steps on cuda" in run("cuda_graph.py", [], monkeypatch, capsys)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run("cuda_graph.py", [], monkeypatch, capsys)
    assert "found no GPU; --device cpu" in capsys.readouterr().err
