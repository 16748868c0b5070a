"""A kernel sees what it has stored itself, also where loads and stores differ in their layouts."""

import re

import pytest
import torch

from fp8kv_inductor import register
from fp8kv_inductor.lowerings.cross_compile import cuda_source

STREAMS, WIDTH = 4, 256


def enter(x, pre, weight):
    """Streams `[T, C, D]` summed into a row that is kept, and its norm."""
    row = (pre.unsqueeze(-1) * x.to(torch.float32)).sum(1)
    normed = row * torch.rsqrt(row.square().mean(-1, keepdim=True) + 1e-6) * weight
    return row, normed.to(torch.bfloat16)


def inputs(tokens, device="cpu"):
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, STREAMS, WIDTH, generator=generator).to(torch.bfloat16)
    pre = torch.rand(tokens, STREAMS, generator=generator)
    return tuple(each.to(device) for each in (x, pre, torch.rand(WIDTH, generator=generator)))


def reloads(source):
    """Buffers that a kernel stores and loads again, and those without a barrier in between."""
    found, unsafe, stored = set(), set(), {}
    for line in source.splitlines():
        if "tl.debug_barrier()" in line:
            stored = dict.fromkeys(stored, True)
        for access, name in re.findall(r"tl\.(load|store)\((\w+) \+", line):
            if access == "store":
                stored[name] = False
            elif name in stored:
                found.add(name)
                unsafe |= set() if stored[name] else {name}
    return found, unsafe


def test_a_barrier_lies_between_store_and_load():
    register()
    with torch.no_grad(), torch._inductor.config.patch({"triton.persistent_reductions": False}):
        code = cuda_source(enter, inputs(2048))
    (source,) = code.kernels.values()
    found, unsafe = reloads(source)
    assert found and not unsafe
    without = source.replace("tl.debug_barrier()", "")
    assert reloads(without) == (found, found), "the check sees a missing barrier"


def test_a_kernel_without_reloads_has_no_barrier():
    register()
    with torch.no_grad():
        code = cuda_source(lambda x: (x * 2).sum(-1), (torch.randn(2048, WIDTH),))
    assert all("debug_barrier" not in source for source in code.kernels.values())


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [512, 2048, 8192])
def test_on_a_gpu(tokens):
    """Every launch gives the same bits, close to eager's."""
    register()
    args = inputs(tokens, "cuda")
    with torch._inductor.config.patch({"triton.persistent_reductions": False}):
        compiled = torch.compile(enter, fullgraph=True)
        first = compiled(*args)
        for _ in range(50):
            for again, expected in zip(compiled(*args), first, strict=True):
                assert torch.equal(again, expected)
    for ours, expected in zip(first, enter(*args), strict=True):
        torch.testing.assert_close(ours, expected)
