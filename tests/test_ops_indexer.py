"""The index-key scan in eager mode against fp64."""

import math

import pytest
import torch

import fp8kv_inductor
from fp8kv_inductor import reference

T, H, D, N, ROWS = 4, 8, 64, 40, 8


def make_case(rows: int = ROWS) -> dict:
    return dict(
        q=torch.randn(T, H, D).to(torch.bfloat16),
        weights=torch.randn(T, H),
        idx_data=torch.randn(N, D).to(torch.bfloat16),
        page_rows=torch.tensor([[16, 0, 24], [8, 32, 0]]),
        request=torch.tensor([0, 1, 1, 0]),
        counts=torch.tensor([0, 3, 2 * rows, 3 * rows]),
        page_size=rows,
    )


def scan(case: dict) -> torch.Tensor:
    return torch.ops.fp8kv.indexer_scores(**case)


def assert_close_to_reference(case: dict) -> None:
    """Within twice the error of the fp32 reference."""
    scores = scan(case)
    exact = reference.indexer_scores(**case)
    low = reference.indexer_scores(**case, dtype=torch.float32)
    dead = exact == -math.inf
    assert scores.dtype == torch.float32
    assert torch.equal(scores == -math.inf, dead)
    tolerance = 2 * (low - exact)[~dead].abs().max()
    assert (scores - exact)[~dead].abs().max() <= tolerance


def test_equals_reference():
    assert_close_to_reference(make_case())


@pytest.mark.parametrize("rows", [1, 4, 7])
def test_page_sizes(rows):
    assert_close_to_reference(make_case(rows))


def test_counts_are_clamped_to_the_width():
    case = make_case()
    case["counts"] = torch.tensor([-3, 0, 3 * ROWS, 10**6])
    scores = scan(case)
    assert (scores[:2] == -math.inf).all() and scores[2:].isfinite().all()


def test_a_negative_dot_product_does_not_count():
    case = make_case()
    case["q"], case["idx_data"] = -case["q"].abs(), case["idx_data"].abs()
    assert torch.equal(scan(case)[3], torch.zeros(3 * ROWS))


def test_dead_pages_and_keys_are_not_read():
    """Keys beyond the count hold NaN, and page numbers beyond it are nonsense."""
    case = make_case()
    case["counts"] = torch.tensor([ROWS, ROWS + 3, 0, 1])
    expected = scan(case)
    case["page_rows"] = torch.tensor([[16, -5, 10**6], [8, 32, -1]])
    live = torch.cat([torch.arange(16, 24), torch.arange(8, 16), torch.arange(32, 35)])
    dead = torch.ones(N, dtype=torch.bool)
    dead[live] = False
    case["idx_data"][dead] = math.nan
    assert torch.equal(scan(case), expected)


BEYOND = [
    ("request", 2, 5, r"request 5 has no row in page_rows, which has 2"),
    ("request", 2, -1, r"request -1 has no row in page_rows"),
    ("page_rows", (1, 1), 33, r"page row 33 with 8 live keys lies outside the idx pool of 40 rows"),
    ("page_rows", (1, 0), -1, r"page row -1 with"),
    ("page_rows", (0, 2), 1 << 40, r"page row 1099511627776 with 8 live keys lies outside"),
]


@pytest.mark.parametrize(("argument", "where", "value", "message"), BEYOND)
def test_rows_that_do_not_exist_are_refused(argument, where, value, message):
    case = make_case()
    case[argument][where] = value
    with pytest.raises(IndexError, match=message):
        scan(case)


def test_views_give_the_same_bits():
    case = make_case()
    expected = scan(case)
    case["q"] = case["q"].transpose(0, 1).contiguous().transpose(0, 1)
    case["idx_data"] = torch.stack([case["idx_data"]] * 2)[1]
    case["page_rows"] = torch.cat([case["page_rows"]] * 2, 1)[:, :3]
    case["counts"] = case["counts"].to(torch.int32).repeat_interleave(2)[::2]
    assert torch.equal(scan(case), expected)


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens):
    case = make_case()
    case |= {name: case[name][:tokens] for name in ("q", "weights", "request", "counts")}
    assert scan(case).shape == (tokens, 3 * ROWS)


def test_wrapper_passes_the_pool():
    case = make_case()
    pool = fp8kv_inductor.Pool.empty(N, D, "bf16")
    fp8kv_inductor.store(case["idx_data"], torch.arange(N), pool)
    tail = (case[name] for name in ("page_rows", "request", "counts", "page_size"))
    scores = fp8kv_inductor.indexer_scores(case["q"], case["weights"], pool, *tail)
    assert torch.equal(scores, scan(case))
