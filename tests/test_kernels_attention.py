"""The read kernels, prefill and split-k, against fp64."""

import ast
import math
import warnings
from types import SimpleNamespace

import pytest
import torch
import triton
from interpreter import DEVICES
from read_cases import (
    NAMES,
    WINDOW,
    D,
    H,
    K,
    N,
    T,
    assert_close_to_exact,
    live_columns,
    make_case,
    read,
)

from fp8kv_inductor.kernels import attention
from fp8kv_inductor.kernels.attention import (
    SPLIT_COLUMNS,
    choose_read_config,
    choose_splits,
    sparse_attention,
)

SPLITS = [1, 3]


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
@pytest.mark.parametrize("heads", [1, 8, 16, 20, 32, 64, 128])
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("splits", SPLITS)
def test_a_pool_without_rows(device, splits):
    case = make_case()
    case["indices"][:, WINDOW:] = -1
    expected = read(device, case, splits)
    case["cmp"] = tuple(tensor[:0] for tensor in case["cmp"])
    assert all(map(torch.equal, read(device, case, splits), expected))


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


COMPILE_ERRORS = [
    triton.CompilationError("fetch()", ast.parse("fetch()"), "fetch has been removed"),
    RuntimeError("PassManager::run failed"),
]


@pytest.mark.parametrize("error", COMPILE_ERRORS, ids=["language", "passes"])
def test_what_triton_cannot_compile_is_read_by_the_portable_kernel(monkeypatch, error):
    """Once with a warning, then without trying again."""
    launches = []

    def launch(*arguments):
        launches.append(arguments)
        raise error

    hopper = SimpleNamespace(launch=launch)
    monkeypatch.setattr(attention, "_compile_errors", [])
    monkeypatch.setattr(attention, "hopper_read", lambda: hopper)
    monkeypatch.setattr(
        attention, "_takes_hopper", lambda read: attention.hopper_read_for(attention.HOPPER)
    )
    with pytest.warns(UserWarning, match="cannot compile the read for sm_90"):
        assert_close_to_exact("cpu", make_case(tokens=1), 1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "triton .* cannot compile")
        assert_close_to_exact("cpu", make_case(tokens=1), 3)
    assert len(launches) == 1


def test_other_errors_of_a_launch_are_raised(monkeypatch):
    def launch(*arguments):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(attention, "_takes_hopper", lambda read: SimpleNamespace(launch=launch))
    with pytest.raises(RuntimeError, match="out of memory"):
        assert_close_to_exact("cpu", make_case(tokens=1), 1)
