"""Device functions of block scales and e4m3 codes: what ``numerics`` defines, inside a tile.

Each function has the name and the result, bit for bit, of its twin in ``numerics``.
"""

import triton
import triton.language as tl

from fp8kv_inductor import formats, numerics

FP32_MANTISSA_BITS = tl.constexpr(numerics.FP32_MANTISSA_BITS)
FP32_BIAS = tl.constexpr(numerics.FP32_BIAS)
E4M3_MAX = tl.constexpr(formats.E4M3_MAX)
E4M3_NAN = tl.constexpr(numerics.E4M3_NAN)
E4M3_MANTISSA_BITS = tl.constexpr(3)
E4M3_EXPONENT_MIN = tl.constexpr(-6)
_CARRY, _SHIFT = numerics.ceil_log2_offsets(formats.E4M3_MAX)
CARRY = tl.constexpr(_CARRY)
SHIFT = tl.constexpr(_SHIFT)


@triton.jit
def finite_amax(blocks):
    """Largest finite magnitude `[R, N]` of fp32 ``blocks`` `[R, N, B]`."""
    magnitude = tl.abs(blocks)
    return tl.max(tl.where(magnitude < float("inf"), magnitude, 0.0), 2)


@triton.jit
def ceil_log2_ratio(x):
    """ceil(log2(x / E4M3_MAX)) as int32 for non-negative finite fp32 ``x``, from its bits."""
    return ((x.to(tl.int32, bitcast=True) + CARRY) >> FP32_MANTISSA_BITS) - SHIFT


@triton.jit
def exp2_int(exponent):
    """2^exponent as fp32, exactly, for int32 exponents of normal numbers."""
    return ((exponent + FP32_BIAS) << FP32_MANTISSA_BITS).to(tl.float32, bitcast=True)


@triton.jit
def round_to_e4m3(x):
    """fp32 ``x`` within +-E4M3_MAX rounded to the nearest e4m3 value, ties to even, as fp32.

    Adding 2^23 quanta leaves no bits below the quantum, so the addition itself rounds. The sign is
    put back afterwards, because -0.0 would come out of the subtraction as +0.0.
    """
    bits = x.to(tl.int32, bitcast=True)
    exponent = (tl.abs(x).to(tl.int32, bitcast=True) >> FP32_MANTISSA_BITS) - FP32_BIAS
    quantum_exponent = tl.maximum(exponent, E4M3_EXPONENT_MIN) - E4M3_MANTISSA_BITS
    magic = exp2_int(quantum_exponent + FP32_MANTISSA_BITS)
    magnitude = (tl.abs(x) + magic) - magic
    sign = (bits >> 31) << 31
    return (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_encode(x, ROUND_FIRST: tl.constexpr):
    """fp32 -> e4m3 codes (uint8): one round to nearest even, saturating, NaN -> E4M3_NAN.

    ``ROUND_FIRST`` is for GPUs whose conversion goes through fp16 and would round twice.
    """
    clamped = tl.minimum(tl.maximum(x, -E4M3_MAX), E4M3_MAX)
    if ROUND_FIRST:
        clamped = round_to_e4m3(clamped)
    codes = clamped.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return tl.where(x == x, codes, E4M3_NAN).to(tl.uint8)


@triton.jit
def e4m3_decode(codes):
    """e4m3 codes (uint8) -> fp32, exactly."""
    return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
