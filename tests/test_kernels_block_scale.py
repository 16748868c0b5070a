"""Device functions of ``kernels.block_scale`` against their twins in ``numerics``."""

import pytest
import torch
import triton
import triton.language as tl
from interpreter import DEVICES, launch

from fp8kv_inductor import numerics
from fp8kv_inductor.formats import E4M3_MAX
from fp8kv_inductor.kernels.block_scale import ceil_log2_ratio, exp2_int, round_to_e4m3

BLOCK = 1024


@triton.jit
def round_kernel(x, out, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + index, round_to_e4m3(tl.load(x + index)))


@triton.jit
def scale_kernel(x, out, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exponent = tl.minimum(tl.maximum(ceil_log2_ratio(tl.load(x + index)), -126), 127)
    tl.store(out + index, exp2_int(exponent))


def apply(device, kernel, x):
    def run(x):
        out = torch.empty_like(x)
        kernel[(len(x) // BLOCK,)](x, out, BLOCK=BLOCK)
        return out

    padded = torch.nn.functional.pad(x, (0, -len(x) % BLOCK))
    return launch(device, run, padded)[: len(x)]


def bits(x):
    return x.view(torch.int32)


@pytest.mark.parametrize("device", DEVICES)
def test_rounding_onto_the_grid_leaves_nothing_to_round(device):
    """All midpoints of e4m3, the floats around them, all exponents, both signs."""
    grid = numerics.e4m3_decode(torch.arange(0x7F, dtype=torch.uint8))
    middles = (grid[1:] + grid[:-1]) / 2
    near = [torch.nextafter(middles, torch.tensor(limit)) for limit in (-torch.inf, torch.inf)]
    powers = torch.exp2(torch.arange(-149.0, 9.0)) * (1 + torch.rand(20, 158))
    x = torch.cat([grid, middles, *near, powers.flatten()]).clamp_max(E4M3_MAX)
    x = torch.cat([x, -x])
    expected = numerics.e4m3_decode(numerics.e4m3_encode(x))
    assert torch.equal(bits(apply(device, round_kernel, x)), bits(expected))


@pytest.mark.parametrize("device", DEVICES)
def test_scales_are_exact_powers_of_two(device):
    steps = torch.exp2(torch.arange(-100.0, 119.0))
    edges = torch.cat([steps * E4M3_MAX, steps, steps * torch.rand(219)])
    near = [torch.nextafter(edges, torch.tensor(limit)) for limit in (0.0, torch.inf)]
    x = torch.cat([edges, *near])
    exponent = numerics.ceil_log2_ratio(x, E4M3_MAX).clamp(-126, 127)
    assert torch.equal(apply(device, scale_kernel, x), numerics.exp2_int(exponent))
