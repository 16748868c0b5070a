"""The read kernels, prefill and split-k, against fp64."""

import math

import pytest
import torch
from interpreter import DEVICES, launch

from fp8kv_inductor import numerics, reference
from fp8kv_inductor.formats import RowFormat, get_format
from fp8kv_inductor.kernels.attention import (
    SPLIT_COLUMNS,
    choose_read_config,
    choose_splits,
    sparse_attention,
)

T, H, D, N, K, WINDOW = 3, 5, 96, 64, 75, 37
NAMES = ["bf16", "fp8_e4m3", "fp8_e4m3_amax", "fp8_e4m3_ue8m0"]
SPLITS = [1, 3]


def make_pool(fmt: RowFormat, head_dim: int = D, n_slots: int = N):
    return numerics.encode_rows(torch.randn(n_slots, head_dim), fmt)


def make_case(name: str = "fp8_e4m3", dtype: torch.dtype = torch.bfloat16, **sizes: int) -> dict:
    """Arguments of a read with masked columns, counts on both sides of the width, all sinks."""
    tokens, heads, head_dim = sizes.get("tokens", T), sizes.get("heads", H), sizes.get("dim", D)
    columns, n_window = sizes.get("columns", K), sizes.get("n_window", WINDOW)
    fmt = get_format(name)
    indices = torch.randint(0, N, (tokens, columns))
    indices[torch.rand(tokens, columns) < 0.2] = -1
    counts = torch.tensor([1, 1000, 20])
    return dict(
        q=torch.randn(tokens, heads, head_dim).to(dtype),
        window=make_pool(fmt, head_dim),
        cmp=make_pool(fmt, head_dim),
        indices=indices,
        cmp_counts=counts[torch.arange(tokens) % 3],
        sink=torch.randn(heads),
        n_window=n_window,
        softmax_scale=2 * head_dim**-0.5,
        row_format=fmt,
    )


def read(device, case, splits=1):
    return launch(device, sparse_attention, *case.values(), splits=splits)


def exact_read(case, dtype=torch.float64):
    """The oracle, over arguments as the kernel takes them."""
    pools = {
        f"{tier}_{part}": tensor
        for tier in ("window", "cmp")
        for part, tensor in zip(("data", "scale"), case[tier], strict=True)
    }
    rest = {key: case[key] for key in ("q", "indices", "cmp_counts", "sink", "n_window")}
    return reference.sparse_attention(
        **rest,
        **pools,
        softmax_scale=case["softmax_scale"],
        fmt=case["row_format"].name,
        dtype=dtype,
    )


def live_columns(case):
    column = torch.arange(case["indices"].shape[1])
    live = case["indices"] >= 0
    if case["cmp_counts"] is not None:
        live &= column < (case["n_window"] + case["cmp_counts"].clamp_min(0)).unsqueeze(1)
    return live


def low_precision_read(case):
    """A dense read with the precision that the kernel promises: rows and weights in bf16.

    Queries that are not bf16 are computed in fp32.
    """
    if case["q"].dtype != torch.bfloat16:
        return exact_read(case, torch.float32)
    live, in_window = live_columns(case), torch.arange(case["indices"].shape[1]) < case["n_window"]
    window, cmp = (
        numerics.decode_rows(*case[tier], case["row_format"]).bfloat16().float()
        for tier in ("window", "cmp")
    )
    slots = case["indices"].masked_fill(~live, 0).long()
    rows = torch.where(in_window.unsqueeze(-1), window[slots], cmp[slots])
    scores = torch.einsum("thd,tkd->thk", case["q"].float(), rows) * case["softmax_scale"]
    scores = scores.masked_fill(~live.unsqueeze(1), -torch.inf)
    lse = torch.logsumexp(scores, -1)
    m = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
    p = torch.exp(scores - m)
    total = p.sum(-1) + torch.exp(case["sink"] - m.squeeze(-1))
    out = torch.einsum("thk,tkd->thd", p.bfloat16().float(), rows) / total.unsqueeze(-1)
    return out.masked_fill((lse == -torch.inf).unsqueeze(-1), 0.0), lse


def rms(error):
    return error.square().mean().sqrt()


