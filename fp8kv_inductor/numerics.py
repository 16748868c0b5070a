"""The definition of the bytes, in plain PyTorch: e4m3 codes, block scales, ``act_quant``.

Every kernel and lowering equals these functions bit for bit. They use integer arithmetic on
exponent bits instead of ``log2`` and ``exp2``, which are not exact on every device, and clamp
before every cast, because casts above 448 give NaN in one place and saturate in another.

Values that are not finite: a block maximum is taken over finite values, NaN stays NaN in its own
element (always code 0x7F), infinities saturate.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fp8kv_inductor.formats import (
    E4M3_MAX,
    SCALE_EXPONENT_MAX,
    SCALE_EXPONENT_MIN,
    RowFormat,
)

FP32_MANTISSA_BITS = 23
FP32_BIAS = 127
E4M3_NAN = 0x7F
ACT_QUANT_AMAX_MIN = 1e-4
"""Smallest block maximum of ``act_quant``, from the model's reference."""


def ceil_log2_offsets(limit: float) -> tuple[int, int]:
    """Integers (`carry`, `shift`) such that for positive normal fp32 ``x``

    ceil(log2(x / limit)) = ((bits(x) + carry) >> 23) - shift.

    ``carry`` pushes mantissas above that of ``limit``, an fp32 value, into the next exponent.
    """
    significand, exponent = math.frexp(limit)
    one = 1 << FP32_MANTISSA_BITS
    return 2 * one - 1 - int(2 * significand * one), exponent - 1 + FP32_BIAS


def ceil_log2_ratio(x: Tensor, limit: float) -> Tensor:
    """ceil(log2(x / limit)) as int32 for non-negative finite fp32 ``x``, exactly.

    Zero and subnormal ``x`` give an exponent below -126 - log2(limit), to be clamped by the caller.
    """
    carry, shift = ceil_log2_offsets(limit)
    return ((x.view(torch.int32) + carry) >> FP32_MANTISSA_BITS) - shift


def exp2_int(exponent: Tensor) -> Tensor:
    """2^exponent as fp32 for int32 exponents within [-126, 127], exactly."""
    return ((exponent + FP32_BIAS) << FP32_MANTISSA_BITS).view(torch.float32)


def finite_amax(blocks: Tensor) -> Tensor:
    """Largest finite magnitude along the last axis, kept as an axis of size 1."""
    magnitude = blocks.abs()
    return torch.where(magnitude < float("inf"), magnitude, 0.0).amax(-1, keepdim=True)


def e4m3_encode(x: Tensor) -> Tensor:
    """fp32 -> e4m3 codes (uint8): one round to nearest even, saturating, NaN -> 0x7F."""
    codes = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(x.isnan(), torch.full_like(codes, E4M3_NAN), codes)


def e4m3_decode(codes: Tensor) -> Tensor:
    """e4m3 codes (uint8) -> fp32, exactly."""
    return codes.view(torch.float8_e4m3fn).to(torch.float32)


def act_quant_exponent_max(dtype: torch.dtype) -> int:
    """Largest exponent of an ``act_quant`` scale, so that 448 * scale stays finite in ``dtype``."""
    return math.frexp(torch.finfo(dtype).max)[1] - 1 - (math.frexp(E4M3_MAX)[1] - 1)


def act_quant(x: Tensor, features: int, block: int = 64) -> Tensor:
    """The model's fp8 round trip of the first ``features`` of each row; the rest passes through.

    Per block: scale = 2^ceil(log2(max(amax, 1e-4) / 448)); e4m3(clamp(x / scale)) * scale.

    Args:
        x: `[..., D]`, floating point.
        features: leading features to round, a multiple of ``block``.
        block: elements per scale.

    Returns:
        `[..., D]` in the dtype of ``x``.
    """
    blocks = x[..., :features].to(torch.float32).unflatten(-1, (-1, block))
    amax = finite_amax(blocks).clamp_min(ACT_QUANT_AMAX_MIN)
    exponent = ceil_log2_ratio(amax, E4M3_MAX).clamp_max(act_quant_exponent_max(x.dtype))
    rounded = e4m3_decode(e4m3_encode(blocks * exp2_int(-exponent))) * exp2_int(exponent)
    return torch.cat([rounded.flatten(-2).to(x.dtype), x[..., features:]], -1)


def rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last R features of each row, interleaved pairs, by the angles of cos and sin.

    Every product and sum is rounded to fp32 on its own: kernels must not contract them to fma.

    Args:
        x: `[..., D]`, floating point.
        cos, sin: fp32, broadcastable to `[..., R / 2]`.
        inverse: rotate by the negative angles.
    """
    first = x.shape[-1] - 2 * cos.shape[-1]
    even, odd = x[..., first:].to(torch.float32).unflatten(-1, (-1, 2)).unbind(-1)
    if inverse:
        sin = -sin
    rotated = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
    return torch.cat([x[..., :first], rotated.to(x.dtype)], -1)


def encode_rows(rows: Tensor, fmt: RowFormat) -> tuple[Tensor, Tensor]:
    """Rows as a pool holds them.

    Args:
        rows: `[..., D]`, floating point.
        fmt: the row format.

    Returns:
        data `[..., D]` in ``fmt.code_dtype`` and scale `[..., D / block]` in ``fmt.scale_dtype``
        (`[..., 0]` for formats without scales).
    """
    scales = fmt.scales_per_row(rows.shape[-1])
    if not fmt.quantized:
        data = rows.to(fmt.code_dtype)
        return data, rows.new_empty((*rows.shape[:-1], scales), dtype=fmt.scale_dtype)
    blocks = rows.to(torch.float32).unflatten(-1, (scales, fmt.block))
    amax = finite_amax(blocks)
    if fmt.rule == "pow2":
        exponent = ceil_log2_ratio(amax, E4M3_MAX).clamp(SCALE_EXPONENT_MIN, SCALE_EXPONENT_MAX)
        scaled = blocks * exp2_int(-exponent)
        if fmt.scale_dtype == torch.uint8:
            scale = (exponent + FP32_BIAS).to(torch.uint8)
        else:
            scale = exp2_int(exponent).to(fmt.scale_dtype)
    else:
        bounded = (amax / E4M3_MAX).clamp(2.0**SCALE_EXPONENT_MIN, 2.0**SCALE_EXPONENT_MAX)
        scale = bounded.to(fmt.scale_dtype)
        scaled = blocks / scale.to(torch.float32)
    return e4m3_encode(scaled).flatten(-2), scale.squeeze(-1)


def decode_scales(scale: Tensor) -> Tensor:
    """Pool scales as fp32: one-byte scales are biased exponents."""
    if scale.dtype == torch.uint8:
        return exp2_int(scale.to(torch.int32) - FP32_BIAS)
    return scale.to(torch.float32)


def decode_rows(data: Tensor, scale: Tensor, fmt: RowFormat) -> Tensor:
    """The fp32 values `[..., D]` that pool rows stand for (inverse of :func:`encode_rows`)."""
    if not fmt.quantized:
        return data.to(torch.float32)
    blocks = e4m3_decode(data).unflatten(-1, (-1, fmt.block))
    return (blocks * decode_scales(scale).unsqueeze(-1)).flatten(-2)
