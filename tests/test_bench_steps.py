"""Benchmarks of whole steps and their pictures, on the CPU at sizes that say nothing."""

import json
from pathlib import Path

import pytest
import torch
from engine_small import ONE_LAYER, SMALL

from fp8kv_inductor import KVPools
from fp8kv_inductor.budget import PoolPlan
from fp8kv_inductor.model_config import PRESETS
from fp8kv_inductor.parallel import SINGLE
from fp8kv_inductor.slots import window_indices

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parent.parent
COMMON = ("--device", "cpu", "--rounds", "1")


@pytest.fixture(autouse=True)
def bench(monkeypatch):
    """The scripts can be imported, and there is a small model to ask for."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    for config in (SMALL, ONE_LAYER):
        monkeypatch.setitem(PRESETS, config.name, config)


def rows(path):
    return json.loads(path.read_text())["rows"]


def test_step_writes_a_row_for_each_batch_and_context(tmp_path):
    import step

    torch._dynamo.reset()
    step.main(
        [
            *COMMON,
            *("--model", "one-layer", "--layers", "0", "--batches", "2"),
            *("--contexts", "256,512", "--columns", "eager fp8,compiled fp8"),
            *("--out", str(tmp_path)),
        ]
    )
    found = rows(tmp_path / "step-tp1.json")
    assert [(row["batch"], row["context"]) for row in found] == [(2, 256), (2, 512)]
    for row in found:
        assert row["eager fp8 us"] > 0 and row["compiled fp8 us"] > 0
        assert row["eager / compiled fp8"] == row["eager fp8 us"] / row["compiled fp8 us"]
    assert (tmp_path / "step-tp1.csv").read_text().count("\n") == 3


def test_steps_of_all_layers_read_live_rows():
    """At every context the requests have the window pages that their positions look back to."""
    import shaped
    import step

    options = shaped.parser("").parse_args(["--model", "small", "--device", "cpu"])
    model = shaped.draw_model(shaped.shaped(options, SINGLE), options, SINGLE)
    models = shaped.twins(model, ["bf16", "fp8"], options)
    assert models["bf16"].cache != models["fp8"].cache
    batch, context = 3, 512
    one = PoolPlan(model.cache, 1, 1)
    logits = []
    for twin in models.values():
        shared = zip(model.parameters(), twin.parameters(), strict=True)
        assert all(ours is theirs for ours, theirs in shared)
        pages, window = one.pages_for(context), one.reserve_for(context)
        plan = PoolPlan(twin.cache, batch * pages, batch * window)
        twin.bind(KVPools(plan))
        torch.manual_seed(0)
        step.fill(twin.pools)
        requests = step.Requests(plan, batch, context)
        for length in (256, context):
            inputs = requests.at(length)
            assert (inputs.positions == torch.tensor([length - 1, length - 2, length - 3])).all()
            assert (window_indices(inputs, twin.config.window_size) >= 0).all()
        logits.append(twin(inputs))
    assert logits[0].isfinite().all() and not torch.equal(*logits)


def test_work_counts_what_a_step_needs():
    import shaped
    import step

    arguments = ["--model", "small", "--device", "cpu", "--layers", "0"]
    options = shaped.parser("").parse_args(arguments)
    model = shaped.draw_model(shaped.shaped(options, SINGLE), options, SINGLE)
    config = model.config
    flop, moved = step.work(model, 1, 64)
    longer, more = step.work(model, 1, 128)
    assert longer - flop == 4 * config.n_heads * 64 * config.head_dim
    assert more - moved == 64 * 2 * config.head_dim
    expert = 3 * config.moe_inter_dim * config.dim
    _, batch = step.work(model, 1000, 64)
    idle = config.n_routed_experts - config.n_activated_experts
    assert batch - moved == pytest.approx(2 * idle * expert + 999 * 64 * 2 * config.head_dim)


def test_generate_counts_preemptions_under_one_budget(tmp_path):
    import generate

    generate.main(
        [
            *COMMON,
            *("--model", "small", "--layers", "0,4", "--streams", "3", "--fill", "0.8"),
            *("--prompt", "250", "--new-tokens", "8", "--chunk", "128"),
            *("--columns", "eager bf16,eager fp8", "--out", str(tmp_path)),
        ]
    )
    (row,) = rows(tmp_path / "generate-tp1.json")
    assert row["fp8 pages"] > row["bf16 pages"] == 8
    assert row["bf16 preemptions"] > row["fp8 preemptions"] == 0
    assert row["eager bf16 tok/s"] > 0 and row["eager fp8 tok/s"] > 0


def test_a_single_stream_is_timed_without_its_prefill(monkeypatch):
    """An engine whose prefill takes 5 s, and each token 0.25 s."""
    import generate

    monkeypatch.setattr(generate, "seconds", lambda engine, requests, tokens: 5 + 0.25 * tokens)
    assert generate.rate(None, [[0]], None) == 4.0


def steps_result():
    times = {"eager bf16 us": 40.0, "compiled fp8 us": 10.0}
    sizes = {"GFLOP": 2.0, "bf16 MB": 100.0, "fp8 MB": 50.0}
    head = {"device": "none", "copy TB/s": "4.0", "matmul TFLOP/s": "700"}
    return {**head, "rows": [{"batch": b, "context": 1024, **times, **sizes} for b in (1, 8)]}


QUALITY = {
    "formats": {
        "bf16": {"kl": 0.0, "row_error": {"nope": 0.0, "rope": 0.001}},
        "fp8_e4m3": {"kl": 1e-4, "row_error": {"nope": 0.0, "rope": 0.02}},
    }
}


def test_pictures_show_the_numbers_of_the_files():
    import plot

    result = steps_result()
    assert plot.step_times(result) == {
        1024: {"eager bf16": [(1, 0.04), (8, 0.04)], "compiled fp8": [(1, 0.01), (8, 0.01)]}
    }
    # 2 GFLOP in 10 us are 200 TFLOP/s, over 50 MB 40 FLOP per byte.
    assert plot.roofline(result)["compiled fp8"][0] == pytest.approx((40.0, 200.0))
    assert plot.errors([QUALITY])["error of the rope features"]["fp8_e4m3"] == 0.02
    pages = plot.pages_by_context("v4-flash", plot.VRAM, tp=2)
    assert all(
        fp8 >= auto for (_, auto), (_, fp8) in zip(pages["auto"], pages["fp8_e4m3"], strict=True)
    )


def test_pictures_are_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need the extra `plot`")
    import plot

    (tmp_path / "step-tp1.json").write_text(json.dumps(steps_result()))
    (tmp_path / "quality-tiny.json").write_text(json.dumps(QUALITY))
    plot.main(["--results", str(tmp_path)])
    names = ("step-time", "roofline", "error", "pages")
    first = [(tmp_path / f"{name}.png").read_bytes() for name in names]
    plot.main(["--results", str(tmp_path)])
    assert first == [(tmp_path / f"{name}.png").read_bytes() for name in names]
