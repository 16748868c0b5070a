"""The read in eager mode against fp64: every format, masks, counts, sinks, poisoned rows, views."""

import math

import pytest
import torch

import fp8kv_inductor
from fp8kv_inductor import reference
from fp8kv_inductor.formats import FORMATS, get_format

NAMES = [name for name in FORMATS if name != "fp32"]
T, H, D, N, K, WINDOW = 5, 4, 64, 48, 40, 24
SCALE = D**-0.5


def make_pool(name: str, n_slots: int = N) -> fp8kv_inductor.Pool:
    pool = fp8kv_inductor.Pool.empty(n_slots, D, name)
    fp8kv_inductor.store(torch.randn(n_slots, D), torch.arange(n_slots), pool)
    return pool


def make_case(name: str = "fp8_e4m3", dtype: torch.dtype = torch.bfloat16) -> dict:
    """Arguments of a read with some masked columns and a count below the width."""
    window, cmp = make_pool(name), make_pool(name)
    indices = torch.stack([torch.randperm(N)[:K] for _ in range(T)])
    indices[torch.rand(T, K) < 0.2] = -1
    return dict(
        q=torch.randn(T, H, D).to(dtype),
        window_data=window.data,
        window_scale=window.scale,
        cmp_data=cmp.data,
        cmp_scale=cmp.scale,
        indices=indices,
        cmp_counts=torch.tensor([0, 1, 7, K - WINDOW, 1000]),
        sink=torch.randn(H),
        n_window=WINDOW,
        softmax_scale=SCALE,
        fmt=name,
    )


def read(case: dict) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ops.fp8kv.sparse_attention(**case)


def rms(error: torch.Tensor) -> torch.Tensor:
    return error.square().mean().sqrt()


def assert_close_to_reference(case: dict) -> None:
    """Within twice the error of the fp32 reference, rounded to q's dtype like the result.

    Of fp32 results the rms error is compared: the largest depends on the order of a BLAS's sums.
    lse gets one unit in the last place of its largest value on top.
    """
    out, lse = read(case)
    exact_out, exact_lse = reference.sparse_attention(**case)
    low_out, low_lse = reference.sparse_attention(**case, dtype=torch.float32)
    assert out.dtype == case["q"].dtype and out.shape == case["q"].shape
    assert lse.dtype == torch.float32
    assert out.isfinite().all()
    error, low_error = out - exact_out, low_out.to(out.dtype) - exact_out
    assert rms(error) <= 2 * rms(low_error)
    if out.dtype.itemsize == 2:
        assert error.abs().max() <= 2 * low_error.abs().max()
    dead = exact_lse == -math.inf
    assert torch.equal(lse == -math.inf, dead)
    exact, unit = exact_lse[~dead], torch.finfo(lse.dtype).eps
    if exact.numel():
        tolerance = 2 * (low_lse[~dead] - exact).abs().max() + unit * exact.abs().max()
        assert (lse[~dead] - exact).abs().max() <= tolerance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", NAMES)
def test_equals_reference(name, dtype):
    assert_close_to_reference(make_case(name, dtype))


@pytest.mark.parametrize("n_window", [0, 1, K])
def test_window_widths(n_window):
    case = make_case()
    case["n_window"] = n_window
    assert_close_to_reference(case)


@pytest.mark.parametrize("count", [-1, 0, 1, 15, 16, 17, 512, 2**31 - 1])
def test_counts_are_clamped_to_the_width(count):
    case = make_case()
    case["cmp_counts"] = torch.full((T,), count, dtype=torch.int32)
    assert_close_to_reference(case)
    if count >= K - WINDOW:
        out, lse = read(case)
        expected_out, expected_lse = read(case | {"cmp_counts": None})
        assert torch.equal(out, expected_out) and torch.equal(lse, expected_lse)


@pytest.mark.parametrize(
    "dead",
    [slice(0, 32), slice(0, WINDOW), slice(WINDOW, K), slice(0, K), slice(0, K - 1)],
    ids=["first tile", "window", "compressed", "all", "all but the last"],
)
@pytest.mark.parametrize("sink", [-math.inf, -1e30, 0.0, 80.0, math.inf])
def test_masked_columns_and_sinks(dead, sink):
    case = make_case()
    case["cmp_counts"] = None
    case["indices"] = torch.randint(0, N, (T, K), dtype=torch.int32)
    case["indices"][:, dead] = -1
    case["sink"] = torch.full((H,), sink)
    assert_close_to_reference(case)
    out, lse = read(case)
    if dead == slice(0, K):
        assert (lse == -math.inf).all()
    if dead == slice(0, K) or sink == math.inf:
        assert torch.equal(out, torch.zeros_like(out))


