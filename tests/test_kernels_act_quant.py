"""The act_quant kernel against ``numerics``, bit for bit."""

import pytest
import torch
from interpreter import DEVICES, launch

from fp8kv_inductor import numerics
from fp8kv_inductor.kernels import launch as launch_module
from fp8kv_inductor.kernels.act_quant import act_quant

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(params=[False, True], ids=["one cast", "cast through fp16"])
def interpreter_casts(request, monkeypatch):
    """Both ways to convert to e4m3 in the interpreter; a GPU has its own."""
    limits = launch_module.INTERPRETER_LIMITS._replace(e4m3_rounds_twice=request.param)
    monkeypatch.setattr(launch_module, "INTERPRETER_LIMITS", limits)


def assert_equals_numerics(device, x, features, block=64):
    rounded = launch(device, act_quant, x, features, block)
    expected = numerics.act_quant(x, features, block)
    assert rounded.dtype == x.dtype and rounded.is_contiguous()
    torch.testing.assert_close(rounded, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(rounded.signbit() & ~rounded.isnan(), expected.signbit() & ~expected.isnan())


@pytest.mark.usefixtures("interpreter_casts")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_all_magnitudes(device, dtype):
    magnitudes = 10.0 ** torch.linspace(-12, 8 if dtype != torch.float16 else 4, 16)
    x = (torch.randn(16, 512) * magnitudes.unsqueeze(1)).to(dtype)
    assert_equals_numerics(device, x, 448)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width, features, block", [(96, 64, 32), (128, 128, 128), (40, 16, 4)])
def test_widths(device, width, features, block):
    assert_equals_numerics(device, torch.randn(5, 3, width).bfloat16(), features, block)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(device, dtype):
    x = torch.randn(8, 128).to(dtype)
    for row, value in enumerate([torch.nan, torch.inf, -torch.inf, 0.0, -0.0]):
        x[row, 7] = value
        x[row, 100] = value
    x[5] = 0.0
    x[6] = -0.0
    x[7, :64] = torch.nan
    assert_equals_numerics(device, x, 64)


@pytest.mark.parametrize("device", DEVICES)
def test_strides(device):
    for x in (torch.randn(4, 3, 200)[:, :, 8:136], torch.randn(128, 4).t()):
        assert_equals_numerics(device, x, 64)


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows(device):
    assert launch(device, act_quant, torch.empty(0, 128), 64).shape == (0, 128)
