"""``fp8kv plan``: what it prints and how it ends."""

import json

import pytest
from rich.console import Console

from fp8kv_inductor import CacheConfig, cli
from fp8kv_inductor.budget import plan_capacity
from fp8kv_inductor.plan import print_table

FLASH = ("plan", "--model", "v4-flash", "--vram", "48GiB")


def plan(capsys, *arguments):
    assert cli.main([*FLASH, "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("tp", [1, 2])
def test_json_is_the_planners_plan(capsys, tp):
    result = plan(capsys, "--tp", str(tp))
    assert (result["model"], result["vram_bytes"], result["tp"]) == ("v4-flash", 48 << 30, tp)
    assert (result["context"], result["window_ratio"]) == (4096, 0.2)
    assert (result["expert_dtype"], result["linear_dtype"]) == ("fp4", "fp8")
    assert result["all_experts"] == 43 * 256
    assert list(result["plans"]) == ["auto", "fp8_e4m3"]
    for mode, printed in result["plans"].items():
        expected = plan_capacity(CacheConfig.resolve("v4-flash", mode, "cpu"), 48 << 30, tp=tp)
        tiers = printed["tier_bytes"]
        assert printed["pages"] == expected.pages.num_pages
        assert printed["window_pages"] == expected.pages.window_pages
        assert printed["tokens"] == 128 * printed["pages"]
        assert printed["requests"] == printed["pages"] // 32
        assert printed["expert_slots"] == expected.expert_slots
        assert tiers["experts"] == printed["expert_slots"] * printed["slot_bytes"]
        assert tiers["unused"] >= 0 and sum(tiers.values()) == 48 << 30
    auto, fp8 = result["plans"].values()
    assert (auto["bytes_per_element"], fp8["bytes_per_element"]) == (2.0, 1.0625)
    assert fp8["pages"] > auto["pages"] and fp8["expert_slots"] > auto["expert_slots"]


def test_every_option_reaches_the_planner(capsys):
    result = plan(
        capsys,
        *("--kv-cache-dtype", "fp8_e4m3_ue8m0", "--context", "9000", "--window-ratio", "0.1"),
        *("--expert-dtype", "fp8", "--linear-dtype", "bf16", "--workspace", "1GiB"),
    )
    expected = plan_capacity(
        CacheConfig.resolve("v4-flash", "fp8_e4m3_ue8m0", "cpu"),
        48 << 30,
        context=9000,
        window_ratio=0.1,
        expert_dtype="fp8",
        linear_dtype="bf16",
        workspace=1 << 30,
    )
    ((mode, printed),) = result["plans"].items()
    assert mode == "fp8_e4m3_ue8m0"
    assert printed["tier_bytes"] == {**expected.tier_bytes, "unused": expected.unused}
    assert printed["requests"] == int(expected.pages.requests(9000))


def test_table(capsys):
    result = plan(capsys)
    console = Console(width=100)
    with console.capture() as captured:
        print_table(result, console)
    lines = captured.get().splitlines()
    auto, fp8 = result["plans"].values()
    for label, key in (
        ("pages", "pages"),
        ("tokens", "tokens"),
        ("requests of 4,096 tokens", "requests"),
        ("expert slots (of 11,008)", "expert_slots"),
    ):
        (row,) = (line.split() for line in lines if line.lstrip("│ ").startswith(label))
        assert f"{auto[key]:,}" in row and f"{fp8[key]:,}" in row
    for tier, nbytes in fp8["tier_bytes"].items():
        assert any(f" {tier} " in line and f"{nbytes / 2**20:,.1f} MiB" in line for line in lines)


def test_without_json_a_table_goes_to_stdout(capsys):
    assert cli.main([*FLASH, "--kv-cache-dtype", "auto"]) == 0
    table = capsys.readouterr().out
    assert "expert slots" in table and "fp8_e4m3" not in table


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--vram", "8GiB"], "needs at least"),
        (["--tp", "3"], "found a tensor-parallel size of 3; 'v4-flash' has n_heads=64"),
        (["--context", "2000000"], "found a context of 2000000 tokens"),
        (["--workspace", "48GiB"], "lower the workspace"),
    ],
)
def test_failures_are_one_line(capsys, arguments, reason):
    assert cli.main([*FLASH, *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.strip().splitlines()
    assert line.startswith("fp8kv plan: found ") and reason in line


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan"],
        ["plan", "--model", "v4-flash"],
        [*FLASH, "--tp", "0"],
        [*FLASH, "--kv-cache-dtype", "fp8"],
        [*FLASH, "--window-ratio", "0"],
        [*FLASH, "--window-ratio", "-1"],
        [*FLASH, "--window-ratio", "lots"],
    ],
)
def test_bad_usage_exits_with_two(arguments):
    with pytest.raises(SystemExit) as exit:
        cli.main(arguments)
    assert exit.value.code == 2
