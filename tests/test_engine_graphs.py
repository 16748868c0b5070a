"""Decode as a CUDA graph, through the engine: captured, and by Inductor's reduce-overhead."""

import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_small import SMALL, assert_idle, make_engine, oracle, some_tokens

from fp8kv_inductor.graphs import CapturedStep
from fp8kv_inductor.pools import KVPools

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parent.parent
LENGTHS = {301: 12, 5: 5, 127: 9, 128: 1, 31: 12, 1: 3, 3: 7}
"""Tokens of prompts, around the ends of groups, pages and the window, and of what follows them."""

WIDE = replace(SMALL, name="wide", n_heads=16, head_dim=512, compress_ratios=(4, 128))
"""The read of sm_90 takes rows of 512 features in bf16."""


def cuda_engine(cuda_graph, kv_cache_dtype="auto", **options):
    torch._dynamo.reset()
    return make_engine(
        kv_cache_dtype, device="cuda", compile=True, cuda_graph=cuda_graph, **options
    )


def bits(tensors):
    """Copies of tensors as bytes, so that NaN equals itself."""
    return [tensor.contiguous().view(torch.uint8).clone() for tensor in tensors]


def pool_buffers(engine):
    return [buffer for buffer in engine.model.pools.buffers() if buffer.numel()]


def skips():
    return torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]


def run(engine):
    """Ids of requests that join and leave: other slots, positions, counts and fills at replay."""
    ids = []
    for count, new_tokens in LENGTHS.items():
        ids.append(engine.add_request(some_tokens(count, count), new_tokens))
        engine.step()
    while engine.unfinished:
        engine.step()
    return ids


@pytest.mark.parametrize("cuda_graph", ["capture", "reduce-overhead"])
@pytest.mark.parametrize(
    ("kv_cache_dtype", "kv_format"), [("auto", "bf16"), ("fp8_e4m3", "fp8_e4m3")]
)
def test_tokens_are_the_dense_references_whatever_the_batch_is(
    cuda_graph, kv_cache_dtype, kv_format
):
    torch._dynamo.utils.counters.clear()
    engine = cuda_engine(cuda_graph, kv_cache_dtype, rounding=False)
    ids = run(engine)
    assert_idle(engine)
    assert not skips()
    for count, request in zip(LENGTHS, ids, strict=True):
        prompt, output = some_tokens(count, count), engine.finished(request)
        expected, bound = oracle(prompt + output, kv_format, rounding=False)
        steps = expected[count - 1 : -1]
        missed = steps.max(-1).values - steps[torch.arange(len(output)), torch.tensor(output)]
        assert missed.max() <= 2 * bound


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize(
    ("config", "dtype"), [(SMALL, torch.float32), (WIDE, torch.bfloat16)], ids=["small", "wide"]
)
def test_a_replay_has_the_bits_of_its_kernels(config, dtype, kv_cache_dtype):
    """From the same pools, a replay and the compiled step leave the same pools and logits."""
    engine = cuda_engine("capture", kv_cache_dtype, config=config, dtype=dtype)
    engine.warm_up()
    inner, compared = engine._captured, []

    def both(batch):
        before = [buffer.clone() for buffer in pool_buffers(engine)]
        want = engine._decode(batch).clone(), *bits(pool_buffers(engine))
        for buffer, old in zip(pool_buffers(engine), before, strict=True):
            buffer.copy_(old)
        got = inner(batch)
        live = batch.positions >= 0
        compared.append(int(live.sum()))
        assert torch.equal(got[live], want[0][live])
        assert all(map(torch.equal, bits(pool_buffers(engine)), want[1:]))
        assert not all(map(torch.equal, bits(before), want[1:]))
        return got

    engine._captured = both
    run(engine)
    assert len(set(compared)) > 2


def test_a_replay_of_padding_writes_nothing():
    engine = cuda_engine("capture", "fp8_e4m3")
    engine.generate([some_tokens(40)], 3)
    before = bits(pool_buffers(engine))
    engine.warm_up(["decode"])
    assert all(map(torch.equal, bits(pool_buffers(engine)), before))


