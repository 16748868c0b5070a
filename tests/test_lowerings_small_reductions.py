"""Pooling over a ring, written out: same values, no reduction left, other graphs untouched."""

import pytest
import torch
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from fp8kv_inductor import rope
from fp8kv_inductor.lowerings import small_reductions

GROUPS, D = 5, 64


def inputs(ring):
    return *torch.randn(2, GROUPS, ring, D), *torch.rand(2, GROUPS, D // 4)


def norm(row):
    return (row * torch.rsqrt(row.square().mean(-1, keepdim=True) + 1e-6)).bfloat16()


def pooled(kv, score):
    return (score.softmax(1) * kv).sum(1)


def chain(kv, score, cos, sin):
    return rope(norm(pooled(kv, score)), cos, sin)


def as_in_the_model(kv, score, cos, sin):
    """kv and score come out of one gathered state; some elements are missing."""
    ring = torch.arange(kv.shape[1])
    exists = (ring != 1).unsqueeze(-1)
    states = torch.stack([kv, score], 2)[:, ring]
    kv, score = torch.where(exists.unsqueeze(-1), states, -states).unbind(2)
    score = score.masked_fill(~exists, torch.finfo(score.dtype).min)
    return chain(kv.masked_fill(~exists, 0.0), score, cos, sin)


def unrolled(fn, args, mode="fake"):
    """The graph behind the pass, and whether that changed it."""
    module = make_fx(fn, select_decomp_table(), tracing_mode=mode)(*args)
    before = str(module.graph)
    small_reductions.unroll(module.graph, "cpu")
    module.graph.lint()
    module.recompile()
    return module, str(module.graph) != before


@pytest.mark.parametrize("fn", [chain, as_in_the_model])
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("ring", [2, 8])
def test_same_values_without_reductions(fn, mode, ring):
    args = inputs(ring)
    module, changed = unrolled(fn, args, mode)
    nodes = module.graph.nodes
    assert changed and not any(small_reductions._reduced_dim(node) == 1 for node in nodes)
    assert all("val" in node.meta for node in nodes if node.op == "call_function")
    got, want = module(*args), fn(*args)
    # A sum in another order may move a value across one rounding to bf16.
    torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-7)
    assert (got == want).float().mean() > 0.98


def without_our_operators(kv, score, cos, sin):
    return norm(pooled(kv, score))


def matmul_in_between(kv, score, cos, sin):
    return rope(norm(pooled(kv, score)) @ kv[0].bfloat16().mT @ kv[0].bfloat16(), cos, sin)


@pytest.mark.parametrize(
    ("fn", "ring"), [(without_our_operators, 8), (matmul_in_between, 8), (chain, 9)]
)
def test_other_graphs_stay_as_they_are(fn, ring):
    _, changed = unrolled(fn, inputs(ring))
    assert not changed


def test_values_that_others_need_stay():
    def both(kv, score, cos, sin):
        return chain(kv, score, cos, sin), score.softmax(1)

    args = inputs(8)
    module, changed = unrolled(both, args)
    assert changed
    torch.testing.assert_close(module(*args)[1], args[1].softmax(1))
