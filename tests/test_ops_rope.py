"""The rope operator in eager mode."""

import pytest
import torch

import fp8kv_inductor
from fp8kv_inductor import numerics


def angles(tokens: int, pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    theta = torch.rand(tokens, pairs) * 6
    return theta.cos(), theta.sin()


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_and_heads_share_a_token_s_angle(dtype, inverse):
    x = torch.randn(5, 3, 128).to(dtype)
    cos, sin = angles(5, 32)
    rotated = fp8kv_inductor.rope(x, cos, sin, inverse)
    assert rotated.dtype == dtype and rotated.is_contiguous()
    for head in range(3):
        row = fp8kv_inductor.rope(x[:, head], cos, sin, inverse)
        assert torch.equal(rotated[:, head], row)
        assert torch.equal(row, numerics.rope(x[:, head], cos, sin, inverse))


def test_views_in_contiguous_out():
    x = torch.randn(3, 5, 136).to(torch.bfloat16).transpose(0, 1)[..., 8:]
    cos, sin = (table[:, 1:] for table in angles(5, 33))
    rotated = fp8kv_inductor.rope(x, cos, sin)
    assert rotated.is_contiguous()
    expected = fp8kv_inductor.rope(x.contiguous(), cos.contiguous(), sin.contiguous())
    assert torch.equal(rotated, expected)


def test_the_input_is_not_written():
    x = torch.randn(4, 64)
    before = x.clone()
    fp8kv_inductor.rope(x, *angles(4, 32))
    assert torch.equal(x, before)


def test_no_tokens():
    assert fp8kv_inductor.rope(torch.empty(0, 2, 64), *angles(0, 32)).shape == (0, 2, 64)