def test_the_next_replay_overwrites_the_logits():
    """The documented rule: copy what you keep."""
    engine = cuda_engine("capture")
    results = [engine.run_decode([]) for _ in range(2)]
    assert results[0].data_ptr() == results[1].data_ptr()


def test_old_graphs_are_refused_when_the_pools_are_rebuilt():
    engine = cuda_engine("capture")
    engine.warm_up(["decode"])
    engine.model.bind(KVPools(engine.plan))
    with pytest.raises(RuntimeError, match="capture again"):
        engine._captured(engine._inputs.decode([]))
    with pytest.raises(RuntimeError, match="other pools than this engine's"):
        engine.warm_up(["decode"])


def test_other_inputs_are_refused():
    engine = cuda_engine("capture")
    engine.warm_up(["decode"])
    batch = engine._inputs.decode([])
    with pytest.raises(ValueError, match="at other addresses"):
        engine._captured(batch._replace(positions=batch.positions.clone()))


def test_reduce_overhead_follows_rebuilt_pools():
    """Inductor's own graphs notice: the new pools get the rows, the old ones keep their bytes."""
    torch._dynamo.utils.counters.clear()
    engine = cuda_engine(None)
    model, plan = engine.model, engine.plan
    step = torch.compile(model, fullgraph=True, dynamic=False, mode="reduce-overhead")
    for row in range(2):
        engine.pages.admit(3)
        engine.pages.extend(row, 0, 3)
    batch = engine._inputs.decode([])
    batch.positions[:2] = torch.tensor([0, 2])
    written = []
    with torch.no_grad():
        for _ in range(3):
            model.bind(KVPools(plan))
            for _ in range(3):
                step(batch)
            written.append([buffer.clone() for buffer in model.pools.buffers()])
            assert model.pools.layers[0].window.data.any()
            old = model.pools
    assert not skips()
    assert all(map(torch.equal, written[0], written[2]))
    model.bind(KVPools(plan))
    batch.positions[:2] = torch.tensor([1, 1])
    before = [buffer.clone() for buffer in old.buffers()]
    with torch.no_grad():
        step(batch)
    assert all(map(torch.equal, before, old.buffers()))


def in_a_new_process(code):
    """Nothing is compiled or loaded there yet, and a broken capture stays there."""
    prelude = """
        import torch
        from engine_small import make_engine
        engine = make_engine("fp8_e4m3", device="cuda")
        model, batch = engine.model, engine._inputs.decode([])
        graph = torch.cuda.CUDAGraph()
        torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")  # cuBLAS is there
    """
    script = textwrap.dedent(prelude) + textwrap.dedent(code)
    path = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
    return subprocess.run(
        [sys.executable, "-c", path + script], capture_output=True, text=True, timeout=300
    )


def test_an_eager_first_call_inside_a_capture_works():
    process = in_a_new_process(
        """
        with torch.no_grad(), torch.cuda.graph(graph):
            logits = model(batch)
        graph.replay()
        assert torch.equal(logits, model(batch))
        """
    )
    assert process.returncode == 0, process.stderr


def test_a_compiled_first_call_inside_a_capture_is_refused():
    """By torch, which names the capture; CapturedStep does it right and says so."""
    process = in_a_new_process(
        """
        step = torch.compile(model, fullgraph=True)
        try:
            with torch.no_grad(), torch.cuda.graph(graph):
                step(batch)
        except Exception as error:
            assert "captur" in str(error), error
            print("refused")
        """
    )
    assert process.returncode == 0 and "refused" in process.stdout, process.stderr


def test_a_captured_step_inside_a_capture_says_what_to_do():
    engine = cuda_engine("capture")
    batch = engine._inputs.decode([])
    with (
        pytest.raises(RuntimeError, match="make it before"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        CapturedStep(engine.model, engine.model, batch)
