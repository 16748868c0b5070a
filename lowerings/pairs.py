"""``act_quant`` in front of ``store``, with two columns of a row in a 32-bit register.

The generic lowerings take a column at a time through fp32. Here both quantizations of a row become
one: e4m3 values are fp16 values, powers of two scale them exactly, and the block maximum of the
store is taken over them. What ``act_quant`` lets pass is quantized once, with its pool scale.
"""

from __future__ import annotations

import math

import sympy
import torch
from torch._inductor.virtualized import ops
from torch.utils._sympy.functions import FloorDiv

from fp8kv_inductor.formats import E4M3_MAX, SCALE_EXPONENT_MAX, SCALE_EXPONENT_MIN, RowFormat
from fp8kv_inductor.lowerings import block, exact
from fp8kv_inductor.lowerings.exact import OpsValue, i32
from fp8kv_inductor.numerics import ACT_QUANT_AMAX_MIN, FP32_BIAS, act_quant_exponent_max

PAIR = 0x00010001
"""Times a 16-bit value: the value in both halves."""

BF16_MANTISSA_BITS = 7
FP16_MANTISSA_BITS = 10
FP16_BIAS = 15

ACT_QUANT_EXPONENT_MIN = math.ceil(math.log2(ACT_QUANT_AMAX_MIN / E4M3_MAX))


def pack_bf16(even: OpsValue, odd: OpsValue) -> OpsValue:
    """Two fp32 columns, rounded to bf16."""
    return block.packed("cvt.rn.bf16x2.f32 $0, $2, $1;", even, odd)


def unpack_bf16(pairs: OpsValue) -> tuple[OpsValue, OpsValue]:
    """The even and the odd column as fp32."""
    even = ops.bitwise_left_shift(pairs, i32(16))
    odd = ops.bitwise_and(pairs, i32(-(1 << 16)))
    return exact.from_bits(even), exact.from_bits(odd)


def encode(
    pairs: OpsValue, column: sympy.Expr, features: int, group: int, fmt: RowFormat
) -> tuple[OpsValue, OpsValue]:
    """``act_quant`` and the pow2 rule of ``fmt``.

    Args:
        pairs: bf16 columns, finite or not.
        column: index expression of the element within its row.
        features, group: of ``act_quant``; multiples of the block of ``fmt``.
        fmt: row format.

    Returns:
        uint8 code, one element of a row, and the fp32 scale of its block, one per block.
    """

    def times_pow2(values: OpsValue, factors: OpsValue, kind: str) -> OpsValue:
        return block.packed(
            f"mul.rn.{kind} $0, $1, $2;", values, block.spread(factors, column, fmt.block, 2)
        )

    number = block.group_index(FloorDiv(column, fmt.block), fmt.block)
    is_quantized = ops.lt(number, i32(features // fmt.block))

    # x * 0 + x is NaN where x is not finite.
    finite = block.packed("fma.rn.bf16x2 $0, $1, $2, $1;", pairs, i32(0))
    amax = block.packed_amax(finite, column, fmt.block, "bf16")
    group_amax = block.amax_of_groups(amax, column, fmt.block, group)
    exponent = exact.block_exponent(
        ops.where(is_quantized, group_amax, amax),
        ops.where(is_quantized, i32(ACT_QUANT_EXPONENT_MIN), i32(SCALE_EXPONENT_MIN)),
        ops.where(
            is_quantized,
            i32(act_quant_exponent_max(torch.bfloat16)),
            i32(SCALE_EXPONENT_MAX),
        ),
    )
    inverse = ops.mul(ops.sub(i32(FP32_BIAS), exponent), i32(PAIR << BF16_MANTISSA_BITS))
    # Exact, or so small that its code is 0.
    scaled = times_pow2(pairs, inverse, "bf16x2")
    on_grid = block.packed(
        "{ .reg .b16 codes; cvt.rn.satfinite.e4m3x2.f32 codes, $2, $1; "
        "cvt.rn.f16x2.e4m3x2 $0, codes; }",
        *unpack_bf16(scaled),
    )

    largest = block.packed_amax(on_grid, column, fmt.block, "f16")
    stored_exponent = exact.block_exponent(
        ops.mul(largest, exact.exp2_int(exponent)),
        ops.where(is_quantized, i32(SCALE_EXPONENT_MIN), exponent),
        i32(SCALE_EXPONENT_MAX),
    )
    # From 2^18 on everything but 0 saturates. A factor in fp16 is at most 2^15.
    shift = ops.sub(exponent, stored_exponent)
    first = ops.minimum(shift, i32(FP16_BIAS))
    second = ops.minimum(ops.sub(shift, first), i32(FP16_BIAS))
    for power in (first, second):
        factor = ops.mul(ops.add(power, i32(FP16_BIAS)), i32(PAIR << FP16_MANTISSA_BITS))
        on_grid = times_pow2(on_grid, factor, "f16x2")
    codes = block.packed_codes(on_grid, column)
    return codes, exact.encode_scale(exact.exp2_int(stored_exponent), fmt)
