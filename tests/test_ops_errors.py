"""Wrong arguments: an error that names the argument, what it is and what is needed."""

import pytest
import torch

import fp8kv_inductor
from fp8kv_inductor.formats import get_format

T, H, D, N, K = 2, 3, 64, 8, 6


def store_arguments(name: str = "fp8_e4m3") -> dict:
    pool = fp8kv_inductor.Pool.empty(N, D, name)
    return dict(
        rows=torch.randn(T, D), slots=torch.arange(T), data=pool.data, scale=pool.scale, fmt=name
    )


def read_arguments(name: str = "fp8_e4m3") -> dict:
    window, cmp = (fp8kv_inductor.Pool.empty(N, D, name) for _ in range(2))
    return dict(
        q=torch.randn(T, H, D),
        window_data=window.data,
        window_scale=window.scale,
        cmp_data=cmp.data,
        cmp_scale=cmp.scale,
        indices=torch.zeros(T, K, dtype=torch.int64),
        cmp_counts=torch.ones(T, dtype=torch.int64),
        sink=torch.zeros(H),
        n_window=2,
        softmax_scale=0.1,
        fmt=name,
    )


def index_arguments() -> dict:
    return dict(
        q=torch.randn(T, H, D),
        weights=torch.rand(T, H),
        idx_data=torch.zeros(N, D, dtype=torch.bfloat16),
        page_rows=torch.zeros(1, 2, dtype=torch.int64),
        request=torch.zeros(T, dtype=torch.int64),
        counts=torch.zeros(T, dtype=torch.int64),
        page_size=4,
    )


def rope_arguments() -> dict:
    return dict(x=torch.randn(T, D), cos=torch.rand(T, 8), sin=torch.rand(T, 8))


def act_quant_arguments() -> dict:
    return dict(x=torch.randn(T, D), features=32, block=32)


ARGUMENTS = {
    "store": store_arguments,
    "sparse_attention": read_arguments,
    "indexer_scores": index_arguments,
    "rope": rope_arguments,
    "act_quant": act_quant_arguments,
}
codes = torch.zeros(N, D, dtype=torch.uint8)
scales = torch.zeros(N, 2, dtype=torch.float16)

