"""The page allocator: every page has one owner, and every page comes back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8kv_inductor.budget import PoolPlan, lookback_pages
from fp8kv_inductor.config import PAGE_SIZE, CacheConfig, ConfigError
from fp8kv_inductor.page_table import FreeList, PageTable

CACHE = CacheConfig.resolve("tiny", "auto", "cpu")


def make_table(num_pages, window_pages, rows=4, columns=8):
    shape = (rows, columns)
    tables = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
    return PageTable(PoolPlan(CACHE, num_pages, window_pages), *tables)


def check_invariants(table, live):
    """``live``: row -> (next position, tokens, of them with pages), between two steps."""
    for host, free in ((table.page_table, table.full), (table.window_table, table.window)):
        held = host[host >= 0].tolist()
        assert len(held) == len(set(held)), "a page has two owners"
        assert len(held) + len(free) == free.size, "a page got lost"
    for row in range(table.page_table.shape[0]):
        position, tokens, paged = live.get(row, (0, 0, 0))
        pages = table.pages_for(paged)
        assert (table.page_table[row, :pages] >= 0).all()
        assert (table.page_table[row, pages:] == -1).all()
        stored = range(max(0, position - table.lookback + 1), position)
        wanted = {p // PAGE_SIZE for p in stored}
        held = set(torch.nonzero(table.window_table[row] >= 0).flatten().tolist())
        assert wanted <= held, "a page that is still looked back to was freed"
        assert len(held) <= table.reserve_for(tokens), "a page was kept too long"


@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_pages=st.integers(1, 16), window_pages=st.integers(2, 10))
def test_pages_have_one_owner_and_come_back(data, num_pages, window_pages):
    table = make_table(num_pages, window_pages)
    live = {}
    for _ in range(data.draw(st.integers(1, 20))):
        action = data.draw(st.sampled_from(("admit", "step", "step", "step", "release")))
        if action == "admit":
            tokens = data.draw(st.integers(1, 8 * PAGE_SIZE))
            first = data.draw(st.integers(1, tokens))
            row = table.admit(tokens, first)
            if row is not None:
                assert row not in live
                live[row] = (0, tokens, first)
        elif action == "release" and live:
            row = data.draw(st.sampled_from(sorted(live)))
            table.release(row)
            del live[row]
        elif action == "step":
            for row, (position, tokens, paged) in live.items():
                if position == tokens:
                    continue
                wanted = data.draw(st.integers(position + 1, tokens))
                missing = table.pages_for(wanted) - table.pages_for(paged)
                fits = missing <= len(table.full)
                assert table.grow(row, wanted) == fits
                if not fits:
                    continue
                paged = max(paged, wanted)
                end = table.extend(row, position, wanted)
                assert position < end <= wanted, "an admitted request is stuck"
                columns = range(position // PAGE_SIZE, table.pages_for(end))
                assert all(table.window_table[row, column] >= 0 for column in columns)
                live[row] = (end, tokens, paged)
            for row, (position, _, _) in live.items():
                table.slide(row, position)
        check_invariants(table, live)
    for row in live:
        table.release(row)
    check_invariants(table, {})
    assert (len(table.full), len(table.window)) == (num_pages, window_pages)


@given(st.integers(1, 300), st.integers(1, 64))
def test_lookback_pages_is_the_most_that_neighbours_touch(lookback, page_size):
    touched = {
        len({position // page_size for position in range(start, start + lookback)})
        for start in range(page_size)
    }
    assert lookback_pages(lookback, page_size) == max(touched)


def test_decode_frees_a_window_page_exactly_when_it_is_out_of_sight():
    table = make_table(num_pages=3, window_pages=2)
    row = table.admit(3 * PAGE_SIZE)
    for position in range(3 * PAGE_SIZE):
        assert table.extend(row, position, position + 1) == position + 1
        table.slide(row, position + 1)
        first_page_needed = position + 1 - (PAGE_SIZE - 1) < PAGE_SIZE
        assert (table.window_table[row, 0] >= 0) == first_page_needed


def test_a_chunk_takes_only_window_pages_that_nobody_reserved():
    table = make_table(num_pages=12, window_pages=5)
    first, second = table.admit(6 * PAGE_SIZE), table.admit(6 * PAGE_SIZE)
    assert table.extend(first, 0, 6 * PAGE_SIZE) == 3 * PAGE_SIZE
    assert table.extend(second, 0, 6 * PAGE_SIZE) == 2 * PAGE_SIZE
    assert len(table.window) == 0


def test_growth_takes_pages_as_long_as_some_are_free():
    table = make_table(num_pages=3, window_pages=4)
    first, second = table.admit(3 * PAGE_SIZE, 1), table.admit(3 * PAGE_SIZE, PAGE_SIZE)
    assert table.grow(first, PAGE_SIZE) and len(table.full) == 1, "within the page that it has"
    assert table.grow(first, PAGE_SIZE + 1) and len(table.full) == 0
    assert not table.grow(second, PAGE_SIZE + 1)
    assert (table.page_table[second] >= 0).sum() == 1
    table.release(first)
    assert table.grow(second, 3 * PAGE_SIZE) and len(table.full) == 0


def test_admission_waits_for_rows_full_and_window_pages():
    table = make_table(num_pages=8, window_pages=16, rows=2)
    assert table.admit(5 * PAGE_SIZE) is not None
    assert table.admit(4 * PAGE_SIZE) is None, "full-history pages"
    row = table.admit(PAGE_SIZE)
    assert table.admit(1) is None, "rows"
    table.release(row)
    assert table.admit(3 * PAGE_SIZE) == row
    table = make_table(num_pages=8, window_pages=3)
    assert table.admit(4 * PAGE_SIZE) is not None
    assert table.admit(4 * PAGE_SIZE) is None, "window pages"
    assert table.admit(PAGE_SIZE) is not None


@pytest.mark.parametrize(
    ("num_pages", "tokens", "message"),
    [
        (3, 3 * PAGE_SIZE + 1, "found 3 full-history pages.*needs 4.*raise the budget"),
        (30, 8 * PAGE_SIZE + 1, "found 8 pages per request.*needs 9.*raise max_len"),
    ],
)
def test_a_request_that_never_fits_is_an_error(num_pages, tokens, message):
    table = make_table(num_pages, window_pages=2)
    with pytest.raises(ConfigError, match=message):
        table.check(tokens)
    table.check(3 * PAGE_SIZE)


def test_free_list_refuses_what_it_does_not_have():
    free = FreeList(3)
    pages = free.take(2)
    with pytest.raises(RuntimeError, match="2 pages wanted, 1 of 3"):
        free.take(2)
    free.give(pages)
    with pytest.raises(RuntimeError, match=f"page {pages[0]} was returned"):
        free.give(pages[:1])
    assert sorted(free.take(3)) == [0, 1, 2]
