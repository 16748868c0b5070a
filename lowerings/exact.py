"""numerics.py as Inductor IR: rounding that may not be dropped, e4m3 codes, exact scales.

Functions take and give ``ops`` values (one element); ``Target`` says what the device needs.
Inductor computes bf16 and fp16 in fp32 and drops casts between them when it fuses. Everything here
therefore rounds for itself, so that bytes do not depend on what was fused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch._inductor.virtualized import ops

from fp8kv_inductor.formats import (
    E4M3_MAX,
    SCALE_EXPONENT_MAX,
    SCALE_EXPONENT_MIN,
    RowFormat,
)
from fp8kv_inductor.lowerings import block
from fp8kv_inductor.numerics import (
    E4M3_NAN,
    FP32_BIAS,
    FP32_MANTISSA_BITS,
    ceil_log2_offsets,
)

OpsValue = Any
BlockScale = tuple[OpsValue, OpsValue]
"""A power-of-two scale and its inverse."""

F32 = torch.float32
I32 = torch.int32
U8 = torch.uint8
E4M3 = torch.float8_e4m3fn

SIGN_BIT = -(1 << 31)
EXPONENT_MASK = 0xFF << FP32_MANTISSA_BITS

SINGLE_ROUNDING_CAPABILITY = (9, 0)
"""First compute capability whose Triton cast from fp32 to e4m3 rounds once."""


@dataclass(frozen=True)
class Target:
    """What a device's code generator can do.

    Attributes:
        triton: Triton prints the kernel, so the primitives of ``block`` exist.
        capability: compute capability of a GPU.
        single_rounding_cast: its cast from fp32 to e4m3 is one round to nearest even.
        sm_count: streaming multiprocessors of a GPU.
        shared_bytes: shared memory that one program may use on a GPU.
    """

    triton: bool = False
    capability: tuple[int, int] = (0, 0)
    single_rounding_cast: bool = True
    sm_count: int = 0
    shared_bytes: int = 0

    @classmethod
    def of(cls, device: torch.device) -> Target:
        """The target behind ``device``."""
        if device.type != "cuda":
            return cls()
        properties: Any = torch.cuda.get_device_properties(device)
        capability = (properties.major, properties.minor)
        return cls(
            triton=True,
            capability=capability,
            single_rounding_cast=capability >= SINGLE_ROUNDING_CAPABILITY,
            sm_count=properties.multi_processor_count,
            shared_bytes=properties.shared_memory_per_block_optin,
        )


def f32(value: float) -> OpsValue:
    """An fp32 constant."""
    return ops.constant(value, F32)


def i32(value: int) -> OpsValue:
    """An int32 constant."""
    return ops.constant(value, I32)


def rounded(value: OpsValue, dtype: torch.dtype, target: Target) -> OpsValue:
    """``value`` as fp32, rounded to ``dtype`` by a cast that Inductor keeps."""
    if dtype == F32:
        return ops.to_dtype(value, F32)
    if dtype == torch.bfloat16 and target.triton:
        return block.round_bf16(ops.to_dtype(value, F32))
    narrow = ops.to_dtype(value, dtype, src_dtype=F32, use_compute_types=False)
    return ops.to_dtype(narrow, F32, src_dtype=dtype)


def clamp(value: OpsValue, low: float, high: float) -> OpsValue:
    """fp32 clamp that keeps NaN."""
    return ops.minimum(ops.maximum(value, f32(low)), f32(high))


def bits(value: OpsValue) -> OpsValue:
    """The bits of an fp32 value as int32."""
    return ops.to_dtype_bitcast(value, I32, F32)


def from_bits(value: OpsValue) -> OpsValue:
    """The fp32 value behind int32 bits."""
    return ops.to_dtype_bitcast(value, F32, I32)


def finite_magnitude_or_nan(value: OpsValue) -> OpsValue:
    """|value|, and NaN for infinities, which ``block_amax`` passes over.

    One fma instead of a comparison and a selection.
    """
    return ops.abs(ops.add(ops.mul(value, f32(0.0)), value))


def finite_magnitude(value: OpsValue) -> OpsValue:
    """|value|, and 0 for infinities and NaN."""
    magnitude = ops.abs(value)
    return ops.where(ops.lt(magnitude, f32(float("inf"))), magnitude, f32(0.0))


def ceil_log2_ratio(value: OpsValue, limit: float) -> OpsValue:
    """ceil(log2(value / limit)) as int32 (:func:`numerics.ceil_log2_ratio`)."""
    carry, shift = ceil_log2_offsets(limit)
    exponent = ops.bitwise_right_shift(ops.add(bits(value), i32(carry)), i32(FP32_MANTISSA_BITS))
    return ops.sub(exponent, i32(shift))


def exp2_int(exponent: OpsValue) -> OpsValue:
    """2^exponent as fp32, exactly."""
    return from_bits(
        ops.bitwise_left_shift(ops.add(exponent, i32(FP32_BIAS)), i32(FP32_MANTISSA_BITS))
    )


def on_grid(value: OpsValue, dtype: torch.dtype) -> OpsValue:
    """An fp32 value within the range of a narrow dtype, rounded to its nearest value, still fp32.

    Adding and subtracting 1.5 * 2^n, n such that its last mantissa bit is worth one step of the
    dtype, leaves the rounding to fp32 addition, which is to nearest even. NaN stays NaN, -0 stays
    -0.
    """
    narrow = torch.finfo(dtype)
    min_normal_exponent, mantissa_bits = (
        round(math.log2(power)) for power in (narrow.smallest_normal, 1 / narrow.eps)
    )
    exponent = ops.maximum(
        ops.bitwise_and(bits(value), i32(EXPONENT_MASK)),
        i32((FP32_BIAS + min_normal_exponent) << FP32_MANTISSA_BITS),
    )
    dropped = FP32_MANTISSA_BITS - mantissa_bits
    half = 1 << (FP32_MANTISSA_BITS - 1)
    anchor = from_bits(ops.add(exponent, i32((dropped << FP32_MANTISSA_BITS) + half)))
    there = ops.sub(ops.add(value, anchor), anchor)
    return from_bits(ops.bitwise_or(bits(there), ops.bitwise_and(bits(value), i32(SIGN_BIT))))


def e4m3_cast(value: OpsValue, target: Target) -> OpsValue:
    """e4m3 of an fp32 value: one round to nearest even, saturating, NaN stays NaN."""
    if target.triton and target.single_rounding_cast:
        # One instruction, which saturates by itself.
        return ops.to_dtype(value, E4M3, src_dtype=F32)
    value = clamp(value, -E4M3_MAX, E4M3_MAX)
    if not target.single_rounding_cast:
        value = on_grid(value, E4M3)
    return ops.to_dtype(value, E4M3, src_dtype=F32)


def e4m3_codes(value: OpsValue, target: Target) -> OpsValue:
    """e4m3 codes (uint8) of an fp32 value (:func:`numerics.e4m3_encode`)."""
    codes = ops.to_dtype_bitcast(e4m3_cast(value, target), U8, E4M3)
    if target.triton:
        return codes
    # GPUs have one e4m3 NaN; the cast on the CPU keeps the sign.
    return ops.where(ops.isnan(value), ops.constant(E4M3_NAN, U8), codes)


def e4m3_values(code: OpsValue) -> OpsValue:
    """fp32 values of e4m3 codes (:func:`numerics.e4m3_decode`)."""
    return ops.to_dtype(ops.to_dtype_bitcast(code, E4M3, U8), F32, src_dtype=E4M3)


def act_quant(value: OpsValue, scale: OpsValue, inverse: OpsValue, target: Target) -> OpsValue:
    """fp32 result of ``act_quant`` for one element, given its block's scale and the inverse."""
    if target.single_rounding_cast:
        quantized = e4m3_cast(ops.mul(value, inverse), target)
        return ops.mul(ops.to_dtype(quantized, F32, src_dtype=E4M3), scale)
    scaled = clamp(ops.mul(value, inverse), -E4M3_MAX, E4M3_MAX)
    return ops.mul(on_grid(scaled, E4M3), scale)


