"""act_quant against the table search, and its fixed points."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8kv_inductor import numerics, reference

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", [64, 448, 512])
def test_equals_reference(dtype, features):
    x = (torch.randn(24, 512) * 10.0 ** torch.linspace(-8, 4, 24).unsqueeze(1)).to(dtype)
    rounded = numerics.act_quant(x, features)
    assert rounded.dtype == dtype
    assert torch.equal(rounded, reference.act_quant(x, features))
    assert torch.equal(rounded[:, features:], x[:, features:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_largest_values_stay_finite(dtype):
    x = torch.full((1, 64), torch.finfo(dtype).max, dtype=dtype)
    rounded = numerics.act_quant(x, 64)
    assert rounded.isfinite().all()
    assert torch.equal(rounded, reference.act_quant(x, 64))


@pytest.mark.parametrize("block", [16, 32, 128])
def test_other_blocks(block):
    x = torch.randn(8, 256)
    assert torch.equal(numerics.act_quant(x, 128, block), reference.act_quant(x, 128, block))


@given(st.lists(st.integers(0, 0xFFFF), min_size=64, max_size=64))
def test_any_bf16_block_becomes_a_fixed_point(bits):
    x = torch.tensor(bits).to(torch.int16).view(torch.bfloat16).unsqueeze(0)
    rounded = numerics.act_quant(x, 64)
    for again in (reference.act_quant(x, 64), numerics.act_quant(rounded, 64)):
        torch.testing.assert_close(again, rounded, rtol=0, atol=0, equal_nan=True)
