"""The fp32 <-> e4m3 conversions against a table search over all codes."""

import pytest
import torch

from fp8kv_inductor import numerics, reference

VALUES = reference.E4M3_VALUES[: reference.E4M3_NAN].to(torch.float32)
MIDPOINTS = (VALUES[1:] + VALUES[:-1]) / 2


def test_decode_gives_the_value_of_every_code():
    codes = torch.arange(256, dtype=torch.uint8)
    decoded = numerics.e4m3_decode(codes).to(torch.float64)
    torch.testing.assert_close(decoded, reference.E4M3_VALUES, rtol=0, atol=0, equal_nan=True)


def test_encode_inverts_decode():
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes != 0xFF]
    assert torch.equal(numerics.e4m3_encode(numerics.e4m3_decode(codes)), codes)


def test_encode_rounds_every_bf16_value_to_nearest_even():
    x = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16).to(torch.float32)
    assert torch.equal(numerics.e4m3_encode(x), reference.e4m3_encode(x))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_encode_rounds_once_around_every_midpoint(sign):
    """Two roundings (fp32 -> fp16 -> e4m3) pull values just above a midpoint down to it."""
    assert len(MIDPOINTS) == 126
    below = torch.nextafter(MIDPOINTS, torch.tensor(0.0))
    above = torch.nextafter(MIDPOINTS, torch.tensor(torch.inf))
    lower = torch.arange(126, dtype=torch.uint8)
    even = lower + lower % 2
    for x, expected in ((below, lower), (MIDPOINTS, even), (above, lower + 1)):
        codes = numerics.e4m3_encode(sign * x)
        assert torch.equal(codes, expected + (0x80 if sign < 0 else 0))
        assert torch.equal(codes, reference.e4m3_encode(sign * x))


@pytest.mark.parametrize(
    ("x", "value"),
    [(400.199585, 416.0), (272.156555, 288.0), (136.002075, 144.0), (1.0625001, 1.125)],
)
def test_encode_rounds_once_on_reported_values(x, value):
    assert float(numerics.e4m3_decode(numerics.e4m3_encode(torch.tensor([x])))) == value


@pytest.mark.parametrize(
    "x", [448.0, 449.0, 463.9, 464.0, 480.0, 1e4, torch.finfo(torch.bfloat16).max, torch.inf]
)
def test_encode_saturates(x):
    assert numerics.e4m3_encode(torch.tensor([x, -x])).tolist() == [0x7E, 0xFE]


def test_encode_keeps_nan_and_the_sign_of_zero():
    x = torch.tensor([torch.nan, -torch.nan, 0.0, -0.0, 1e-30, -1e-30])
    assert numerics.e4m3_encode(x).tolist() == [0x7F, 0x7F, 0x00, 0x80, 0x00, 0x80]
