"""``fp8kv demo``: what it prints and how it ends."""

import json
from dataclasses import replace

import pytest
import torch
from engine_small import ONE_LAYER
from rich.console import Console

from fp8kv_inductor import __version__, cli
from fp8kv_inductor.demo import print_table, text_of
from fp8kv_inductor.model_config import PRESETS

NEW_TOKENS = 4


@pytest.fixture(scope="module", autouse=True)
def one_layer():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "one-layer", replace(ONE_LAYER, vocab_size=256))
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("demo") / "text.bin"
    path.write_bytes(bytes(range(256)))
    return path


def demo(*arguments):
    common = ("demo", "--device", "cpu", "--model", "one-layer", "--budget", "4MiB")
    return cli.main([*common, "--new-tokens", str(NEW_TOKENS), *arguments])


def test_json_is_all_that_stdout_gets(capsys, text):
    assert demo("--json", "--text", str(text), "--prompt-bytes", "200") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["device"] == "cpu"
    assert result["versions"]["fp8kv_inductor"] == __version__
    assert result["versions"]["torch"] == torch.__version__
    assert result["prompt_bytes"] == [200, 100, 50, 25]
    auto, fp8 = result["auto"], result["fp8_e4m3"]
    assert auto["bytes_per_element"] == 2.0
    assert fp8["bytes_per_element"] == 1.0625
    assert fp8["bytes_per_token"] < auto["bytes_per_token"]
    assert fp8["num_pages"] > auto["num_pages"]
    for mode in (auto, fp8):
        assert mode["kernels"] > 0
        assert mode["eager_tok_s"] > 0 and mode["compiled_tok_s"] > 0
        assert mode["tokens"] == mode["requests"][0]
        assert [len(tokens) for tokens in mode["requests"]] == [NEW_TOKENS] * 4
        assert mode["text"] == text_of(mode["tokens"])
    assert result["weights"] == "random"
    same = torch.tensor(auto["requests"]) == torch.tensor(fp8["requests"])
    assert result["token_agreement"] == pytest.approx(same.double().mean().item())
    assert result["max_logit_diff"] > 0

    console = Console(width=120)
    with console.capture() as captured:
        print_table(result, console)
    table = captured.get()
    for words in ("bytes per KV element", "2.0000", "1.0625", "tokens/s compiled", "that agree"):
        assert words in table
    assert "writes:" not in table, "random weights write nothing worth reading"
    (row,) = (line for line in table.splitlines() if "kernels generated" in line)
    assert str(auto["kernels"]) in row and str(fp8["kernels"]) in row

    result |= {"weights": "trained", "fp8_e4m3": fp8 | {"text": "a row [sic]"}}
    with console.capture() as captured:
        print_table(result, console)
    assert "fp8_e4m3 writes: 'a row [sic]'" in captured.get()


def test_tokens_as_text():
    assert text_of([104, 105]) == "hi"
    assert text_of([104, 255, 300]) == "h\ufffd\ufffd"


@pytest.mark.slow
def test_a_warm_cache_reports_the_same_kernels(capsys, text):
    runs = []
    for _ in range(2):
        torch._dynamo.reset()
        assert demo("--json", "--text", str(text), "--prompt-bytes", "200") == 0
        captured = capsys.readouterr()
        runs.append(json.loads(captured.out))
        assert "fp8_e4m3: compile" in captured.err
    first, warm = ([run[mode]["kernels"] for mode in ("auto", "fp8_e4m3")] for run in runs)
    assert first == warm


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--text", "no/such/file"], "No such file or directory: 'no/such/file'"),
        (["--budget", "1KiB"], "found a KV budget of 1024 bytes"),
        (["--model", "v4-pro", "--budget", "1GiB"], "GiB; use a smaller model"),
        (["--new-tokens", "5000"], "found max_len="),
    ],
)
def test_failures_are_one_line(capsys, arguments, reason):
    assert demo(*arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.strip().splitlines()
    assert line.startswith("fp8kv demo: ") and reason in line


def test_an_empty_text_is_refused(capsys, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.touch()
    assert demo("--text", str(empty)) == 1
    assert "found an empty file" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_gpu_is_refused(capsys):
    assert demo("--device", "cuda") == 1
    assert "found no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"), [("64MiB", 64 << 20), ("1.5 GiB", 3 << 29), ("4096", 4096), ("2KiB", 2048)]
)
def test_sizes(text, size):
    assert cli.parse_bytes(text) == size


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["demo", "--budget", "lots"],
        ["demo", "--budget", "-1"],
        ["demo", "--new-tokens", "1"],
        ["demo", "--prompt-bytes", "0"],
        ["demo", "--model", "v5"],
    ],
)
def test_bad_usage_exits_with_two(arguments):
    with pytest.raises(SystemExit) as exit:
        cli.main(arguments)
    assert exit.value.code == 2