def assert_close_to_exact(device, case, splits):
    """Within twice the error of the low-precision read, rounded to q's dtype like the result.

    Of fp32 results the rms error is compared: the largest depends on the order of the sums.
    lse gets on top what the way through base 2 rounds: scale, sum with log2, and scale back, each
    half a unit in the last place of numbers log2(e) times as large, and the hardware's log2 one.
    """
    out, lse = read(device, case, splits)
    exact_out, exact_lse = exact_read(case)
    low_out, low_lse = low_precision_read(case)
    assert out.dtype == case["q"].dtype and out.shape == case["q"].shape and out.is_contiguous()
    assert lse.dtype == torch.float32 and lse.shape == out.shape[:2]
    assert out.isfinite().all()
    error, low_error = out - exact_out, low_out.to(out.dtype) - exact_out
    assert rms(error) <= 2 * rms(low_error)
    if out.dtype == torch.bfloat16:
        assert error.abs().max() <= 2 * low_error.abs().max()
    dead = exact_lse == -math.inf
    assert torch.equal(lse == -math.inf, dead)
    exact = exact_lse[~dead]
    if exact.numel():
        unit = torch.finfo(lse.dtype).eps * exact.abs().max()
        base_2 = (3 * 0.5 + 1) * math.log2(math.e) * unit
        assert (lse[~dead] - exact).abs().max() <= 2 * (low_lse[~dead] - exact).abs().max() + base_2
    return out, lse


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize(
    "name, dtype",
    [
        *((name, torch.bfloat16) for name in NAMES),
        ("fp8_e4m3", torch.float16),
        ("fp8_e4m3_amax", torch.float32),
        ("bf16", torch.float32),
    ],
)
def test_formats_and_dtypes(device, name, dtype, splits):
    assert_close_to_exact(device, make_case(name, dtype), splits)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("heads", [1, 16, 20, 128])
def test_heads(device, heads, splits):
    assert_close_to_exact(device, make_case(tokens=1, heads=heads), splits)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("dim", [32, 160, 512])
def test_head_dims(device, dim, splits):
    assert_close_to_exact(device, make_case(tokens=1, dim=dim), splits)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("n_window", [0, 1, K])
def test_window_widths(device, n_window, splits):
    assert_close_to_exact(device, make_case(n_window=n_window), splits)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_counts(device, dtype, splits):
    counts = [-(2**31), -1, 0, 1, 27, 28, K - WINDOW, 2**31 - 1]
    case = make_case(tokens=len(counts), heads=1)
    case["indices"] = case["indices"].to(dtype)
    case["cmp_counts"] = torch.tensor(counts, dtype=dtype)
    assert_close_to_exact(device, case, splits)
    case["cmp_counts"] = None
    assert_close_to_exact(device, case, splits)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize(
    "dead",
    [slice(0, 32), slice(0, WINDOW), slice(WINDOW, K), slice(0, K), slice(0, K - 1)],
    ids=["first tile", "window", "compressed", "all", "all but the last"],
)
def test_masked_columns_and_sinks(device, dead, splits):
    sinks = torch.tensor([-math.inf, -1e30, 0.0, 80.0, math.inf])
    case = make_case() | {"cmp_counts": None, "sink": sinks}
    case["indices"] = torch.randint(0, N, (T, K), dtype=torch.int32)
    case["indices"][:, dead] = -1
    out, lse = assert_close_to_exact(device, case, splits)
    assert torch.equal(out[:, 4], torch.zeros(T, D, dtype=out.dtype))
    if dead == slice(0, K):
        assert (lse == -math.inf).all()
        assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("name", NAMES)
def test_rows_that_do_not_exist_cannot_change_a_bit(device, name, splits):
    """Every slot that no live column names holds NaN, slot 0 included."""
    case = make_case(name)
    case["indices"][case["indices"] == 0] = 1
    expected = read(device, case, splits)
    live, in_window = live_columns(case), torch.arange(K) < WINDOW
    for tier, part in (("window", in_window), ("cmp", ~in_window)):
        unused = torch.ones(N, dtype=torch.bool)
        unused[case["indices"][live & part]] = False
        assert unused[0] and not unused.all()
        for tensor in case[tier]:
            tensor[unused] = 0xFF if tensor.dtype == torch.uint8 else torch.nan
    for actual, clean in zip(read(device, case, splits), expected, strict=True):
        assert torch.equal(actual, clean)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("splits", SPLITS)
