"""The CUDA code of the reads, without a GPU: kernels, fusion, cubins, interpreted results."""

import math
import re

import pytest
import sympy
import torch
from generated import ARCHITECTURES, TEMPLATES, GeneratedKernel
from interpreter import interpreted
from nasty import nasty_reads
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fp8kv_inductor import (
    Pool,
    indexer_scores,
    numerics,
    reference,
    rope,
    sparse_attention,
    store,
)
from fp8kv_inductor.chains import angles, read
from fp8kv_inductor.kernels import attention
from fp8kv_inductor.lowerings.cross_compile import (
    buffers,
    cuda_source,
    launches,
    pool_copies,
    run_cuda_source,
)

FORMATS = ["fp8_e4m3", "fp8_e4m3_amax", "fp8_e4m3_ue8m0", "bf16"]
PREFILL, DECODE = 300, 4
HEADS, COLUMNS = 64, 640
SM_COUNT = 132


def rotated_read(q, window, cmp, indices, counts, sink, cos, sin):
    out, _ = read(q, window, cmp, indices, counts, sink)
    return rope(out, cos, sin, inverse=True)


@pytest.mark.parametrize("fmt", FORMATS)
def test_kernels_by_number_of_queries(fmt):
    """Many queries: one template. Few: parts, their combination and the lse."""
    inputs = nasty_reads(PREFILL, HEADS, COLUMNS, fmt)
    many = cuda_source(read, inputs, TEMPLATES)
    assert list(many.kernels) == ["triton_tem_fused_sparse_attention_0"]
    few = cuda_source(read, nasty_reads(DECODE, HEADS, COLUMNS, fmt), TEMPLATES, dynamic=True)
    assert [name.split("_")[1] for name in few.kernels] == ["tem", "poi", "poi"]
    assert not pool_copies(many.wrapper, inputs[1].data, inputs[2].data)


def test_many_queries_need_no_scratch():
    """32,768 tokens: nothing but out and lse is allocated, whatever the width."""
    tokens = 1 << 15
    q, window, cmp, indices, counts, sink = nasty_reads(4, HEADS, COLUMNS, "fp8_e4m3")
    q = q[:1].expand(tokens, -1, -1)
    args = q, window, cmp, indices[:1].expand(tokens, -1), counts[:1].repeat(tokens), sink
    code = cuda_source(read, args, TEMPLATES)
    assert sorted(buffers(code.wrapper)) == [tokens * HEADS, tokens * HEADS * 512]


