"""The read for sm_90: compiled without a GPU, and against fp64 on one."""

import functools
import math
import re

import pytest
import torch
from compile_kernel import TRITON, compile_kernel, cuobjdump
from interpreter import relocated
from read_cases import NAMES, N, assert_close_to_exact, live_columns, make_case, read
from triton.experimental.gluon._runtime import GluonASTSource

from fp8kv_inductor import numerics
from fp8kv_inductor.formats import get_format
from fp8kv_inductor.kernels.attention import HOPPER, read_splits, sparse_attention
from fp8kv_inductor.kernels.hopper import read as hopper
from fp8kv_inductor.kernels.rope import rope
from fp8kv_inductor.model_config import V4_FLASH

SHARED_BYTES = 227 << 10
H, D = V4_FLASH.n_heads, V4_FLASH.head_dim
PAIRS = V4_FLASH.rope_head_dim // 2
WINDOW = V4_FLASH.window_size


@functools.cache
def sass(name: str, splits: int, n_window: int) -> tuple[str, int]:
    """Machine code of the kernel and its shared memory, as ``launch`` compiles it."""
    fmt, kernel = get_format(name), hopper.read_kernel
    constants = {
        "N_HEADS": H,
        "N_WINDOW": n_window,
        "SPLITS": splits,
        "QUANTIZED": fmt.quantized,
        "HAS_COUNTS": True,
        "ROPE_PAIRS": PAIRS if splits == 1 else 0,
        "RIGHT_REGISTERS": hopper.RIGHT_REGISTERS,
        "GATHER_REGISTERS": hopper.GATHER_REGISTERS,
    }
    data = "*i32" if fmt.quantized else "*bf16"
    types = {
        **dict.fromkeys(("window_data", "cmp_data"), data),
        **dict.fromkeys(
            ("window_scale", "cmp_scale"), "*u8" if fmt.scale_dtype == torch.uint8 else "*fp16"
        ),
        **dict.fromkeys(("sink", "cos", "sin", "lse"), "*fp32"),
        **dict.fromkeys(("indices", "counts"), "*i32"),
        "q": "*bf16",
        "out": "*bf16" if splits == 1 else "*fp16" if fmt.quantized else "*fp32",
        "to_base_2": "fp32",
        "out_blocks": f"tensordesc<bf16{hopper.OUT_BLOCK},{hopper.OPERAND_BLOCK.value!r}>",
    }
    options = {"num_warps": hopper.GROUP_WARPS, "maxnreg": hopper.MAX_REGISTERS}
    compiled = compile_kernel(
        kernel,
        90,
        types,
        constants,
        lambda name: name in ("stride_q_token", "stride_q_head"),
        options,
        GluonASTSource,
    )
    return cuobjdump(compiled.asm["cubin"], "-sass"), compiled.metadata.shared


@pytest.mark.parametrize(
    "name, splits, n_window",
    [*((name, 1, WINDOW) for name in NAMES), ("fp8_e4m3", 10, WINDOW), ("fp8_e4m3", 1, 100)],
)
def test_compiles_and_fits(name, splits, n_window):
    code, shared = sass(name, splits, n_window)
    assert shared <= SHARED_BYTES
    assert len(re.findall(r"HGMMA\.64x256x16\.F32", code)) >= 8
    assert set(re.findall(r"LDGSTS\.[.\w]*", code)) == {"LDGSTS.E.BYPASS.128"}


@pytest.mark.parametrize("name", NAMES)
def test_tensor_cores_are_not_serialized(name):
    """ptxas waits behind every single wgmma where it loses track of accumulators."""
    code, _ = sass(name, 1, WINDOW)
    waits, products = code.count("WARPGROUP.DEPBAR"), code.count("HGMMA")
    assert 0 < waits < products / 8