def test_strides(device, splits):
    """Padded pools of different strides, transposed queries, slices of wider index buffers."""

    def padded(tensor, pad):
        return torch.nn.functional.pad(tensor, (0, pad))[:, : tensor.shape[1]]

    case = make_case()
    expected = read(device, case, splits)
    case["window"] = tuple(padded(tensor, 16) for tensor in case["window"])
    case["cmp"] = tuple(padded(tensor, 48) for tensor in case["cmp"])
    case["indices"] = padded(case["indices"], 5)
    case["cmp_counts"] = case["cmp_counts"].repeat_interleave(2)[::2]
    case["sink"] = case["sink"].repeat_interleave(3)[::3]
    for q in (
        case["q"].transpose(0, 1).contiguous().transpose(0, 1),
        case["q"].permute(2, 0, 1).contiguous().permute(1, 2, 0),
    ):
        case["q"] = q
        for actual, plain in zip(read(device, case, splits), expected, strict=True):
            assert torch.equal(actual, plain)


@pytest.mark.parametrize("device", DEVICES)
def test_fp32_is_not_rounded_to_tf32(device):
    """One large feature next to many small ones."""
    case = make_case("bf16", torch.float32, tokens=2, dim=512)
    case["q"] *= 0.01
    case["q"][..., 0] = 1e3
    for data, _ in (case["window"], case["cmp"]):
        data[:, 0] = 1e-3
    assert_close_to_exact(device, case, 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("splits", [None, 1, 3])
def test_empty_sizes(device, splits):
    out, lse = read(device, make_case(tokens=0), splits)
    assert out.shape == (0, H, D) and lse.shape == (0, H)
    case = make_case(columns=0, n_window=0)
    for tier in ("window", "cmp"):
        case[tier] = tuple(tensor[:0] for tensor in case[tier])
    out, lse = read(device, case, splits)
    assert torch.equal(out, torch.zeros(T, H, D, dtype=out.dtype))
    assert (lse == -math.inf).all()


def test_splits_fill_the_gpu_and_none_is_empty():
    assert choose_splits(1, 1, 640, 132) == 10
    assert choose_splits(64, 1, 640, 132) == 2
    assert choose_splits(128, 1, 640, 132) == 1
    assert choose_splits(1, 1, 0, 132) == 1
    for tokens in range(1, 140):
        for columns in range(1, 2000, 61):
            splits = choose_splits(tokens, 2, columns, 132)
            tiles = math.ceil(columns / SPLIT_COLUMNS)
            per_split = math.ceil(tiles / splits)
            assert splits == 1 or splits * tokens * 2 <= 132
            assert (splits - 1) * per_split < tiles <= splits * per_split


@pytest.mark.parametrize("shared_kib", [99, 227])
@pytest.mark.parametrize("heads", [1, 8, 20, 64, 128])
def test_tiles_fit(heads, shared_kib):
    config = choose_read_config(heads, 512, torch.bfloat16, shared_kib * 1024)
    assert 16 <= config.block_h <= max(16, 2 * heads)
    assert config.block_h * 512 * 4 <= shared_kib * 1024


@pytest.mark.gpu
def test_addresses_beyond_32_bits():
    """The last of 65,537 tokens, and rows on both sides of byte 2^31 of a pool."""
    tokens, heads, head_dim, n_slots = 65_537, 64, 512, (1 << 22) + 256
    case = make_case(tokens=1, heads=heads, dim=head_dim, columns=8, n_window=4)
    slots = torch.tensor([0, (1 << 22) - 1, 1 << 22, n_slots - 1] * 2)
    pools = {}
    for tier, part in (("window", slots[:4]), ("cmp", slots[4:])):
        pools[tier] = tuple(
            torch.zeros(n_slots, tensor.shape[1], dtype=tensor.dtype, device="cuda")
            for tensor in case[tier]
        )
        for large, small in zip(pools[tier], case[tier], strict=True):
            large[part.cuda()] = small[:4].cuda()
    small = case | {"indices": torch.arange(4).repeat(2)[None], "cmp_counts": None}
    q = torch.zeros(tokens, heads, head_dim, dtype=torch.bfloat16, device="cuda")
    q[-1] = case["q"][0]
    large = small | pools | {"q": q, "indices": slots.cuda().expand(tokens, -1)}
    large["sink"] = case["sink"].cuda()
    out, lse = sparse_attention(**large)
    expected_out, expected_lse = read("cuda", small, 1)
    assert torch.equal(out[-1].cpu(), expected_out[0])
    assert torch.equal(lse[-1].cpu(), expected_lse[0])
