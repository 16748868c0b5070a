"""The oracle: every operator in data-path order, slow and readable, sharing no code with others.

Bytes come from a table of all e4m3 values and from ``math.frexp``; sums run in fp64 unless a test
asks for a lower precision to learn how much error that precision makes. Signatures are those of the
operators in ``ops``. Not for use in a model.
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
    get_format,
)

E4M3_NAN = 0x7F
E8M0_BIAS = 127
ACT_QUANT_AMAX_MIN = 1e-4


def e4m3_value(code: int) -> float:
    """Value of one e4m3fn code: sign, 4 exponent bits of bias 7, 3 mantissa bits, no infinities."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 0xF, code & 0x7
    if code & 0x7F == E4M3_NAN:
        return math.nan
    if exponent == 0:
        return sign * math.ldexp(mantissa, -9)
    return sign * math.ldexp(8 + mantissa, exponent - 10)


E4M3_VALUES = torch.tensor([e4m3_value(code) for code in range(256)], dtype=torch.float64)
"""`[256]` fp64: the value of each code."""


def e4m3_encode(x: Tensor) -> Tensor:
    """Codes (uint8) of the nearest e4m3 values, ties to the even code; saturates, NaN -> 0x7F."""
    magnitude = x.to(torch.float64).abs()
    grid = E4M3_VALUES[:E4M3_NAN]
    above = torch.searchsorted(grid, magnitude).clamp_max(len(grid) - 1)
    below = (above - 1).clamp_min(0)
    to_above, to_below = grid[above] - magnitude, magnitude - grid[below]
    take_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    code = torch.where(take_above, above, below)
    code = torch.where(torch.signbit(x), code + 0x80, code)
    return torch.where(x.isnan(), E4M3_NAN, code).to(torch.uint8)