def loops(name: str, splits: int, what: str, count: int) -> list[list[str]]:
    """Loops of the machine code with ``count`` instructions that contain ``what``."""
    code, _ = sass(name, splits, WINDOW)
    instructions = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", code)
    addresses = {int(address, 16): i for i, (address, _) in enumerate(instructions)}
    found = []
    for i, (address, text) in enumerate(instructions):
        target = re.search(r"BRA.*0x([0-9a-f]+)", text)
        if target and int(target[1], 16) < int(address, 16):
            body = [text for _, text in instructions[addresses[int(target[1], 16)] : i]]
            if sum(what in text for text in body) == count:
                found.append(body)
    return found


def spills(body: list[str]) -> int:
    """Spilled registers that a loop stores or loads."""
    return sum(text.startswith(("STL", "LDL")) for text in body)


@pytest.mark.parametrize("splits", [1, 10])
@pytest.mark.parametrize("name", ["fp8_e4m3", "bf16"])
def test_the_loop_of_scores_spills_nothing(name, splits):
    """A few loads of spilled registers made a tile a tenth longer."""
    products = D // 16 + 4
    # triton 3.9 loads the thread's number in every tile of a part.
    known = int(TRITON >= (3, 9) and (name, splits) == ("fp8_e4m3", 10))
    assert spills(min(loops(name, splits, "HGMMA", products), key=len)) <= known


def test_the_loop_of_rows_spills_little():
    """One or two registers, a little more from one triton to the next."""
    conversions = D * 64 // 2 // 128
    assert spills(min(loops("fp8_e4m3", 1, "E4M3", conversions), key=len)) <= 4


def test_what_it_takes():
    row = {"head_dim": D, "dtype": torch.bfloat16, "softmax_scale": 1.0, "rope_pairs": PAIRS}
    for name in NAMES:
        assert hopper.takes_rows(row_format=get_format(name), **row)
    fmt = get_format("fp8_e4m3")
    for other in (
        {"head_dim": 256},
        {"dtype": torch.float16},
        {"softmax_scale": -1.0},
        {"rope_pairs": 200},
    ):
        assert not hopper.takes_rows(row_format=fmt, **{**row, **other})


def test_tensors_that_it_takes():
    q = torch.empty(3, 64, D, dtype=torch.bfloat16)
    pool, indices = torch.empty(5, D, dtype=torch.uint8), torch.empty(3, 7, dtype=torch.int32)
    padded = torch.empty(5, D + 8, dtype=torch.uint8)[:, :D]
    assert hopper.takes_tensors(q, (pool,), indices)
    assert hopper.takes_tensors(q.transpose(0, 1), (pool,), indices)
    assert not hopper.takes_tensors(q, (padded,), indices)
    assert not hopper.takes_tensors(q, (padded[:, 1:],), indices)
    assert not hopper.takes_tensors(q.transpose(1, 2), (pool,), indices)
    far_apart = torch.empty_strided((3, 7), (7 << 29, 1 << 29), dtype=torch.int32, device="meta")
    assert not hopper.takes_tensors(q, (pool,), far_apart)


gpu = pytest.mark.gpu


def case_on_hopper(name="fp8_e4m3", **sizes):
    """A case that the kernel takes; skips where there is no sm_90."""
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("wgmma needs a GPU of compute capability 9.0")
    return make_case(name, **{"heads": H, "dim": D, "columns": 200, "n_window": 100, **sizes})


@gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("splits", [1, 3])
def test_formats(name, splits):
    assert_close_to_exact("cuda", case_on_hopper(name, tokens=5), splits)


@gpu
@pytest.mark.parametrize(
    "tokens, heads, columns",
    [(300, 64, 200), (140, 128, 65), (2, 33, 8320), (150, 1, 65), (3, 8, 200), (3, 32, 200)],
)
def test_many_items_heads_and_columns(tokens, heads, columns):
    sizes = {"tokens": tokens, "heads": heads, "columns": columns, "n_window": min(64, columns)}
    assert_close_to_exact("cuda", case_on_hopper(**sizes), 1)


