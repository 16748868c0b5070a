"""The act_quant operator in eager mode."""

import pytest
import torch

import fp8kv_inductor
from fp8kv_inductor import reference


@pytest.mark.parametrize("shape", [(5, 128), (5, 3, 128), (0, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_equals_reference(shape, dtype):
    x = torch.randn(shape).to(dtype)
    rounded = fp8kv_inductor.act_quant(x, 64)
    assert rounded.is_contiguous() and rounded.dtype == dtype
    assert torch.equal(rounded, reference.act_quant(x, 64))


def test_views_in_contiguous_out():
    x = torch.randn(3, 5, 136).to(torch.bfloat16).transpose(0, 1)[..., 8:]
    rounded = fp8kv_inductor.act_quant(x, 128, 32)
    assert rounded.is_contiguous()
    assert torch.equal(rounded, fp8kv_inductor.act_quant(x.contiguous(), 128, 32))


def test_the_input_is_not_written():
    x = torch.randn(4, 64)
    before = x.clone()
    fp8kv_inductor.act_quant(x, 64)
    assert torch.equal(x, before)