def test_the_sink_only_divides():
    case = make_case(dtype=torch.float32)
    without, lse = read(case | {"sink": torch.full((H,), -math.inf)})
    out, same_lse = read(case)
    factor = torch.sigmoid(lse - case["sink"])
    assert torch.equal(lse, same_lse)
    torch.testing.assert_close(out, without * factor.unsqueeze(-1))


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_do_not_exist_cannot_change_a_bit(name):
    """Every slot that no live column names holds NaN, slot 0 included."""
    case = make_case(name)
    case["indices"][case["indices"] == 0] = 1
    expected_out, expected_lse = read(case)
    column = torch.arange(K)
    live = (case["indices"] >= 0) & (column < WINDOW + case["cmp_counts"].unsqueeze(1))
    fmt = get_format(name)
    for tier, part in (("window", column < WINDOW), ("cmp", column >= WINDOW)):
        unused = torch.ones(N, dtype=torch.bool)
        unused[case["indices"][live & part]] = False
        assert unused[0] and unused.sum() < N
        case[f"{tier}_data"][unused] = reference.E4M3_NAN if fmt.quantized else math.nan
        case[f"{tier}_scale"][unused] = 255 if fmt.scale_dtype == torch.uint8 else math.inf
    out, lse = read(case)
    assert torch.equal(out, expected_out) and torch.equal(lse, expected_lse)


def test_no_columns():
    case = make_case()
    case |= {"indices": torch.empty(T, 0, dtype=torch.int32), "n_window": 0, "cmp_counts": None}
    out, lse = read(case)
    assert torch.equal(out, torch.zeros_like(out)) and (lse == -math.inf).all()


def test_no_tokens():
    case = make_case()
    case |= {name: case[name][:0] for name in ("q", "indices", "cmp_counts")}
    out, lse = read(case)
    assert out.shape == (0, H, D) and lse.shape == (0, H)


@pytest.mark.parametrize("name", NAMES)
def test_views_give_the_same_bits(name):
    """Layers and slices of larger pools, padded rows, transposed q, slices of wider tables."""
    case = make_case(name)
    expected_out, expected_lse = read(case)

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        wide = torch.zeros(len(tensor), tensor.shape[1] + 6, dtype=tensor.dtype)
        return wide[:, : tensor.shape[1]].copy_(tensor)

    for tensor in ("cmp_data", "cmp_scale", "indices"):
        case[tensor] = padded(case[tensor])
    for tensor in ("window_data", "window_scale"):
        case[tensor] = torch.stack([torch.zeros_like(case[tensor]), case[tensor]])[1]
    case["q"] = case["q"].transpose(0, 1).contiguous().transpose(0, 1)
    case["cmp_counts"] = case["cmp_counts"].repeat_interleave(2)[::2]
    out, lse = read(case)
    assert out.is_contiguous()
    assert torch.equal(out, expected_out) and torch.equal(lse, expected_lse)


def test_int32_and_int64_tables_agree():
    case = make_case()
    out, lse = read(case)
    case |= {name: case[name].to(torch.int32) for name in ("indices", "cmp_counts")}
    assert torch.equal(read(case)[0], out) and torch.equal(read(case)[1], lse)


@pytest.mark.parametrize(("column", "tier"), [(0, "window"), (WINDOW, "cmp")])
def test_an_index_beyond_the_pool_raises(column, tier):
    case = make_case()
    case["indices"][3, column] = N
    with pytest.raises(IndexError, match=f"index {N} is beyond the {tier} pool of {N} slots"):
        read(case)


def test_a_pool_without_rows():
    """As long as no column exists that names one."""
    case = make_case()
    case["indices"][:, WINDOW:] = -1
    expected = read(case)
    case |= {"cmp_data": case["cmp_data"][:0], "cmp_scale": case["cmp_scale"][:0]}
    assert all(map(torch.equal, read(case), expected))
    case["indices"][-1, -1] = 0
    with pytest.raises(IndexError, match="index 0 is beyond the cmp pool of 0 slots"):
        read(case)


def test_a_dead_index_beyond_the_pool_is_no_error():
    case = make_case()
    case["indices"][0, WINDOW:] = N
    assert case["cmp_counts"][0] == 0
    assert_close_to_reference({**case, "indices": case["indices"]})


def test_long_reads_are_cut_into_pieces(monkeypatch):
    case = make_case()
    expected_out, expected_lse = read(case)
    monkeypatch.setattr("fp8kv_inductor.ops.CPU_READ_ELEMENTS", 2 * K * D)
    out, lse = read(case)
    assert torch.equal(out, expected_out) and torch.equal(lse, expected_lse)


def test_wrapper_passes_pools():
    case = make_case()
    fmt = get_format(case["fmt"])
    out, lse = fp8kv_inductor.sparse_attention(
        case["q"],
        fp8kv_inductor.Pool(case["window_data"], case["window_scale"], fmt),
        fp8kv_inductor.Pool(case["cmp_data"], case["cmp_scale"], fmt),
        *(case[name] for name in ("indices", "cmp_counts", "sink", "n_window", "softmax_scale")),
    )
    expected_out, expected_lse = read(case)
    assert torch.equal(out, expected_out) and torch.equal(lse, expected_lse)
