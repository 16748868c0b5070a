"""Zeros, NaN and infinities, in the store's encoding and in act_quant."""

import pytest
import torch

from fp8kv_inductor import numerics
from fp8kv_inductor.formats import FORMATS, get_format

QUANTIZED = [name for name, fmt in FORMATS.items() if fmt.quantized]


def round_trip(rows, name):
    fmt = get_format(name)
    return numerics.decode_rows(*numerics.encode_rows(rows, fmt), fmt)


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zero_rows_decode_to_exact_zeros(name, zero):
    rows = torch.full((2, 512), zero, dtype=torch.bfloat16)
    decoded = round_trip(rows, name)
    assert torch.equal(decoded, torch.zeros(2, 512))
    assert torch.equal(decoded.signbit(), rows.signbit())


@pytest.mark.parametrize("name", QUANTIZED)
def test_one_zero_block_among_sixteen(name):
    rows = torch.randn(1, 512)
    expected = round_trip(rows, name)
    rows[:, 96:128] = 0.0
    expected[:, 96:128] = 0.0
    assert torch.equal(round_trip(rows, name), expected)


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_one_bad_value_touches_nothing_else(name, bad):
    rows = torch.randn(1, 512)
    rows[0, 32] = 9.0
    clean = rows.clone()
    clean[0, 40] = 0.0
    rows[0, 40] = bad
    decoded, expected = round_trip(rows, name), round_trip(clean, name)
    if bad != bad:
        expected[0, 40] = bad
    else:
        scale = numerics.decode_scales(numerics.encode_rows(clean, get_format(name))[1])[0, 1]
        expected[0, 40] = 448 * scale * (1 if bad > 0 else -1)
    torch.testing.assert_close(decoded, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_block_without_finite_values(name):
    rows = torch.full((1, 64), torch.nan)
    rows[0, 1:4] = torch.tensor([torch.inf, -torch.inf, torch.inf])
    rows[0, 32:] = 1.0
    decoded = round_trip(rows, name)
    assert torch.equal(decoded[0, 1:4], 448 * 2.0**-24 * torch.tensor([1.0, -1.0, 1.0]))
    assert decoded[0, 0].isnan() and decoded[0, 4:32].isnan().all()
    assert torch.equal(decoded[0, 32:], round_trip(torch.ones(1, 32), name)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_act_quant_keeps_bad_values_to_themselves(dtype, bad):
    rows = torch.randn(1, 128, dtype=dtype)
    rows[0, 8:10] = torch.tensor([0.0, 100.0])
    expected = numerics.act_quant(rows, 128)
    rows[0, 8] = bad
    scale = 2.0**-2
    expected[0, 8] = bad if bad != bad else 448 * scale * (1 if bad > 0 else -1)
    rounded = numerics.act_quant(rows, 128)
    torch.testing.assert_close(rounded, expected, rtol=0, atol=0, equal_nan=True)
