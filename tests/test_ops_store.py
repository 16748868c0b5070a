"""The store in eager mode: bytes, slots, and everything it must leave alone."""

import pytest
import torch
from nasty import REPORTED, check_reported_bytes

import fp8kv_inductor
from fp8kv_inductor import reference
from fp8kv_inductor.formats import FORMATS, get_format

NAMES = list(FORMATS)
N, D = 16, 128
GUARD = 0x5A


def guarded_pool(name: str, width: int = D, pad: int = 0) -> tuple[torch.Tensor, ...]:
    """Data and scale of the middle N rows of buffers full of guard bytes, and those buffers."""
    fmt = get_format(name)
    buffers = []
    for columns, dtype in ((width, fmt.code_dtype), (fmt.scales_per_row(width), fmt.scale_dtype)):
        buffer = torch.empty(N + 4, columns + pad, dtype=dtype)
        buffer.view(torch.uint8).fill_(GUARD)
        buffers.append(buffer)
    data, scale = buffers
    columns = fmt.scales_per_row(width)
    return data[2:-2, :width], scale[2:-2, :columns], data, scale


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def assert_equals_reference(rows, slots, name, **layout):
    data, scale, *buffers = guarded_pool(name, **layout)
    expected_data, expected_scale, *expected_buffers = guarded_pool(name, **layout)
    torch.ops.fp8kv.store(rows, slots, data, scale, name)
    reference.store(rows, slots, expected_data, expected_scale, name)
    for buffer, expected in zip(buffers, expected_buffers, strict=True):
        assert torch.equal(bytes_of(buffer), bytes_of(expected))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bytes(name, slot_dtype, dtype):
    rows = (torch.randn(8, D) * 10.0 ** torch.linspace(-4, 3, 8).unsqueeze(1)).to(dtype)
    assert_equals_reference(rows, torch.randperm(N)[:8].to(slot_dtype), name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fault", REPORTED)
def test_rows_that_others_got_wrong(fault, name):
    check_reported_bytes([fault], name, fp8kv_inductor.store)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "slots", [[-1, 3, -1, 5, N - 1], [-1] * 5, [0, -7, N - 1, -(2**31), 1]], ids=str
)
def test_negative_slots_skip_their_rows(name, slots):
    assert_equals_reference(torch.randn(5, D), torch.tensor(slots), name)


@pytest.mark.parametrize("name", NAMES)
def test_padded_rows_and_strided_inputs(name):
    """A kv slice of a fused projection and every other entry of a wider slot buffer."""
    rows = torch.randn(6, D + 64)[:, 32:-32]
    slots = torch.randperm(N)[:12].view(6, 2)[:, 1]
    assert_equals_reference(rows, slots, name, pad=32)


def test_a_layer_of_a_stacked_pool():
    data, scale = torch.zeros(3, N, D, dtype=torch.uint8), torch.zeros(3, N, 4, dtype=torch.float16)
    pool = fp8kv_inductor.Pool(data[1], scale[1], get_format("fp8_e4m3"))
    fp8kv_inductor.store(torch.ones(N, D), torch.arange(N), pool)
    assert data[1].all() and scale[1].all()
    assert not data[::2].any() and not scale[::2].any()


@pytest.mark.parametrize("name", NAMES)
def test_no_rows(name):
    assert_equals_reference(torch.empty(0, D), torch.empty(0, dtype=torch.int64), name)


@pytest.mark.parametrize("slot", [N, N + 1, 2**31 - 1])
def test_a_slot_beyond_the_pool_raises_and_writes_nothing(slot):
    data, scale, *buffers = guarded_pool("fp8_e4m3")
    with pytest.raises(IndexError, match=f"slot {slot} is beyond the pool of {N} slots"):
        torch.ops.fp8kv.store(torch.randn(2, D), torch.tensor([0, slot]), data, scale, "fp8_e4m3")
    for buffer in buffers:
        assert (bytes_of(buffer) == GUARD).all()


@pytest.mark.parametrize("slots", [[3, 3], [5, -1, 2, -1, 5]], ids=str)
def test_rows_of_one_slot_are_refused_and_nothing_is_written(slots):
    data, scale, *buffers = guarded_pool("fp8_e4m3")
    rows = [i for i, slot in enumerate(slots) if slot == slots[0]]
    message = rf"slot {slots[0]} is that of rows \[{rows[0]}, {rows[1]}\]; needed: a slot"
    with pytest.raises(ValueError, match=message):
        args = torch.randn(len(slots), D), torch.tensor(slots), data, scale, "fp8_e4m3"
        torch.ops.fp8kv.store(*args)
    for buffer in buffers:
        assert (bytes_of(buffer) == GUARD).all()