@gpu
@pytest.mark.parametrize("name", ["fp8_e4m3", "bf16"])
@pytest.mark.parametrize("tokens, heads", [(1, 64), (1, 17), (2, 128), (7, 64)])
def test_parts_of_few_queries(name, tokens, heads):
    """Some programs share the heads of a part."""
    case = case_on_hopper(name, tokens=tokens, heads=heads, columns=640, n_window=128)
    assert_close_to_exact("cuda", case, 10)


@gpu
@pytest.mark.parametrize("name", ["fp8_e4m3", "bf16"])
@pytest.mark.parametrize("step", [2.0, 4.0, 60.0])
def test_maxima_that_grow(name, step):
    """Scores that rise by ``step`` powers of two from tile to tile, and fall in other heads."""
    case = case_on_hopper(name, tokens=2) | {"cmp_counts": None}
    direction = torch.randn(D).sign()
    tiles = torch.arange(200) // 64
    case["indices"] = (tiles * 8 + torch.arange(200) % 8).repeat(2, 1)
    per_tile = step * math.log(2) / (D * case["softmax_scale"])
    rows = torch.randn(N, D) * 0.01 + (torch.arange(N) // 8 * per_tile)[:, None] * direction
    case["window"] = case["cmp"] = numerics.encode_rows(rows, case["row_format"])
    case["q"] = (case["q"] * 0.1 + direction).bfloat16()
    case["q"][:, ::2] *= -1
    assert_close_to_exact("cuda", case, 1)


@gpu
def test_waits_for_the_kernel_in_front():
    """The read starts while that kernel ends, but must see what it writes."""
    case = case_on_hopper(tokens=64)
    expected = read("cuda", case)
    on_gpu = {name: relocated(argument, "cuda") for name, argument in case.items()}
    source = on_gpu["q"].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.mul(source, 1.0, out=on_gpu["q"])
        found = sparse_attention(**on_gpu, splits=1)
        on_gpu["q"].zero_()
    for _ in range(10):
        graph.replay()
        assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))


@gpu
@pytest.mark.parametrize("columns", [0, 1, 63, 64, 65, 129])
def test_columns(columns):
    case = case_on_hopper(columns=columns, n_window=0) | {"cmp_counts": None}
    assert_close_to_exact("cuda", case, 1)


@gpu
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_counts(dtype):
    counts = [-(2**31), -1, 0, 1, 27, 28, 100, 2**31 - 1]
    case = case_on_hopper(tokens=len(counts))
    case["indices"] = case["indices"].to(dtype)
    case["cmp_counts"] = torch.tensor(counts, dtype=dtype)
    for splits in (1, 3):
        assert_close_to_exact("cuda", case, splits)


@gpu
@pytest.mark.parametrize("dead", [slice(0, 64), slice(0, 100), slice(100, 200), slice(0, 200)])
def test_masked_columns_and_sinks(dead):
    sinks = torch.tensor([-math.inf, -1e30, 0.0, 80.0, math.inf]).repeat(13)[:H]
    case = case_on_hopper() | {"cmp_counts": None, "sink": sinks}
    case["indices"] = torch.randint(0, N, case["indices"].shape, dtype=torch.int32)
    case["indices"][:, dead] = -1
    out, lse = assert_close_to_exact("cuda", case, 1)
    assert not out[:, 4].any()
    if dead == slice(0, 200):
        assert (lse == -math.inf).all() and not out.any()


@gpu
@pytest.mark.parametrize("name", NAMES)
def test_rows_that_do_not_exist_cannot_change_a_bit(name):
    case = case_on_hopper(name, tokens=5)
    case["indices"][case["indices"] == 0] = 1
    expected = read("cuda", case)
    live, in_window = live_columns(case), torch.arange(200) < 100
    for tier, part in (("window", in_window), ("cmp", ~in_window)):
        unused = torch.ones(N, dtype=torch.bool)
        unused[case["indices"][live & part]] = False
        unused[0] = True
        for tensor in case[tier]:
            tensor[unused] = 0xFF if tensor.dtype == torch.uint8 else torch.nan
    assert all(map(torch.equal, read("cuda", case), expected))


