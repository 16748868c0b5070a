"""The index-key scan kernel against fp64."""

import math

import pytest
import torch
from interpreter import DEVICES, launch

from fp8kv_inductor import reference
from fp8kv_inductor.kernels.indexer import indexer_scores, keys_per_program

T, HEADS, WIDTH, PAGES = 4, 5, 40, 6


def make_case(page_size: int = 32, dtype: torch.dtype = torch.bfloat16, **sizes: int) -> dict:
    heads, width = sizes.get("heads", HEADS), sizes.get("width", WIDTH)
    n_keys = PAGES * page_size
    return dict(
        q=torch.randn(T, heads, width).to(dtype),
        weights=torch.randn(T, heads),
        idx_data=torch.randn(2 * n_keys, width).to(torch.bfloat16),
        page_rows=torch.randperm(2 * PAGES).view(2, PAGES) * page_size,
        request=torch.tensor([1, 0, 1, 0]),
        counts=torch.tensor([-3, 1, page_size + 1, 2 * n_keys]),
        page_size=page_size,
    )


def scan(device, case):
    return launch(device, indexer_scores, *case.values())


def assert_close_to_exact(device, case):
    """rms error within twice that of the fp32 reference: products of bf16 are exact in fp32."""
    scores = scan(device, case)
    exact = reference.indexer_scores(**case)
    low = reference.indexer_scores(**case, dtype=torch.float32)
    dead = exact == -math.inf
    assert scores.dtype == torch.float32 and scores.shape == exact.shape
    assert torch.equal(scores == -math.inf, dead)
    error, low_error = (scores - exact)[~dead], (low - exact)[~dead]
    assert error.square().mean() <= 4 * low_error.square().mean()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes(device, dtype):
    assert_close_to_exact(device, make_case(dtype=dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [1, 7, 32, 2 * keys_per_program(torch.bfloat16)])
def test_page_sizes(device, page_size):
    assert_close_to_exact(device, make_case(page_size, heads=2, width=16))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads, width", [(1, 32), (16, 128), (64, 128)])
def test_shapes(device, heads, width):
    assert_close_to_exact(device, make_case(heads=heads, width=width))


@pytest.mark.parametrize("device", DEVICES)
def test_keys_and_pages_beyond_the_count_are_not_read(device):
    case = make_case()
    case["counts"] = torch.tensor([33, 64, 0, 33])
    expected = scan(device, case)
    pages = case["page_rows"]
    live = torch.zeros(len(case["idx_data"]), dtype=torch.bool)
    for token, count in enumerate(case["counts"].tolist()):
        for key in range(count):
            live[pages[case["request"][token], key // 32] + key % 32] = True
    case["idx_data"][~live] = torch.nan
    pages[:, 2:] = 2**62 // WIDTH
    assert torch.equal(scan(device, case), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_nan_of_a_live_key_is_seen(device):
    case = make_case()
    case["idx_data"][case["page_rows"][0, 0], 3] = torch.nan
    scores = scan(device, case)
    assert scores[1, 0].isnan() and scores[3, 0].isnan()
    assert not scores[0].isnan().any() and not scores[3, 1:].isnan().any()


@pytest.mark.parametrize("device", DEVICES)
def test_strides_and_index_dtypes(device):
    case = make_case()
    expected = scan(device, case)
    case["q"] = case["q"].transpose(0, 1).contiguous().transpose(0, 1)
    case["weights"] = case["weights"].t().contiguous().t()
    case["idx_data"] = torch.nn.functional.pad(case["idx_data"], (0, 24))[:, :WIDTH]
    case["page_rows"] = torch.nn.functional.pad(case["page_rows"], (0, 3))[:, :PAGES]
    case["request"] = case["request"].repeat_interleave(2)[::2]
    case["counts"] = case["counts"].repeat_interleave(2)[::2]
    assert torch.equal(scan(device, case), expected)
    for name in ("page_rows", "request", "counts"):
        case[name] = case[name].to(torch.int32)
    assert torch.equal(scan(device, case), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_empty_sizes(device):
    case = make_case()
    no_tokens = case | {name: case[name][:0] for name in ("q", "weights", "request", "counts")}
    assert scan(device, no_tokens).shape == (0, PAGES * 32)
    assert scan(device, case | {"page_rows": case["page_rows"][:, :0]}).shape == (T, 0)


@pytest.mark.gpu
def test_addresses_beyond_32_bits():
    case = make_case(heads=64, width=128)
    expected = scan("cuda", case)
    large = {key: value.cuda() for key, value in case.items() if isinstance(value, torch.Tensor)}
    first = (1 << 24) + 256
    keys = torch.zeros(first + len(case["idx_data"]), 128, dtype=torch.bfloat16, device="cuda")
    keys[first:] = large["idx_data"]
    large |= {"idx_data": keys, "page_rows": large["page_rows"] + first, "page_size": 32}
    assert torch.equal(indexer_scores(**large).cpu(), expected)
