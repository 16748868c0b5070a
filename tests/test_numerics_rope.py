"""rope against complex multiplication in fp64."""

import pytest
import torch

from fp8kv_inductor import numerics, reference

EPS32 = 2.0**-24


def angles(tokens, pairs):
    theta = torch.arange(tokens).unsqueeze(1) * 10000.0 ** -(torch.arange(pairs) / pairs)
    return theta.cos(), theta.sin()


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_error_is_that_of_its_roundings(dtype, inverse):
    """Two products and a sum are rounded to fp32, then the result to ``dtype``.

    |error| <= 2 eps32 (|a c| + |b s|) + eps(dtype) / 2 |result|, with |a c| + |b s| <= |a| + |b|.
    """
    x = torch.randn(64, 128).to(dtype)
    cos, sin = angles(64, 32)
    rotated = numerics.rope(x, cos, sin, inverse)
    expected = reference.rope(x, cos, sin, inverse)
    pair = x[:, 64:].to(torch.float64).abs().unflatten(-1, (-1, 2)).sum(-1).repeat_interleave(2, -1)
    bound = 2 * EPS32 * pair + torch.finfo(dtype).eps / 2 * (expected[:, 64:].abs() + EPS32 * pair)
    assert ((rotated - expected)[:, 64:].abs() <= bound).all()
    assert torch.equal(rotated[:, :64], x[:, :64])


def test_quarter_turn_is_exact():
    x = torch.randn(3, 4, dtype=torch.float32)
    rotated = numerics.rope(x, torch.zeros(3, 2), torch.ones(3, 2))
    assert torch.equal(rotated, torch.stack([-x[:, 1], x[:, 0], -x[:, 3], x[:, 2]], -1))
    assert torch.equal(numerics.rope(rotated, torch.zeros(3, 2), torch.ones(3, 2), True), x)


def test_products_are_not_contracted():
    """Equal products cancel to exactly zero; an fma would leave the rounding error of one."""
    x = torch.randn(64, 1).expand(64, 2).contiguous()
    angle = torch.rand(64, 1)
    assert torch.equal(numerics.rope(x, angle, angle)[:, 0], torch.zeros(64))
