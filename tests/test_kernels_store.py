"""The store kernel against ``numerics``: every byte of the pool's memory, guard rows included."""

import pytest
import torch
from interpreter import DEVICES, launch, whole_storage

from fp8kv_inductor import numerics
from fp8kv_inductor.formats import FORMATS, get_format
from fp8kv_inductor.kernels import launch as launch_module
from fp8kv_inductor.kernels.store import store

NAMES = list(FORMATS)
QUANTIZED = [name for name in NAMES if get_format(name).quantized]
N = 12
GUARD = 0x5A


@pytest.fixture(params=[False, True], ids=["one cast", "cast through fp16"])
def interpreter_casts(request, monkeypatch):
    """Both ways to convert to e4m3 in the interpreter; a GPU has its own."""
    limits = launch_module.INTERPRETER_LIMITS._replace(e4m3_rounds_twice=request.param)
    monkeypatch.setattr(launch_module, "INTERPRETER_LIMITS", limits)


def guarded_pool(name: str, width: int, pad: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Data and scale in the middle of buffers full of guard bytes, rows padded by ``pad``."""
    fmt = get_format(name)
    pool = []
    for columns, dtype in (
        (width, fmt.code_dtype),
        (fmt.scales_per_row(width), fmt.scale_dtype),
    ):
        buffer = torch.empty(N + 4, columns + pad, dtype=dtype)
        whole_storage(buffer).fill_(GUARD)
        pool.append(buffer[2:-2, :columns])
    return pool[0], pool[1]


def stored(rows, slots, data, scale, fmt):
    store(rows, slots, data, scale, fmt)
    return whole_storage(data), whole_storage(scale)


def assert_equals_numerics(device, rows, slots, name, pad=0):
    fmt = get_format(name)
    data, scale = guarded_pool(name, rows.shape[1], pad)
    memory = launch(device, stored, rows, slots, data, scale, fmt)
    live = (slots >= 0) & (slots < N)
    codes, scales = numerics.encode_rows(rows[live], fmt)
    data[slots[live].long()] = codes
    scale[slots[live].long()] = scales
    for actual, expected in zip(memory, (data, scale), strict=True):
        assert torch.equal(actual, whole_storage(expected))


def ties() -> torch.Tensor:
    """`[9, 512]` fp32: all midpoints of e4m3 and their neighbours, both signs, block scale 1."""
    values = numerics.e4m3_decode(torch.arange(0x7F, dtype=torch.uint8))
    middles = (values[1:] + values[:-1]) / 2
    up = torch.nextafter(middles, torch.tensor(torch.inf))
    down = torch.nextafter(middles, torch.tensor(-torch.inf))
    known = torch.tensor([400.199585, 272.156555, 136.002075, 1.0625001])
    x = torch.cat([middles, up, down, known])
    x = torch.cat([x, -x])
    blocks = torch.nn.functional.pad(x, (0, -len(x) % 31)).view(-1, 31)
    blocks = torch.cat([torch.full((len(blocks), 1), 448.0), blocks], 1)
    return torch.nn.functional.pad(blocks.flatten(), (0, -blocks.numel() % 512)).view(-1, 512)


@pytest.mark.usefixtures("interpreter_casts")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", QUANTIZED)
def test_ties(device, name):
    rows = ties()
    assert_equals_numerics(device, rows, torch.arange(len(rows)), name)


@pytest.mark.usefixtures("interpreter_casts")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", QUANTIZED)
def test_scales_of_all_magnitudes(device, name):
    """Underflow and overflow of scales included; 0.0273 is where fp16 amax scales go subnormal."""
    amax = [0.0, 1e-40, 1e-30, 1e-6, 1.33e-5, 4e-5, 0.0273, 0.0274, 447.0, 2.94e7, 1e30, 3e38]
    rows = (torch.rand(12, 512) * 2 - 1) * torch.tensor(amax).unsqueeze(1)
    assert_equals_numerics(device, rows, torch.randperm(N), name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", NAMES)
def test_dtypes_and_slots(device, name, slot_dtype, dtype):
    rows = torch.randn(7, 96).to(dtype)
    slots = torch.tensor([-1, 3, -(2**31), 11, 12, 2**31 - 1, 0], dtype=slot_dtype)
    assert_equals_numerics(device, rows, slots, name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", QUANTIZED)
def test_special_values(device, name):
    rows = torch.randn(7, 128)
    for row, value in enumerate([torch.nan, torch.inf, -torch.inf, -torch.nan]):
        rows[row, [3, 64]] = value
    rows[4, 32:64] = 0.0
    rows[5] = -0.0
    rows[6, :32] = torch.nan
    assert_equals_numerics(device, rows, torch.randperm(N)[:7], name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_strides(device, name):
    """Padded pool rows, a slice of a fused projection, every other entry of a slot buffer."""
    rows = torch.randn(6, 256)[:, 64:192]
    slots = torch.randperm(N)[::2]
    assert_equals_numerics(device, rows, slots, name, pad=16)
    assert_equals_numerics(device, torch.randn(128, 6).t(), slots, name)


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_to_write(device):
    assert_equals_numerics(device, torch.randn(3, 64), torch.full((3,), -1), "fp8_e4m3")
    assert_equals_numerics(device, torch.empty(0, 64), torch.empty(0, dtype=torch.int32), "bf16")


@pytest.mark.gpu
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_addresses_beyond_32_bits(slot_dtype):
    fmt = get_format("fp8_e4m3")
    n_slots, width = (1 << 22) + 256, 512
    data = torch.zeros(n_slots, width, dtype=fmt.code_dtype, device="cuda")
    scale = torch.zeros(n_slots, fmt.scales_per_row(width), dtype=fmt.scale_dtype, device="cuda")
    slots = torch.tensor([0, (1 << 22) - 1, 1 << 22, n_slots - 1], dtype=slot_dtype)
    rows = torch.randn(4, width)
    store(rows.cuda(), slots.cuda(), data, scale, fmt)
    codes, scales = numerics.encode_rows(rows, fmt)
    assert torch.equal(data[slots.cuda().long()].cpu(), codes)
    assert torch.equal(scale[slots.cuda().long()].cpu(), scales)
    assert int((scale != 0).any(1).sum()) == len(slots)