@pytest.mark.parametrize("tokens", [PREFILL, DECODE])
def test_parts_are_for_few_queries_only(monkeypatch, tokens):
    """A graph for any number of tokens does not make parts of 32,768, when it was made for four."""
    guards = []
    produce_guards = ShapeEnv.produce_guards_verbose

    def record(shape_env, *args, **kwargs):
        guards.extend(guard.expr for guard in shape_env.guards)
        return produce_guards(shape_env, *args, **kwargs)

    monkeypatch.setattr(ShapeEnv, "produce_guards_verbose", record)
    q, window, cmp, indices, counts, sink = nasty_reads(tokens, HEADS, COLUMNS, "fp8_e4m3")
    for tensor in (q, indices, counts):
        torch._dynamo.mark_dynamic(tensor, 0)
    result = q.clone(), torch.empty(tokens, HEADS)
    args = q, window, cmp, indices, counts, sink
    run_cuda_source(read, args, lambda wrapper: lambda *inputs: result, TEMPLATES)
    few = [expr for expr in guards if isinstance(expr, sympy.Le) and expr.rhs == SM_COUNT // 2]
    assert guards and len(few) == (1 if tokens == DECODE else 0)


def test_an_unused_lse_costs_no_kernel():
    def out_only(*args):
        return read(*args)[0]

    code = cuda_source(out_only, nasty_reads(DECODE, HEADS, COLUMNS, "fp8_e4m3"), TEMPLATES)
    assert [name.split("_")[1] for name in code.kernels] == ["tem", "poi"]


@pytest.mark.parametrize("tokens", [PREFILL, DECODE])
def test_user_code_on_the_output_fuses_behind(tokens):
    def scaled(*args):
        return read(*args)[0].float() * 2 + 1

    code = cuda_source(scaled, nasty_reads(tokens, HEADS, COLUMNS, "fp8_e4m3"), TEMPLATES)
    assert len(code.kernels) == (1 if tokens == PREFILL else 2)


def test_window_pool_alone():
    def window_only(q, window, indices, sink):
        return sparse_attention(q, window, window, indices, None, sink, 128, 512**-0.5)[0]

    q, window, _, indices, _, sink = nasty_reads(PREFILL, HEADS, 128, "fp8_e4m3")
    code = cuda_source(window_only, (q, window, indices, sink), TEMPLATES)
    assert list(code.kernels) == ["triton_tem_fused_sparse_attention_0"]


@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_compiles(capability, tmp_path, monkeypatch):
    """The template, which sm_90 has where there is no Gluon."""
    monkeypatch.setattr(attention, "hopper_read", lambda: None)
    args = nasty_reads(PREFILL, 20, COLUMNS, "fp8_e4m3")
    code = cuda_source(rotated_read, (*args, *angles(PREFILL)), capability)
    ((name, source),) = code.kernels.items()
    warps = int(re.search(r"num_warps=(\d+)", source).group(1))
    compiled = GeneratedKernel(name, source, tmp_path).compile(capability, num_warps=warps)
    assert compiled.asm["cubin"]


@pytest.mark.parametrize("tokens", [PREFILL, DECODE])
def test_sm_90_has_a_kernel_of_its_own(tokens):
    """Called by hand, between the producers of q and the combination with what follows."""

    def step(*args):
        out, lse = read(*args)
        return out * 2, lse

    code = cuda_source(step, nasty_reads(tokens, HEADS, COLUMNS, "fp8_e4m3"))
    names = launches(code.wrapper)
    # The parts' lse is written by the read, so what uses it comes later.
    assert names[0] == "fp8kv_read" and len(names) == (2 if tokens == PREFILL else 3)
    assert f"splits={1 if tokens == PREFILL else 10}," in code.wrapper


@pytest.mark.parametrize("capability", [90, TEMPLATES])
@pytest.mark.parametrize("tokens", [PREFILL, DECODE])
def test_inverse_rope_is_inside(capability, tokens):
    args = (*nasty_reads(tokens, HEADS, COLUMNS, "fp8_e4m3"), *angles(tokens))
    code = cuda_source(rotated_read, args, capability)
    assert len(launches(code.wrapper)) == (1 if tokens == PREFILL else 2)
    assert ("has_angles=True" in code.wrapper) == (capability == 90 and tokens == PREFILL)


@pytest.mark.parametrize("tokens, rotate", [(6, False), (PREFILL, False), (PREFILL, True)])
def test_interpreted_result_equals_fp64(tokens, rotate, tmp_path):
    """The template of both classes over the first six tokens' grid."""
    heads, columns, shown = 20, 192, 6
    args = nasty_reads(tokens, heads, columns, "fp8_e4m3")
    cos, sin = angles(tokens)
    inputs = (*args, *((cos, sin) if rotate else ()))
    code = cuda_source(rotated_read if rotate else read, inputs, TEMPLATES)
    name, source = next(iter(code.kernels.items()))
    splits = int(re.search(r"SPLITS : tl.constexpr = (\d+)", source).group(1))
    assert (splits == 1) == (tokens == PREFILL)
    q, window, cmp, indices, counts, sink = args
    lse = torch.empty((tokens, heads) if splits == 1 else (tokens, heads, splits, 2))
    out = torch.empty(
        (tokens, heads, 512) if splits == 1 else (tokens, heads, splits, 512),
        dtype=q.dtype if splits == 1 else torch.float16,
    )
    named = {
        "arg_Q": q,
        "arg_INDICES": indices,
        "arg_SINK": sink,
        "arg_LSE": lse,
        "arg_WINDOW_DATA": window.data,
        "arg_WINDOW_SCALE": window.scale,
        "arg_CMP_DATA": cmp.data,
        "arg_CMP_SCALE": cmp.scale,
        "arg_COUNTS": counts,
        "arg_COS": cos,
        "arg_SIN": sin,
        "out_ptr0": out,
    }
    kernel = GeneratedKernel(name, source, tmp_path)
    block_h = int(re.search(r"BLOCK_H : tl.constexpr = (\d+)", source).group(1))
    with interpreted():
        kernel.interpret(
            (shown, -(-heads // block_h), splits), *(named[a] for a in kernel.meta["signature"])
        )
    pools = window.data, window.scale, cmp.data, cmp.scale
    rows = slice(shown)

    def oracle(dtype):
        return reference.sparse_attention(
            q[rows], *pools, indices[rows], counts[rows], sink, 128, 512**-0.5, "fp8_e4m3", dtype
        )

    want, want_lse = oracle(torch.float64)
    low, _ = oracle(torch.bfloat16)
    if rotate:
        want, low = (numerics.rope(x, cos[rows, None], sin[rows, None], True) for x in (want, low))
    if splits > 1:
        part_lse, powers = lse[rows].double().unbind(-1)
        parts = out[rows].double() * powers.unsqueeze(-1)
        total = part_lse.logsumexp(-1)
        weight = (part_lse - torch.logaddexp(total, sink.double()).unsqueeze(-1)).exp().nan_to_num()
        got, got_lse = (parts * weight.unsqueeze(-1)).sum(2), total
    else:
        got, got_lse = out[rows].double(), lse[rows].double()
    assert torch.equal(got_lse == -math.inf, want_lse == -math.inf)
    assert (got - want).norm() <= 2 * (low.double() - want).norm()


def test_indexer_is_one_kernel_and_compiles(tmp_path):
    def scores(q, weights, idx, page_rows, request, counts):
        return indexer_scores(q, weights, idx, page_rows, request, counts, 32)

    pool = Pool.empty(640, 128, "bf16")
    args = (
        torch.randn(DECODE, 64, 128).bfloat16(),
        torch.randn(DECODE, 64),
        pool,
        torch.zeros(3, 5, dtype=torch.int64),
        torch.zeros(DECODE, dtype=torch.int64),
        torch.ones(DECODE, dtype=torch.int64),
    )
    code = cuda_source(scores, args, dynamic=True)
    ((name, source),) = code.kernels.items()
    assert name == "triton_tem_fused_indexer_scores_0"
    for capability in ARCHITECTURES:
        assert GeneratedKernel(name, source, tmp_path).compile(capability).asm["cubin"]


def test_store_and_read_of_one_pool_stay_in_order():
    def step(rows, slots, *args):
        store(rows, slots, args[1])
        out = read(*args)[0]
        store(rows, slots + 1, args[1])
        return out

    inputs = nasty_reads(PREFILL, HEADS, COLUMNS, "fp8_e4m3")
    rows, slots = torch.randn(PREFILL, 512).bfloat16(), torch.arange(PREFILL)
    code = cuda_source(step, (rows, slots, *inputs), TEMPLATES)
    assert [name.split("_")[1] for name in launches(code.wrapper)] == ["poi", "tem", "poi"]
    assert not pool_copies(code.wrapper, inputs[1].data)
