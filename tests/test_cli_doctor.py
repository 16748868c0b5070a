"""``fp8kv doctor``: what it finds here, on GPUs that are made up, and on a torch without names."""

import json

import pytest
import torch
from rich.console import Console

from fp8kv_inductor import __version__, _compat, cli, doctor, lowerings
from fp8kv_inductor.config import KV_CACHE_DTYPES
from fp8kv_inductor.kernels import attention

LOWERINGS = ["rows", "attention", "indexer"]


@pytest.fixture
def gpu(monkeypatch):
    """Gives this machine a GPU of some compute capability, as far as the doctor looks."""

    def install(*capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Made-up GPU")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)

    return install


@pytest.fixture
def no_gpu(monkeypatch):
    def answer(device=None):
        raise RuntimeError("no driver\nno GPU")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", answer)


def run_json(capsys, *arguments, code=0):
    """The result and what stderr says."""
    assert cli.main(["doctor", "--json", *arguments]) == code
    captured = capsys.readouterr()
    return json.loads(captured.out), captured.err


def paths(result):
    return [result["lowerings"][name]["path"] for name in LOWERINGS]


def test_versions(capsys):
    result, _ = run_json(capsys, "--device", "cpu")
    assert list(result) == ["versions", "device", "kv_cache_dtypes", "lowerings", "problem"]
    assert result["versions"]["fp8kv_inductor"] == __version__
    assert result["versions"]["torch"] == torch.__version__
    assert set(result["versions"]) == {"fp8kv_inductor", "python", "torch", "triton"}


def test_the_cpu_has_every_mode_and_reductions(capsys, no_gpu):
    result, error = run_json(capsys)
    assert result["device"] == {"type": "cpu", "name": "cpu", "capability": None}
    assert {mode: each["format"] for mode, each in result["kv_cache_dtypes"].items()} == (
        KV_CACHE_DTYPES
    )
    assert result["kv_cache_dtypes"]["fp8_e4m3"]["bytes_per_element"] == 1.0625
    assert not any(each["problem"] for each in result["kv_cache_dtypes"].values())
    assert paths(result) == ["reduced"] * 3
    assert "reductions" in result["lowerings"]["rows"]["reason"]
    assert result["problem"] is None and error == ""


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (12, 0)])
def test_gpus_take_the_full_path(capsys, gpu, capability):
    gpu(*capability)
    result, _ = run_json(capsys)
    assert result["device"]["name"] == "Made-up GPU"
    assert result["device"]["capability"] == ".".join(map(str, capability))
    assert paths(result) == ["full"] * 3
    gluon = "kernels/hopper" in result["lowerings"]["attention"]["reason"]
    assert gluon == (capability == (9, 0))


def test_sm_90_without_gluon_reads_by_template(capsys, gpu, monkeypatch):
    gpu(9, 0)
    monkeypatch.setattr(attention, "hopper_read", lambda: None)
    result, _ = run_json(capsys)
    assert paths(result) == ["full", "reduced", "full"]
    assert result["lowerings"]["attention"]["reason"].startswith("Triton template; this triton")


@pytest.mark.parametrize("name", LOWERINGS)
def test_missing_names_leave_the_eager_operator(capsys, monkeypatch, name):
    """The positive control is the CPU's test above, where nothing is missing."""
    monkeypatch.setattr(
        _compat, "missing_names", lambda lowering: ["torch:gone"] if lowering == name else []
    )
    result, error = run_json(capsys, "--device", "cpu")
    assert result["lowerings"][name]["path"] == "eager"
    reason = result["lowerings"][name]["reason"]
    assert reason == f"needs torch:gone (found torch {torch.__version__})"
    assert paths(result).count("reduced") == 2
    assert result["problem"] is None and error == "", "eager operators are right, only slower"


def test_a_name_that_really_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(_compat.LOWERING_NAMES, "rows", ("torch._inductor.ir:NoSuchThing",))
    path = doctor.lowering_path("rows", torch.device("cpu"), None)
    assert path.path == "eager" and "torch._inductor.ir:NoSuchThing" in path.reason


def test_asking_does_not_register_twice():
    assert lowerings.register_file("rows") is lowerings.register_file("rows")


def test_an_old_gpu_cannot_have_fp8(capsys, gpu):
    gpu(8, 0)
    result, error = run_json(capsys, code=1)
    modes = result["kv_cache_dtypes"]
    assert modes["auto"]["problem"] is None
    assert all("found a GPU of compute" in modes[m]["problem"] for m in modes if m != "auto")
    assert error == f"fp8kv doctor: {result['problem']}\n" and error.count("\n") == 1


def test_a_gpu_that_does_not_answer(capsys, no_gpu):
    result, error = run_json(capsys, "--device", "cuda", code=1)
    assert result["device"] == {"type": "cuda", "name": None, "capability": None}
    assert result["lowerings"] == {}
    assert result["kv_cache_dtypes"]["auto"]["problem"] == result["problem"]
    (line,) = error.splitlines()
    assert line.startswith("fp8kv doctor: found no usable CUDA device")


def test_a_gpu_without_triton(capsys, gpu, monkeypatch):
    gpu(9, 0)
    monkeypatch.setattr(doctor, "triton_version", lambda: None)
    result, error = run_json(capsys, code=1)
    assert result["versions"]["triton"] is None
    assert "found no triton" in error and error.count("\n") == 1


def test_table(capsys, gpu):
    gpu(9, 0)
    console = Console(width=120)
    with console.capture() as captured:
        doctor.print_table(doctor.run(), console)
    table = captured.get()
    for words in ("Made-up GPU", "9.0", torch.__version__, "1.0625 bytes/element", "works here"):
        assert words in table
    (row,) = (line for line in table.splitlines() if "lowerings/attention.py" in line)
    assert "full" in row and "kernels/hopper" in row


def test_without_json_a_table_goes_to_stdout(capsys, no_gpu):
    assert cli.main(["doctor", "--device", "cuda"]) == 1
    captured = capsys.readouterr()
    assert "no cuda" in captured.out and captured.err.count("\n") == 1
