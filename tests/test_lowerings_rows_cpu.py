"""rope, act_quant and store through Inductor's C++ backend: bytes equal eager's."""

import pytest
import torch
from nasty import (
    FAR_SLOTS,
    REPORTED,
    check_reported_bytes,
    far_pool,
    nasty_rows,
    pool_bytes,
    row_ops,
    same,
    stores_into_layers,
)
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from fp8kv_inductor import FORMATS, Pool, act_quant, register, rope, store
from fp8kv_inductor.chains import angles, store_inputs
from fp8kv_inductor.lowerings.cross_compile import pool_copies

TOKENS = 12
N_SLOTS = 64


def compiled(fn, dynamic=None):
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, dynamic=dynamic)


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp8_e4m3_amax", "fp8_e4m3_ue8m0", "bf16"])
def test_bytes_equal_eager(fmt):
    rows = nasty_rows(TOKENS)
    cos, sin = angles(TOKENS)
    slots = torch.randperm(N_SLOTS)[:TOKENS]
    slots[3] = -1
    eager, ours = Pool.empty(N_SLOTS, 512, fmt), Pool.empty(N_SLOTS, 512, fmt)
    expected = row_ops(rows, cos, sin, slots, eager)
    got, (code,) = run_and_get_code(compiled(row_ops), rows, cos, sin, slots, ours)
    assert same(got, expected)
    for left, right in zip(pool_bytes(eager), pool_bytes(ours), strict=True):
        assert torch.equal(left, right)
    assert not pool_copies(code, ours.data)
    assert "fp8kv.write_rows" in code


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp8_e4m3_amax", "fp8_e4m3_ue8m0"])
def test_rows_that_others_got_wrong(fmt):
    check_reported_bytes(REPORTED, fmt, compiled(store))


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp8_e4m3_amax"])
def test_ten_million_random_elements(fmt):
    rows, slots = torch.randn(20_000, 512).bfloat16(), torch.arange(20_000)
    eager, ours = Pool.empty(20_000, 512, fmt), Pool.empty(20_000, 512, fmt)
    store(rows, slots, eager)
    compiled(store)(rows, slots, ours)
    assert all(map(torch.equal, pool_bytes(eager), pool_bytes(ours)))


def test_three_dimensions_and_inverse():
    register()
    q = torch.randn(5, 3, 96).bfloat16()
    theta = torch.rand(5, 16) * 6
    for inverse in (False, True):
        args = (q, theta.cos(), theta.sin(), inverse)
        assert torch.equal(compiled(rope)(*args), rope(*args))


def test_rows_that_are_no_power_of_two_and_no_multiple_of_the_block():
    register()
    x = nasty_rows(4, 224)
    assert same(compiled(act_quant)(x, 192), act_quant(x, 192))
    eager, ours = Pool.empty(8, 224, "fp8_e4m3"), Pool.empty(8, 224, "fp8_e4m3")
    slots = torch.arange(4, dtype=torch.int32)
    store(x, slots, eager)
    compiled(store)(x, slots, ours)
    assert all(map(torch.equal, pool_bytes(eager), pool_bytes(ours)))


def test_token_counts_share_one_graph():
    step = compiled(row_ops, dynamic=True)
    graphs = counters["stats"]["unique_graphs"]
    for tokens in (7, 2, 64):
        rows, slots = nasty_rows(tokens), torch.randperm(N_SLOTS)[:tokens]
        cos, sin = angles(tokens)
        eager = Pool.empty(N_SLOTS, 512, "fp8_e4m3")
        ours = Pool.empty(N_SLOTS, 512, "fp8_e4m3")
        row_ops(rows, cos, sin, slots, eager)
        step(rows, cos, sin, slots, ours)
        assert all(map(torch.equal, pool_bytes(eager), pool_bytes(ours)))
    assert counters["stats"]["unique_graphs"] - graphs == 1


def test_one_token_and_more_are_two_graphs():
    pool, step = Pool.empty(N_SLOTS, 512, "fp8_e4m3"), compiled(row_ops)
    graphs = counters["stats"]["unique_graphs"]
    for tokens in (1, 2, 7, 64, 1):
        step(nasty_rows(tokens), *angles(tokens), torch.arange(tokens), pool)
    assert counters["stats"]["unique_graphs"] - graphs == 2


def test_pool_sizes_share_graphs():
    """Of pools that are arguments. One token and more, each with a first pool and with any."""

    def loose(rows, slots, data, scale):
        torch.ops.fp8kv.store(rows, slots, data, scale, "fp8_e4m3")

    register()
    step = compiled(loose)
    graphs = counters["stats"]["unique_graphs"]
    for n_slots in (97, 211, 307):
        for tokens in (1, 2, 7, 64):
            rows, slots = nasty_rows(tokens), torch.randperm(n_slots)[:tokens]
            eager, ours = Pool.empty(n_slots, 512, "fp8_e4m3"), Pool.empty(n_slots, 512, "fp8_e4m3")
            store(rows, slots, eager)
            step(rows, slots, ours.data, ours.scale)
            assert all(map(torch.equal, pool_bytes(eager), pool_bytes(ours)))
    assert counters["stats"]["unique_graphs"] - graphs <= 4