CASES = [
    ("store", "data", codes.view(torch.float8_e5m2), r"data .*\bfloat8_e5m2; needed: torch.uint8"),
    ("store", "data", codes.view(torch.float8_e4m3fnuz), r"data .*\bfloat8_e4m3fnuz; needed"),
    ("store", "data", codes.float(), r"data .*\bfloat32; needed: torch.uint8"),
    ("store", "data", codes[:, :32], r"data width and head_dim: 32 against 64"),
    ("store", "data", codes.view(D, N).T, r"data rows have element stride"),
    ("store", "data", codes[0], r"data has 1 dimensions"),
    ("store", "scale", scales.bfloat16(), r"scale .*\bbfloat16; needed: torch.float16"),
    ("store", "scale", scales.view(torch.uint8)[:, :2], r"scale .*\buint8; needed: torch.float16"),
    ("store", "scale", scales[1:], r"data and scale slots: 8 against 7"),
    ("store", "scale", scales[:, :1], r"scale width and head_dim / 32: 1 against 2"),
    ("store", "rows", torch.zeros(T, D, dtype=torch.float64), r"rows has dtype torch.float64"),
    ("store", "rows", torch.zeros(T, 2, D), r"rows has 3 dimensions"),
    ("store", "slots", torch.zeros(T), r"slots has dtype torch.float32; needed: torch.int32"),
    ("store", "slots", torch.arange(T + 1), r"tokens of rows and slots: 2 against 3"),
    ("store", "fmt", "fp8", r"unknown row format 'fp8'; known: bf16"),
    ("sparse_attention", "window_data", codes.float(), r"window_data .*\bfloat32; needed"),
    ("sparse_attention", "cmp_data", codes.view(torch.int8), r"cmp_data .*\bint8; needed"),
    ("sparse_attention", "cmp_scale", scales.bfloat16(), r"cmp_scale .*\bbfloat16; needed"),
    ("sparse_attention", "q", torch.zeros(T, H, 32), r"window_data width and head_dim"),
    ("sparse_attention", "indices", torch.zeros(T, K), r"indices has dtype torch.float32"),
    ("sparse_attention", "n_window", K + 1, r"n_window is 7 of 6 columns"),
    ("sparse_attention", "n_window", -1, r"n_window is -1"),
    ("sparse_attention", "cmp_counts", torch.zeros(T), r"cmp_counts has dtype torch.float32"),
    ("sparse_attention", "sink", torch.zeros(H).double(), r"sink has dtype torch.float64"),
    ("sparse_attention", "sink", torch.zeros(1), r"heads of q and sink: 3 against 1"),
    ("indexer_scores", "idx_data", codes, r"idx_data .*\buint8; needed: torch.bfloat16"),
    ("indexer_scores", "weights", torch.rand(T, H).bfloat16(), r"weights has dtype"),
    ("indexer_scores", "weights", torch.rand(T, 1), r"heads of q and weights: 3 against 1"),
    ("indexer_scores", "counts", torch.zeros(T), r"counts has dtype torch.float32"),
    ("indexer_scores", "request", torch.zeros(1).long(), r"tokens of q and request: 2 against 1"),
    ("indexer_scores", "page_size", 0, r"page_size is 0; needed: 1 or more"),
    ("rope", "cos", torch.rand(T, 8).bfloat16(), r"cos has dtype torch.bfloat16"),
    ("rope", "sin", torch.rand(T, 4), r"widths of cos and sin: 8 against 4"),
    ("rope", "x", torch.randn(T, 8), r"cos holds 8 pairs, but rows of x have 8 features"),
    ("rope", "x", torch.randn(T + 1, D), r"tokens of x and cos: 3 against 2"),
    ("act_quant", "features", 33, r"features is 33 of rows with 64; needed: a positive multiple"),
    ("act_quant", "features", 96, r"features is 96 of rows with 64"),
    ("act_quant", "block", 24, r"block is 24; needed: a positive power of two"),
    ("act_quant", "x", torch.zeros(T, D, dtype=torch.int32), r"x has dtype torch.int32"),
]


@pytest.mark.parametrize("mode", ["eager", "fake"])
@pytest.mark.parametrize(
    ("op", "argument", "value", "message"),
    CASES,
    ids=[f"{c[0]}-{c[1]}-{i}" for i, c in enumerate(CASES)],
)
def test_wrong_argument(op, argument, value, message, mode):
    """The same check in eager mode and in the fakes, which is where torch.compile meets it."""
    arguments = ARGUMENTS[op]() | {argument: value}
    if mode == "fake":
        arguments = {
            name: each.to("meta") if isinstance(each, torch.Tensor) else each
            for name, each in arguments.items()
        }
    with pytest.raises((ValueError, RuntimeError), match=message):
        getattr(torch.ops.fp8kv, op)(**arguments)


@pytest.mark.parametrize("op", list(ARGUMENTS))
def test_the_unchanged_arguments_are_accepted(op):
    getattr(torch.ops.fp8kv, op)(**ARGUMENTS[op]())


def test_head_dim_must_be_a_multiple_of_the_block():
    with pytest.raises(ValueError, match="head_dim must be a multiple of 32"):
        get_format("fp8_e4m3").row_bytes(48)


def test_pools_of_two_formats_cannot_be_read_together():
    arguments = read_arguments()
    window = fp8kv_inductor.Pool.empty(N, D, "bf16")
    cmp = fp8kv_inductor.Pool.empty(N, D, "fp8_e4m3")
    with pytest.raises(ValueError, match="quantize both pools or neither"):
        fp8kv_inductor.sparse_attention(
            arguments["q"], window, cmp, arguments["indices"], None, arguments["sink"], 2, 0.1
        )