@gpu
@pytest.mark.parametrize("name", [name for name in NAMES if get_format(name).quantized])
@pytest.mark.parametrize("q_scale, row_scale", [(1e6, 1.0), (1e-6, 1.0), (1e-5, 2.0**14)])
def test_the_whole_range(name, q_scale, row_scale):
    """Queries beyond fp16, and block scales from the smallest to the largest in one tile."""
    case = case_on_hopper(name)
    case["q"] = (case["q"] * q_scale).bfloat16()
    exponents = torch.randint(-14, 15, (N, D // 32)).repeat_interleave(32, 1)
    rows = torch.randn(N, D) * (torch.exp2(exponents.float()) if row_scale != 1 else 1.0)
    case["window"] = case["cmp"] = numerics.encode_rows(rows, case["row_format"])
    assert_close_to_exact("cuda", case, 1)


@gpu
@pytest.mark.parametrize("name", NAMES)
def test_small_rows(name):
    """Block scales below the smallest normal fp16 number are not lost."""
    case = case_on_hopper(name)
    case["window"] = case["cmp"] = numerics.encode_rows(
        torch.randn(N, D) * 2.0**-10, case["row_format"]
    )
    assert_close_to_exact("cuda", case, 1)


@gpu
def test_nan_in_a_live_row_is_not_lost():
    case = case_on_hopper() | {"cmp_counts": None}
    case["indices"].fill_(3)
    case["indices"][1:] = 5
    case["window"][0][3, 7] = 0x7F
    out, _ = read("cuda", case)
    assert out[0].isnan().all() and not out[1:].isnan().any()


@gpu
@pytest.mark.parametrize("splits", [1, 3])
def test_output_is_rotated_back(splits):
    case = case_on_hopper(tokens=5)
    theta = torch.rand(5, PAIRS) * 6
    angles = theta.cos(), theta.sin()
    plain, lse = read("cuda", case, splits)
    rotated, same_lse = read("cuda", case | {"angles": angles}, splits)
    expected = rope(plain.cuda(), *(angle.cuda() for angle in angles), True).cpu()
    assert torch.equal(lse, same_lse)
    assert torch.equal(rotated[..., : -2 * PAIRS], plain[..., : -2 * PAIRS])
    # Products may be contracted here: one unit in the last place of bf16 at most.
    unit = torch.finfo(torch.bfloat16).eps * expected.abs().clamp_min(1e-3)
    assert ((rotated - expected).abs() <= unit).all()


@gpu
def test_strides_and_what_it_hands_on():
    """Padded pools of both kinds: rows at multiples of 16 bytes, and others."""
    case = case_on_hopper(tokens=5)
    expected = read("cuda", case)
    for pad in (16, 8):
        padded = dict(case)
        for tier in ("window", "cmp"):
            padded[tier] = tuple(
                torch.nn.functional.pad(part, (0, pad))[:, : part.shape[1]] for part in case[tier]
            )
        padded["q"] = case["q"].transpose(0, 1).contiguous().transpose(0, 1)
        out, lse = assert_close_to_exact("cuda", padded, 1)
        if pad == 16:
            assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


@gpu
def test_prefill_and_decode_agree_bit_for_bit_over_programs():
    """The same token alone and among others, whichever program gets it."""
    case = case_on_hopper(tokens=3)
    many = dict(case)
    for key in ("q", "indices", "cmp_counts"):
        many[key] = case[key].repeat(100, *([1] * (case[key].dim() - 1)))
    out, lse = read("cuda", case)
    all_out, all_lse = read("cuda", many)
    assert torch.equal(all_out, out.repeat(100, 1, 1)) and torch.equal(all_lse, lse.repeat(100, 1))


@gpu
def test_splits_fill_the_device():
    assert read_splits(1, H, D, torch.bfloat16, 640, torch.device("cuda")) == 10