def test_pools_inside_a_larger_buffer_are_written_in_place():
    big = torch.zeros(3, N_SLOTS, 512, dtype=torch.uint8)
    scales = torch.zeros(3, N_SLOTS, 16, dtype=torch.float16)
    eager = Pool.empty(N_SLOTS, 512, "fp8_e4m3")
    rows, slots = nasty_rows(TOKENS), torch.randperm(N_SLOTS)[:TOKENS]
    store(rows, slots, eager)
    ours = Pool(big[1], scales[1], FORMATS["fp8_e4m3"])
    _, (code,) = run_and_get_code(compiled(store), rows, slots, ours)
    assert torch.equal(big[1], eager.data) and torch.equal(scales[1], eager.scale)
    assert not big[0].any() and not big[2].any() and not scales[::2].any()
    assert not pool_copies(code, ours.data)


def test_layers_of_one_buffer_are_written_in_place():
    register()
    args = nasty_rows(TOKENS), torch.randperm(N_SLOTS)[:TOKENS]
    eager, ours = (
        (
            torch.zeros(6, N_SLOTS, 512, dtype=torch.uint8),
            torch.zeros(6, N_SLOTS, 16, dtype=torch.float16),
        )
        for _ in range(2)
    )
    stores_into_layers(*args, *eager)
    _, (code,) = run_and_get_code(compiled(stores_into_layers), *args, *ours)
    assert all(map(torch.equal, eager, ours))
    assert not pool_copies(code, ours[0], ours[0][0])


def test_a_store_that_nothing_reads_is_run():
    pool = Pool.empty(N_SLOTS, 512, "fp8_e4m3")

    def nothing_but_a_store(rows, slots):
        store(rows, slots, pool)

    assert compiled(nothing_but_a_store)(torch.ones(2, 512), torch.arange(2)) is None
    assert pool.data[:2].all() and not pool.data[2:].any()


@pytest.mark.parametrize("fmt", FORMATS)
def test_no_rows(fmt):
    """A graph for no rows, and one for any number of them."""
    pool, step = Pool.empty(N_SLOTS, 512, fmt), compiled(row_ops)
    for tokens in (0, 2, 3, 0):
        rows, slots = nasty_rows(tokens) if tokens else torch.empty(0, 512), torch.arange(tokens)
        row = step(rows.bfloat16(), *angles(tokens), slots, pool)
        assert row.shape == (tokens, 512)


@pytest.mark.parametrize("part", ["data", "scale"])
@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float32, torch.bfloat16])
def test_another_dtype_is_the_error_of_eager_mode(part, dtype):
    pool = Pool.empty(8, 512, "fp8_e4m3")
    pools = {"data": pool.data, "scale": pool.scale}
    pools[part] = pools[part].to(dtype)

    def loose(rows, slots, data, scale):
        torch.ops.fp8kv.store(rows, slots, data, scale, "fp8_e4m3")

    for step in (loose, compiled(loose)):
        with pytest.raises(Exception, match=rf"{part} of format 'fp8_e4m3' has dtype {dtype}"):
            step(nasty_rows(2), torch.arange(2), *pools.values())


def test_a_copied_pool_would_be_seen():
    """Positive control of ``pool_copies``."""

    def copies(rows, slots, pool):
        data = pool.data.clone()
        torch.ops.fp8kv.store(rows, slots, data, pool.scale, pool.format.name)
        return data

    *_, slots, pool = store_inputs(TOKENS, "fp8_e4m3")
    _, (code,) = run_and_get_code(compiled(copies), nasty_rows(TOKENS), slots, pool)
    assert pool_copies(code, pool.data)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_beyond_32_bit_addresses(dtype):
    """Through one graph, which a small pool came to first."""
    rows, slots = nasty_rows(4), torch.tensor(FAR_SLOTS, dtype=dtype)
    for step in (store, compiled(store, dynamic=True)):
        near, far = Pool.empty(4, 512, "fp8_e4m3"), far_pool("fp8_e4m3")
        step(rows, torch.arange(4, dtype=dtype), near)
        step(rows, slots, far)
        assert torch.equal(far.data[slots], near.data) and torch.equal(far.scale[slots], near.scale)


def test_a_slot_beyond_the_pool_raises():
    pool = Pool.empty(4, 512, "fp8_e4m3")
    with pytest.raises(IndexError, match="slot 4 is beyond the pool of 4 slots"):
        compiled(store)(nasty_rows(2), torch.tensor([0, 4]), pool)
    assert not pool.data.any()


def test_rows_of_one_slot_are_refused():
    pool = Pool.empty(4, 512, "fp8_e4m3")
    with pytest.raises(ValueError, match=r"slot 3 is that of rows \[0, 2\]; needed: a slot"):
        compiled(store)(nasty_rows(3), torch.tensor([3, -1, 3]), pool)
    assert not pool.data.any()


def test_the_producers_rounding_is_not_lost():
    """bf16 casts in front of an op count, although Inductor fuses them away."""

    def scaled_rows(x, weight, slots, pool):
        store((x.float() * weight).to(torch.bfloat16), slots, pool)

    x, weight, _, _, slots, _ = store_inputs(TOKENS, "bf16")
    eager, ours, quantized, quantized_ours = (
        Pool.empty(N_SLOTS, 512, fmt) for fmt in ("bf16", "bf16", "fp8_e4m3", "fp8_e4m3")
    )
    step = compiled(scaled_rows)
    for left, right in ((eager, ours), (quantized, quantized_ours)):
        scaled_rows(x, weight, slots, left)
        step(x, weight, slots, right)
        assert all(map(torch.equal, pool_bytes(left), pool_bytes(right)))
