"""Block scales: exact powers of two, their range, and the bytes of every format."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8kv_inductor import numerics, reference
from fp8kv_inductor.formats import (
    E4M3_MAX,
    FORMATS,
    SCALE_EXPONENT_MAX,
    SCALE_EXPONENT_MIN,
    get_format,
)

QUANTIZED = [name for name, fmt in FORMATS.items() if fmt.quantized]
POSITIVE_FP32 = st.floats(2.0**-126, torch.finfo(torch.float32).max, width=32)


def reference_rows(rows, fmt):
    codes, scales = zip(*[reference.encode_row(row, fmt) for row in rows], strict=True)
    return torch.stack(codes), torch.stack(scales)


def assert_bytes(rows, name):
    fmt = get_format(name)
    codes, scales = numerics.encode_rows(rows, fmt)
    expected_codes, expected_scales = reference_rows(rows, fmt)
    assert codes.dtype == fmt.code_dtype and scales.dtype == fmt.scale_dtype
    assert torch.equal(scales, expected_scales)
    assert torch.equal(codes, expected_codes)
    return numerics.decode_rows(codes, scales, fmt)


@given(POSITIVE_FP32, st.sampled_from([E4M3_MAX, 6.0, 1.0]))
def test_ceil_log2_ratio_is_exact(x, limit):
    exponent = int(numerics.ceil_log2_ratio(torch.tensor([x]), limit))
    assert exponent == reference.ceil_log2_ratio(x, limit)
    assert math.ldexp(limit, exponent - 1) < x <= math.ldexp(limit, exponent)


def test_ceil_log2_ratio_steps_right_above_each_power_of_two():
    at = E4M3_MAX * 2.0 ** torch.arange(-100, 100)
    above = torch.nextafter(at, torch.tensor(torch.inf))
    exponents = torch.arange(-100, 100, dtype=torch.int32)
    assert torch.equal(numerics.ceil_log2_ratio(at, E4M3_MAX), exponents)
    assert torch.equal(numerics.ceil_log2_ratio(above, E4M3_MAX), exponents + 1)


def test_exp2_int_is_exact_over_the_normal_range():
    exponents = torch.arange(-126, 128, dtype=torch.int32)
    expected = torch.tensor([math.ldexp(1.0, exponent) for exponent in exponents.tolist()])
    assert torch.equal(numerics.exp2_int(exponents), expected)


AMAX = [1e-30, 1e-6, 1.33e-5, 2.7e-5, 4e-5, 1e-4, 0.0273, 0.0274, 1.0, 448.0, 1e4, 1.4e7]
BEYOND = [2.9e7, 2.94e7, 1e30]


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("amax", AMAX)
def test_error_bound(name, amax):
    """Half a step of the code's grid, plus what a rounded-down amax scale saturates.

    A step is 2^-3 of a normal value's power of two and scale * 2^-9 below that. An amax scale in
    fp16 is off by 2^-11 of itself, or by 2^-25 where it is subnormal; 448 times that can be cut.
    """
    x = torch.rand(8, 128) * 2 * amax - amax
    x[:, ::32] = amax
    decoded = assert_bytes(x, name)
    fmt = get_format(name)
    scale = numerics.decode_scales(numerics.encode_rows(x, fmt)[1]).repeat_interleave(32, -1)
    bound = torch.maximum(x.abs() / 16, scale / 1024)
    if fmt.rule == "amax":
        bound += E4M3_MAX * torch.clamp_min(scale * 2.0**-11, 2.0**-25)
    assert ((decoded - x).abs() <= bound).all()


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("amax", BEYOND)
def test_values_beyond_the_largest_scale_saturate(name, amax):
    x = torch.tensor([1.0, -1.0] * 16) * amax
    decoded = assert_bytes(x.unsqueeze(0), name)[0]
    assert torch.equal(decoded, x.sign() * E4M3_MAX * 2.0**SCALE_EXPONENT_MAX)


@pytest.mark.parametrize("name", QUANTIZED)
def test_scales_stay_in_their_range(name):
    x = torch.randn(64, 32) * 10.0 ** torch.linspace(-38, 38, 64).unsqueeze(1)
    scale = numerics.decode_scales(numerics.encode_rows(x, get_format(name))[1])
    assert scale.min() == 2.0**SCALE_EXPONENT_MIN and scale.max() == 2.0**SCALE_EXPONENT_MAX


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bytes_of_random_rows(name, dtype):
    x = torch.randn(32, 512) * 10.0 ** torch.linspace(-6, 4, 32).unsqueeze(1)
    assert_bytes(x.to(dtype), name)


def test_amax_quotients_on_a_tie_go_to_the_even_code():
    """A reciprocal instead of the division moves some of these off the tie."""
    values = reference.E4M3_VALUES[: reference.E4M3_NAN].to(torch.float32)
    midpoints = ((values[1:] + values[:-1]) / 2).unflatten(0, (-1, 1))
    scales = torch.tensor([1.0, 0.75, 1.2998046875, 0.0333251953125]).unsqueeze(1)
    for midpoint in midpoints:
        rows = torch.cat([E4M3_MAX * scales, (midpoint * scales).expand(-1, 31)], -1)
        assert_bytes(rows, "fp8_e4m3_amax")
        codes, held = numerics.encode_rows(rows, get_format("fp8_e4m3_amax"))
        assert torch.equal(held.to(torch.float32), scales)
        assert (codes[:, 1:] % 2 == 0).all()


@given(st.lists(st.integers(0, 0xFFFF), min_size=32, max_size=32), st.sampled_from(QUANTIZED))
def test_bytes_of_any_bf16_block(bits, name):
    x = torch.tensor(bits).to(torch.int16).view(torch.bfloat16)
    decoded = assert_bytes(x.unsqueeze(0), name)[0]
    assert torch.equal(decoded.isnan(), x.isnan())
    assert not decoded.isinf().any()