def block_exponent(amax: OpsValue, low: OpsValue, high: OpsValue) -> OpsValue:
    """ceil(log2(amax / 448)) within the int32 values ``low`` and ``high``."""
    return ops.minimum(ops.maximum(ceil_log2_ratio(amax, E4M3_MAX), low), high)


def pow2_scale(amax: OpsValue, minimum: float, exponents: tuple[int, int]) -> BlockScale:
    """Block scale 2^e, e = ceil(log2(max(amax, minimum) / 448)) within ``exponents``."""
    if minimum > 0:
        amax = ops.maximum(amax, f32(minimum))
    exponent = block_exponent(amax, *map(i32, exponents))
    return exp2_int(exponent), exp2_int(ops.neg(exponent))


def amax_scale(amax: OpsValue, fmt: RowFormat, target: Target) -> OpsValue:
    """Block scale amax / 448 of the amax rule, rounded to the scale dtype of ``fmt``, as fp32."""
    bounded = clamp(
        _divide(target)(amax, f32(E4M3_MAX)), 2.0**SCALE_EXPONENT_MIN, 2.0**SCALE_EXPONENT_MAX
    )
    if target.triton:
        return rounded(bounded, fmt.scale_dtype, target)
    # Where a value is cast and cast back, torch 2.11's C++ code takes the value itself.
    return on_grid(bounded, fmt.scale_dtype)


def quotient(value: OpsValue, scale: OpsValue, target: Target) -> OpsValue:
    """Correctly rounded ``value / scale`` in fp32."""
    return _divide(target)(value, scale)


def _divide(target: Target) -> Any:
    return block.div_rn if target.triton else ops.truediv


def encode_scale(scale: OpsValue, fmt: RowFormat) -> OpsValue:
    """An fp32 block scale as a pool holds it: one-byte scales are biased exponents."""
    if fmt.scale_dtype == U8:
        exponent = ops.bitwise_right_shift(bits(scale), i32(FP32_MANTISSA_BITS))
        return ops.to_dtype(exponent, U8, src_dtype=I32)
    return ops.to_dtype(scale, fmt.scale_dtype, src_dtype=F32)


def decode_scale(scale: OpsValue, fmt: RowFormat) -> OpsValue:
    """A pool scale as fp32 (:func:`numerics.decode_scales`)."""
    if fmt.scale_dtype == U8:
        return exp2_int(ops.sub(ops.to_dtype(scale, I32, src_dtype=U8), i32(FP32_BIAS)))
    return ops.to_dtype(scale, F32, src_dtype=fmt.scale_dtype)