def finite_amax(block: Tensor) -> float:
    """Largest finite magnitude of a block, 0 without one."""
    finite = block[block.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def ceil_log2_ratio(x: float, limit: float) -> int:
    """ceil(log2(x / limit)) of positive numbers, without a logarithm or a division."""
    (x_mantissa, x_exponent), (limit_mantissa, limit_exponent) = math.frexp(x), math.frexp(limit)
    return x_exponent - limit_exponent + (x_mantissa > limit_mantissa)


def rope(
    x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False, dtype: torch.dtype = torch.float64
) -> Tensor:
    """The last R features are R / 2 complex numbers; they are multiplied by cos + i sin.

    Args:
        x: `[T, D]` or `[T, H, D]`.
        cos, sin: `[T, R / 2]`.
        inverse: multiply by cos - i sin.
        dtype: of the arithmetic and the result.
    """
    result = x.to(dtype, copy=True)
    first = x.shape[-1] - 2 * cos.shape[1]
    for token in range(x.shape[0]):
        c, s = cos[token].to(dtype), sin[token].to(dtype)
        if inverse:
            s = -s
        real = x[token, ..., first::2].to(dtype)
        imaginary = x[token, ..., first + 1 :: 2].to(dtype)
        result[token, ..., first::2] = real * c - imaginary * s
        result[token, ..., first + 1 :: 2] = real * s + imaginary * c
    return result


def act_quant(x: Tensor, features: int, block: int = 64) -> Tensor:
    """Round the first ``features`` of each row to e4m3 with a power-of-two scale per block.

    scale = 2^ceil(log2(max(amax, 1e-4) / 448)), kept so small that 448 * scale is finite in the
    dtype of ``x``.

    Args:
        x: `[..., D]`.
        features: leading features to round.
        block: elements per scale.
    """
    result = x.clone(memory_format=torch.contiguous_format)
    for row in result.view(-1, x.shape[-1]):
        for start in range(0, features, block):
            values = row[start : start + block].to(torch.float64)
            amax_min = float(torch.tensor(ACT_QUANT_AMAX_MIN, dtype=torch.float32))
            exponent = ceil_log2_ratio(max(finite_amax(values), amax_min), E4M3_MAX)
            while math.ldexp(E4M3_MAX, exponent) > torch.finfo(x.dtype).max:
                exponent -= 1
            codes = e4m3_encode(values * math.ldexp(1.0, -exponent))
            rounded = E4M3_VALUES[codes.long()] * math.ldexp(1.0, exponent)
            row[start : start + block] = rounded.to(x.dtype)
    return result


def encode_row(row: Tensor, fmt: RowFormat) -> tuple[Tensor, Tensor]:
    """One row `[D]` as a pool holds it: data `[D]` and scale `[D / block]`."""
    if not fmt.quantized:
        return row.to(fmt.code_dtype), torch.empty(0, dtype=fmt.scale_dtype)
    codes, scales = [], []
    for block in row.to(torch.float64).split(fmt.block):
        amax = finite_amax(block)
        if fmt.rule == "pow2":
            exponent = ceil_log2_ratio(amax, E4M3_MAX) if amax else SCALE_EXPONENT_MIN
            exponent = min(max(exponent, SCALE_EXPONENT_MIN), SCALE_EXPONENT_MAX)
            codes.append(e4m3_encode(block * math.ldexp(1.0, -exponent)))
            one_byte = fmt.scale_dtype == torch.uint8
            held = exponent + E8M0_BIAS if one_byte else math.ldexp(1.0, exponent)
            scales.append(torch.tensor(held).to(fmt.scale_dtype))
        else:
            # Quotients are fp32 numbers. Rounding them in fp64 first changes nothing: 53 >= 2*24+2.
            quotient = torch.tensor(amax / E4M3_MAX, dtype=torch.float64).to(torch.float32)
            bounded = quotient.clamp(2.0**SCALE_EXPONENT_MIN, 2.0**SCALE_EXPONENT_MAX)
            scale = bounded.to(fmt.scale_dtype)
            codes.append(e4m3_encode((block / scale.to(torch.float64)).to(torch.float32)))
            scales.append(scale)
    return torch.cat(codes), torch.stack(scales)


def decode_row(data: Tensor, scale: Tensor, fmt: RowFormat) -> Tensor:
    """The fp64 values `[D]` of one pool row."""
    if not fmt.quantized:
        return data.to(torch.float64)
    if fmt.scale_dtype == torch.uint8:
        factors = [math.ldexp(1.0, int(biased) - E8M0_BIAS) for biased in scale]
    else:
        factors = [float(factor) for factor in scale]
    blocks = E4M3_VALUES[data.long()].split(fmt.block)
    return torch.cat([block * factor for block, factor in zip(blocks, factors, strict=True)])


def store(rows: Tensor, slots: Tensor, data: Tensor, scale: Tensor, fmt: str) -> None:
    """Encode rows and write them, in order; rows with a negative slot are skipped.

    Args:
        rows: `[T, D]`.
        slots: `[T]`.
        data: `[N, D]`, written in place.
        scale: `[N, D / block]`, written in place.
        fmt: name of the row format.
    """
    row_format = get_format(fmt)
    for row, slot in zip(rows, slots.tolist(), strict=True):
        if slot < 0:
            continue
        codes, scales = encode_row(row, row_format)
        data[slot] = codes
        if row_format.quantized:
            scale[slot] = scales


def indexer_scores(
    q: Tensor,
    weights: Tensor,
    idx_data: Tensor,
    page_rows: Tensor,
    request: Tensor,
    counts: Tensor,
    page_size: int,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """sum over heads of weight * relu(q . key), key after key; -inf beyond the count.

    Args:
        q: `[T, HI, DI]`.
        weights: `[T, HI]`.
        idx_data: `[NI, DI]`.
        page_rows: `[R, P]` first key row of each page.
        request: `[T]` row of ``page_rows``.
        counts: `[T]` live keys, clamped to the width.
        page_size: keys per page.
        dtype: of the arithmetic and the result `[T, P * page_size]`.
    """
    width = page_rows.shape[1] * page_size
    scores = torch.full((q.shape[0], width), -math.inf, dtype=dtype)
    for token in range(q.shape[0]):
        for position in range(min(int(counts[token]), width)):
            page, offset = divmod(position, page_size)
            key = idx_data[int(page_rows[request[token], page]) + offset].to(dtype)
            dots = (q[token].to(dtype) * key).sum(-1).clamp_min(0.0)
            scores[token, position] = (weights[token].to(dtype) * dots).sum()
    return scores


def sparse_attention(
    q: Tensor,
    window_data: Tensor,
    window_scale: Tensor,
    cmp_data: Tensor,
    cmp_scale: Tensor,
    indices: Tensor,
    cmp_counts: Tensor | None,
    sink: Tensor,
    n_window: int,
    softmax_scale: float,
    fmt: str,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """One softmax over the rows that a token's live columns name; the sink only divides.

    Args:
        q: `[T, H, D]`.
        window_data, window_scale: pool of the first ``n_window`` columns.
        cmp_data, cmp_scale: pool of the other columns.
        indices: `[T, K]` slots, negative for none.
        cmp_counts: `[T]` live columns after the window, or None for all.
        sink: `[H]`, natural log.
        n_window: number of window columns.
        softmax_scale: factor of the dot products.
        fmt: name of the row format of both pools.
        dtype: of the arithmetic and the results.

    Returns:
        out `[T, H, D]` and lse `[T, H]`, natural log, without the sink.
    """
    row_format = get_format(fmt)
    out = torch.zeros(q.shape, dtype=dtype)
    lse = torch.full(q.shape[:2], -math.inf, dtype=dtype)
    for token in range(q.shape[0]):
        rows = []
        for column, slot in enumerate(indices[token].tolist()):
            in_window = column < n_window
            beyond = cmp_counts is not None and column >= n_window + int(cmp_counts[token])
            if slot < 0 or (beyond and not in_window):
                continue
            data, scale = (window_data, window_scale) if in_window else (cmp_data, cmp_scale)
            scales = scale[slot] if row_format.quantized else scale
            rows.append(decode_row(data[slot], scales, row_format).to(dtype))
        if not rows:
            continue
        kv = torch.stack(rows)
        for head in range(q.shape[1]):
            scores = kv @ q[token, head].to(dtype) * softmax_scale
            lse[token, head] = torch.logsumexp(scores, 0)
            total = torch.logaddexp(lse[token, head], sink[head].to(dtype))
            out[token, head] = torch.exp(scores - total) @ kv
    return out, lse
