"""The rope kernel against ``numerics``, bit for bit."""

import pytest
import torch
from interpreter import DEVICES, launch

from fp8kv_inductor import numerics
from fp8kv_inductor.kernels.rope import rope

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def angles(tokens: int, pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    theta = torch.rand(tokens, pairs) * 6
    return theta.cos(), theta.sin()


def assert_equals_numerics(device, x, cos, sin, inverse=False):
    rotated = launch(device, rope, x, cos, sin, inverse)
    per_row = (cos.unsqueeze(1), sin.unsqueeze(1)) if x.dim() == 3 else (cos, sin)
    expected = numerics.rope(x, *per_row, inverse)
    assert rotated.dtype == x.dtype and rotated.is_contiguous()
    torch.testing.assert_close(rotated, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(rotated.signbit() & ~rotated.isnan(), expected.signbit() & ~expected.isnan())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_heads(device, dtype, inverse):
    assert_equals_numerics(device, torch.randn(5, 3, 512).to(dtype), *angles(5, 32), inverse)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width, pairs", [(96, 16), (128, 64), (33, 4), (33, 16), (2, 1), (1, 0)])
def test_widths(device, width, pairs):
    assert_equals_numerics(device, torch.randn(7, width, dtype=torch.bfloat16), *angles(7, pairs))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inverse", [False, True])
def test_products_are_rounded_before_the_sum(device, inverse):
    """Sums that cancel: an fma would leave the rounding error of one product in the result."""
    x = (1 + torch.rand(64, 64)).to(torch.float32)
    x[:, 1::2] = x[:, ::2]
    c = torch.rand(64, 32)
    assert_equals_numerics(device, x, c, c, inverse)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inverse", [False, True])
def test_special_values(device, inverse):
    x = torch.randn(6, 64, dtype=torch.bfloat16)
    for row, value in enumerate([torch.nan, torch.inf, -torch.inf, -0.0, 1e-39, 3e38]):
        x[row, [0, 40, 43]] = value
    cos, sin = angles(6, 16)
    sin[3] = 0.0
    assert_equals_numerics(device, x, cos, sin, inverse)


@pytest.mark.parametrize("device", DEVICES)
def test_subnormal_products(device):
    x = torch.randn(4, 32) * 1e-38
    assert_equals_numerics(device, x, *angles(4, 16))


@pytest.mark.parametrize("device", DEVICES)
def test_strides(device):
    """A slice of a fused projection, heads before tokens, elements that are no neighbours."""
    cos, sin = angles(4, 32)
    cos, sin = cos[:, ::2], sin[:, :16]
    for x in (
        torch.randn(4, 3, 160)[:, :, 16:112],
        torch.randn(3, 4, 96).transpose(0, 1),
        torch.randn(96, 4).t(),
    ):
        assert_equals_numerics(device, x, cos, sin)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 64), (0, 2, 64), (3, 0, 64)])
def test_nothing_to_rotate(device, shape):
    x = torch.empty(shape, dtype=torch.bfloat16)
    assert launch(device, rope, x, *angles(shape[0], 16)).shape == x.shape


@pytest.mark.gpu
def test_addresses_beyond_32_bits():
    tokens, heads, width = 65_537, 64, 512
    x = torch.zeros(tokens, heads, width, dtype=torch.bfloat16, device="cuda")
    x[-1] = torch.randn(heads, width)
    cos, sin = angles(tokens, 32)
    rotated = rope(x, cos.cuda(), sin.cuda())
    assert torch.equal(rotated[-1].cpu(), numerics.rope(x[-1].cpu(), cos[-1], sin[-1]))
