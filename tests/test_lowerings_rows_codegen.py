"""The CUDA code of row chains, without a GPU: kernels, buffers, casts, cubins, bytes."""

import re
from collections import defaultdict

import expecttest
import pytest
import torch
from compile_kernel import e4m3_cast_source
from generated import ARCHITECTURES, GeneratedKernel
from interpreted_graph import interpreted_graph
from interpreter import interpreted
from nasty import (
    BF16_SPECIALS,
    FAR_SLOTS,
    REPORTED,
    check_reported_bytes,
    far_pool,
    nasty_rows,
    pool_bytes,
    row_ops,
    same,
)
from row_cases import margins_are_empty, pool_between_margins
from torch._inductor.ir import TensorBox

from fp8kv_inductor import Pool, act_quant, register, rope, store
from fp8kv_inductor.chains import (
    angles,
    compressor_chain,
    compressor_inputs,
    q_chain,
    rms_norm,
    store_chain,
    store_inputs,
)
from fp8kv_inductor.lowerings.block import RowLayoutError
from fp8kv_inductor.lowerings.cross_compile import CudaSource, buffers, cuda_source, pool_copies
from fp8kv_inductor.numerics import ceil_log2_ratio, finite_amax

TOKENS = 64
N_SLOTS = 4096
FORMATS = ["fp8_e4m3", "fp8_e4m3_amax", "fp8_e4m3_ue8m0", "bf16"]


def summary(code: CudaSource) -> str:
    """What a change of the lowerings must not change unnoticed."""
    lines = []
    for name, source in code.kernels.items():
        # The rest of a name says what was fused, in words that change with torch's version.
        name = name.split("_fused_")[0]
        source = re.sub(r"tl\.broadcast_to\((.* \+ .*), \[XBLOCK, R0_BLOCK\]\)", r"\1", source)
        stores = re.findall(r"tl\.store\(\w+ \+ \((.*)\), \w+, (.*)\)", source)
        lines += [name, *(f"  store [{index}] where {mask}" for index, mask in stores)]
        for what, pattern in (
            ("casts", r"\.to\(tl\.((?:float8|bfloat|float16)\w*)"),
            ("exact arithmetic", r"mul\.rn|div_rn|cvt\.rn\.bf16x2"),
        ):
            lines.append(f"  {what}: {', '.join(sorted(set(re.findall(pattern, source))))}")
    return "\n".join([*lines, f"buffers {buffers(code.wrapper)}"])


@pytest.fixture(scope="module")
def store_code():
    return cuda_source(store_chain, store_inputs(TOKENS, "fp8_e4m3"))


def test_golden_store_chain(store_code):
    expecttest.assert_expected_inline(
        summary(store_code),
        """\
triton_per
  store [tl.max_contiguous(r0_1, [1, 8]) + 512*tmp17] where tmp16 & xmask
  store [tmp56 + 16*tmp122] where tmp16 & xmask
  casts: bfloat16, float16, float8e4nv
  exact arithmetic: cvt.rn.bf16x2, mul.rn
buffers []""",
    )
    assert not pool_copies(store_code.wrapper, store_inputs(1, "fp8_e4m3")[-1].data)


def test_golden_q_chain():
    code = cuda_source(q_chain, (torch.randn(TOKENS, 64, 512).bfloat16(), *angles(TOKENS)))
    expecttest.assert_expected_inline(
        summary(code),
        """\
triton_per
  store [r0_1 + 512*x0] where None
  casts: 
  exact arithmetic: cvt.rn.bf16x2, mul.rn
buffers [2097152]""",
    )


def test_q_chain_is_one_kernel_for_dynamic_shapes():
    """Even the heads' width, which becomes a constant."""
    register()
    inputs = (torch.randn(TOKENS, 8, 512).bfloat16(), *angles(TOKENS))
    code = cuda_source(q_chain, inputs, dynamic=True)
    ((name, source),) = code.kernels.items()
    assert name.startswith("triton_per") and "r0_numel = 512" in source


def test_golden_compressor_chain():
    code = cuda_source(compressor_chain, compressor_inputs(TOKENS, "fp8_e4m3"))
    expecttest.assert_expected_inline(
        summary(code),
        """\
triton_per
  store [tl.max_contiguous(r0_1, [1, 8]) + 512*tmp83] where tmp82 & xmask
  store [tmp122 + 16*tmp188] where tmp82 & xmask
  casts: bfloat16, float16, float8e4nv
  exact arithmetic: cvt.rn.bf16x2, mul.rn
buffers []""",
    )


@pytest.mark.parametrize("fmt", FORMATS)
def test_one_kernel_for_every_format_and_dynamic_token_counts(fmt):
    inputs = store_inputs(TOKENS, fmt)
    code = cuda_source(store_chain, inputs, dynamic=True)
    assert len(code.kernels) == 1
    assert not pool_copies(code.wrapper, inputs[-1].data) and not buffers(code.wrapper)


@pytest.mark.parametrize("dynamic", ["groups", "all"])
def test_compressor_chain_is_one_kernel_for_dynamic_counts(dynamic):
    args = compressor_inputs(TOKENS, "fp8_e4m3")
    if dynamic == "groups":
        kv, score, _, *rest, _ = args
        for tensor in (kv, score, *rest):
            torch._dynamo.mark_dynamic(tensor, 0)
    code = cuda_source(compressor_chain, args, dynamic=True if dynamic == "all" else None)
    ((_, source),) = code.kernels.items()
    assert "xnumel = " not in source and not buffers(code.wrapper)


@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_few_rows_wait_for_their_loads_once(tokens):
    """What is used behind the reduction of a row is loaded in front of the row."""
    code = cuda_source(store_chain, store_inputs(tokens, "fp8_e4m3"))
    ((_, source),) = code.kernels.items()
    _, behind = source.split("tl.debug_barrier()")
    assert behind.count("tl.load(in_ptr0") == behind.count("tl.load") == 1
    assert source.rindex("tl.load") < source.index("tl.sum")


def test_many_rows_load_their_slots_last():
    """A slot takes up registers from then on only: more programs fit on a multiprocessor."""
    code = cuda_source(store_chain, store_inputs(4096, "fp8_e4m3"))
    ((_, source),) = code.kernels.items()
    front, behind = source.split("tl.debug_barrier()")
    assert behind.count("tl.load") == 1
    assert front.count("tl.load") == 4 and "tl.sum" in front


def test_block_maxima_stay_in_registers(tmp_path):
    """With Inductor's configuration for many rows: a maximum per element would be 160 shuffles."""
    ((name, source),) = cuda_source(store_chain, store_inputs(4096, "fp8_e4m3")).kernels.items()
    compiled = GeneratedKernel(name, source, tmp_path).compile(90, num_warps=1, XBLOCK=2)
    assert compiled.asm["ptx"].count("shfl.sync") < 64


def test_kv_rows_may_be_a_slice_of_a_fused_projection():
    def fused(projection, weight, cos, sin, slots, pool):
        store_chain(projection[:, 1024:], weight, cos, sin, slots, pool)

    _, *rest = store_inputs(TOKENS, "fp8_e4m3")
    code = cuda_source(fused, (torch.randn(TOKENS, 1536).bfloat16(), *rest))
    assert len(code.kernels) == 1


@pytest.mark.parametrize("behind_a_norm", [True, False])
def test_slots_may_be_computed_in_the_kernel(behind_a_norm, tmp_path):
    rows, _, _, _, slots, pool = store_inputs(TOKENS, "fp8_e4m3")
    table = torch.randperm(N_SLOTS)[:TOKENS]

    def looked_up(rows, slots, table, pool):
        rows = rms_norm(rows) if behind_a_norm else rows
        store(rows, torch.where(slots < 9, -1, table[slots] + 1), pool)

    code = cuda_source(looked_up, (rows, slots, table, pool))
    ((name, source),) = code.kernels.items()
    kernel = GeneratedKernel(name, source, tmp_path)
    if "YBLOCK" in source:
        sizes, grid, blocks = (TOKENS, 512), (1, TOKENS), {"XBLOCK": 512, "YBLOCK": 1}
    elif behind_a_norm:
        sizes, grid, blocks = (TOKENS, 512), (TOKENS // 2,), {"XBLOCK": 2}
    else:
        sizes, grid, blocks = (TOKENS * 512,), (TOKENS,), {"XBLOCK": 512}
    tensors = rows, slots, table, pool.data, pool.scale
    arguments = kernel.arguments(*tensors, sizes=sizes)
    kernel.compile(90, **blocks)
    eager = Pool.empty(pool.n_slots, 512, "fp8_e4m3")
    looked_up(rows, slots, table, eager)
    with interpreted():
        kernel.interpret(grid, *arguments, **blocks)
    written = table[slots[9:]] + 1
    for left, right in zip(pool_bytes(eager), pool_bytes(pool), strict=True):
        assert (left[written] == right[written]).float().mean() > 0.99
        assert right.any(1).sum() == TOKENS - 9


@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_compiles_and_casts_once(capability, tmp_path):
    """sm_89 has no cast from fp32 to e4m3: values are on the grid before they go through fp16, or
    through what newer compilers make of it.

    So are the values that the store of an ``act_quant`` takes from fp16.
    """
    code = cuda_source(store_chain, store_inputs(TOKENS, "fp8_e4m3"), capability)
    ((name, source),) = code.kernels.items()
    compiled = GeneratedKernel(name, source, tmp_path).compile(capability, XBLOCK=4)
    casts = set(re.findall(r"cvt\.rn\.satfinite\.e4m3x2\.(\w+)", compiled.asm["ptx"]))
    assert casts == ({e4m3_cast_source(capability)} if capability < 90 else {"f16x2", "f32"})
    on_grid = re.findall(r"(tmp\d+) = tmp\d+ \+ (tmp\d+)\n +tmp\d+ = \1 - \2\n", source)
    assert len(on_grid) == (2 if capability < 90 else 0), "act_quant and store"


def test_division_of_the_amax_rule_is_exact(tmp_path):
    code = cuda_source(
        store, (nasty_rows(8), torch.arange(8), Pool.empty(64, 512, "fp8_e4m3_amax"))
    )
    ((name, source),) = code.kernels.items()
    ptx = GeneratedKernel(name, source, tmp_path).compile(90, XBLOCK=512).asm["ptx"]
    assert set(re.findall(r"div\.[\w.]*f32", ptx)) == {"div.rn.f32"}


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_interpreted_bytes_equal_eager(fmt, slot_dtype, tmp_path):
    rows, (cos, sin) = nasty_rows(TOKENS), angles(TOKENS)
    slots = torch.randperm(N_SLOTS)[:TOKENS].to(slot_dtype)
    slots[::9] = -1
    slots[1] = N_SLOTS
    eager, ours = Pool.empty(N_SLOTS, 512, fmt), Pool.empty(N_SLOTS, 512, fmt)
    code = cuda_source(row_ops, (rows, cos, sin, slots, ours))
    live = slots < N_SLOTS
    row_ops(rows[live], cos[live], sin[live], slots[live], eager)
    ((name, source),) = code.kernels.items()
    kernel = GeneratedKernel(name, source, tmp_path)
    out = torch.empty_like(rows)
    tensors = [rows, cos, sin, slots, ours.data, out]
    if fmt == "bf16":
        tensors = [rows, cos, sin, slots, out, ours.data]
    else:
        tensors.append(ours.scale)
    block = 4096
    sizes = (rows.numel(),)
    with interpreted():
        kernel.interpret(
            (rows.numel() // block,), *kernel.arguments(*tensors, sizes=sizes), XBLOCK=block
        )
    expected = row_ops(rows, cos, sin, slots.clamp_max(N_SLOTS - 1), Pool.empty(N_SLOTS, 512, fmt))
    assert torch.equal(out.nan_to_num(nan=9.0), expected.nan_to_num(nan=9.0))
    for left, right in zip(pool_bytes(eager), pool_bytes(ours), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("fmt", FORMATS[:3])
def test_rows_that_others_got_wrong(fmt):
    check_reported_bytes(REPORTED, fmt, lambda *args: interpreted_graph(store, args))


def behind_a_reduction(x, cos, sin, slots, pool):
    """``row_ops`` of rows times 1, which nothing but the row's maximum says."""
    largest = x.float().abs().amax(-1, keepdim=True)
    one = ((largest > 1) | (largest <= 1) | (largest != largest)).float()
    return row_ops((x.float() * one).bfloat16(), cos, sin, slots, pool)


@pytest.mark.parametrize("fmt", FORMATS[:3])
@pytest.mark.parametrize(("tokens", "xblock", "dynamic"), [(64, 1, False), (6, 4, True)])
def test_interpreted_bytes_behind_a_row_reduction(fmt, tokens, xblock, dynamic, tmp_path):
    rows, (cos, sin) = nasty_rows(tokens), angles(tokens)
    slots = torch.randperm(N_SLOTS)[:tokens]
    slots[::5] = -1
    eager, ours = Pool.empty(N_SLOTS, 512, fmt), Pool.empty(N_SLOTS, 512, fmt)
    for tensor in (rows, cos, sin, slots) if dynamic else ():
        torch._dynamo.mark_dynamic(tensor, 0)
    code = cuda_source(behind_a_reduction, (rows, cos, sin, slots, ours))
    expected = behind_a_reduction(rows, cos, sin, slots, eager)
    ((name, source),) = code.kernels.items()
    kernel, out = GeneratedKernel(name, source, tmp_path), torch.empty_like(rows)
    # The output may take the memory of a row that the kernel does not store.
    tensors = (out, rows) if "in_out_ptr0" in source else (rows, out)
    arguments = kernel.arguments(
        *tensors, cos, sin, slots, ours.data, ours.scale, sizes=(tokens, 512)
    )
    with interpreted():
        kernel.interpret((-(-tokens // xblock),), *arguments, XBLOCK=xblock)
    assert torch.equal(out.nan_to_num(nan=9.0), expected.nan_to_num(nan=9.0))
    for left, right in zip(pool_bytes(eager), pool_bytes(ours), strict=True):
        assert torch.equal(left, right)


QUANTIZED_FRONTS = {
    "nothing": lambda x: x,
    "product": lambda x: x * 2,
    "row reduction": lambda x: x * torch.where(x.abs().amax(-1, keepdim=True) > 1, 0.5, 2.0),
}


def quantized_rows(tokens: int) -> torch.Tensor:
    """bf16 rows whose neighbouring blocks have very different scales; zeros, NaN, infinities."""
    exponents = torch.randint(-30, 120, (tokens, 8)).repeat_interleave(64, 1)
    exponents = exponents - torch.randint(0, 24, (tokens, 16)).repeat_interleave(32, 1)
    exponents = exponents - torch.randint(0, 12, exponents.shape)
    rows = ((1 + torch.rand(exponents.shape)) * torch.exp2(exponents.double())).bfloat16()
    rows *= torch.randint(0, 2, rows.shape) * 2 - 1
    for special in (0.0, torch.nan, torch.inf):
        blocks = (torch.rand(tokens, 16) < 0.1).repeat_interleave(32, 1)
        rows[blocks | (torch.rand(rows.shape) < 0.02)] = special
    return rows


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp8_e4m3_ue8m0"])
@pytest.mark.parametrize("front", QUANTIZED_FRONTS)
@pytest.mark.parametrize("features", [448, 512])
def test_interpreted_bytes_of_quantized_rows(features, front, fmt):
    """Both quantizations in one, if nothing else reads the rows; every shift between scales."""

    def graph(x, cos, sin, slots, pool):
        row = rope(QUANTIZED_FRONTS[front](x), cos, sin)
        store(act_quant(row, features), slots, pool)

    rows, (cos, sin), slots = quantized_rows(TOKENS), angles(TOKENS), torch.randperm(N_SLOTS)
    eager, ours = Pool.empty(N_SLOTS, 512, fmt), Pool.empty(N_SLOTS, 512, fmt)
    graph(rows, cos, sin, slots[:TOKENS], eager)
    interpreted_graph(graph, (rows, cos, sin, slots[:TOKENS], ours))
    assert all(map(torch.equal, pool_bytes(eager), pool_bytes(ours)))


def test_rows_of_what_a_store_replaces_are_computed_before_it():
    def graph(x, slots, pool):
        row = act_quant((x + pool.data[slots.flip(0)].float()).bfloat16(), 448)
        store(x, slots, pool)
        store(row, slots + TOKENS, pool)

    x, slots = torch.randn(TOKENS, 512), torch.arange(TOKENS)
    pools = [Pool.empty(2 * TOKENS, 512, "fp8_e4m3") for _ in range(2)]
    graph(x, slots, pools[0])
    interpreted_graph(graph, (x, slots, pools[1]))
    assert all(map(torch.equal, *map(pool_bytes, pools)))


def test_quantized_rows_need_every_shift():
    """Positive control: between scales of a group and of its blocks, beyond what fp16 holds."""
    rows = act_quant(quantized_rows(TOKENS), 448)[:, :448].float()
    of_group, of_block = (
        ceil_log2_ratio(finite_amax(rows.unflatten(-1, (-1, size))), 448.0).squeeze(-1)
        for size in (64, 32)
    )
    shifts = of_group.repeat_interleave(2, 1) - of_block.clamp(-24, 15)
    assert set(range(18)) <= set(shifts[of_block > -100].tolist())


def test_interpreted_compressor_chain_pools_like_eager(tmp_path):
    args = compressor_inputs(6, "fp8_e4m3")
    *inputs, pool = args
    code = cuda_source(compressor_chain, args)
    ((name, source),) = code.kernels.items()
    kernel = GeneratedKernel(name, source, tmp_path)
    # The kernel reads the scores first.
    kv, score, *rest, slots = inputs
    tensors = [score, kv, *rest, slots, pool.data, pool.scale]
    with interpreted():
        kernel.interpret((6,), *kernel.arguments(*tensors, sizes=(6, 512)), XBLOCK=1)
    ours = [part.clone() for part in pool_bytes(pool)]
    compressor_chain(*args)
    for left, right in zip(ours, pool_bytes(pool), strict=True):
        # A sum in another order may move a value across a rounding.
        assert (left != right)[slots].float().mean() < 0.01


@pytest.mark.parametrize("features", [64, 128])
@pytest.mark.parametrize("dynamic", [False, True])
def test_rows_of_no_whole_blocks_take_the_reduction_form(features, dynamic):
    """Blocks of 64 do not line up with rows of 160 in a flattened tile."""
    register()
    rows = nasty_rows(TOKENS, 160)

    def graph(x):
        return act_quant(x * 2, features)

    code = cuda_source(graph, (rows,), dynamic=dynamic)
    assert {name.split("_")[1] for name in code.kernels} == {"per", "poi"}
    assert "static_assert" not in code.wrapper
    assert same(interpreted_graph(graph, (rows,), dynamic), graph(rows))


def test_tiles_of_broken_blocks_are_refused(monkeypatch):
    """The last resort, if the lowering promised whole blocks and the tile did not hold them."""
    register()
    monkeypatch.setattr("fp8kv_inductor.lowerings.rows._in_tile", lambda x, group: True)
    with pytest.raises(Exception, match="head_dim a multiple of 64") as caught:
        cuda_source(lambda x: act_quant(x, 64), (torch.randn(8, 160).bfloat16(),))
    chain = [caught.value]
    while chain[-1].__cause__ or chain[-1].__context__:
        chain.append(chain[-1].__cause__ or chain[-1].__context__)
    assert any(isinstance(error, RowLayoutError) for error in chain)


@pytest.mark.parametrize("group", [2, 64])
def test_loops_that_are_reordered_are_refused(monkeypatch, group):
    """Positive control of the scheduler's rules: plain buffers of transposed rows are refused."""
    register()
    monkeypatch.setattr("fp8kv_inductor.lowerings.rows.row_box", TensorBox.create)
    rows = torch.randn(512, TOKENS).bfloat16().t()
    graph = rope if group == 2 else lambda x, *_: act_quant(x, 64)
    inputs = (rows, *angles(TOKENS))
    with pytest.raises(Exception, match=f"groups of {group} columns need the row"):
        cuda_source(lambda *args: graph(*args).t().contiguous(), inputs)


@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize("front", [rms_norm, torch.neg])
@pytest.mark.parametrize("width", [32, 512])
@pytest.mark.parametrize("beyond", [[-1], [N_SLOTS], [-1, N_SLOTS]])
def test_rows_without_a_slot_write_nothing(beyond, width, front, computed):
    """A store's mask also holds for a single token and for a single scale per row."""

    def graph(x, slots, pool):
        store(front(x), torch.where(slots < 9, slots, slots + 1) if computed else slots, pool)

    rows = torch.randn(len(beyond), width).bfloat16()
    pool = pool_between_margins(N_SLOTS, width, "fp8_e4m3")
    interpreted_graph(graph, (rows, torch.tensor(beyond), pool))
    assert not any(part.any() for part in pool_bytes(pool)) and margins_are_empty(pool)
    interpreted_graph(graph, (rows, torch.tensor([7, *beyond[1:]]), pool))
    assert margins_are_empty(pool)
    assert pool.scale[7].count_nonzero() == pool.scale.count_nonzero() == width // 32


@pytest.mark.parametrize("front", [rms_norm, torch.neg])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_beyond_32_bit_addresses(dtype, front):
    """Inductor takes 32-bit indices, as all other sizes are small."""
    rows, slots = torch.randn(4, 512).bfloat16(), torch.tensor(FAR_SLOTS, dtype=dtype)
    near, far = Pool.empty(4, 512, "fp8_e4m3"), far_pool("fp8_e4m3")

    def graph(x, slots, pool):
        store(front(x), slots, pool)

    interpreted_graph(graph, (rows, torch.arange(4), near))
    interpreted_graph(graph, (rows, slots, far))
    assert torch.equal(far.data[slots], near.data) and torch.equal(far.scale[slots], near.scale)


@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3"])
def test_a_pool_of_one_slot_keeps_its_mask(fmt):
    """Inductor leaves the index of a dimension of size 1 out of every address."""
    rows, want, pool = torch.randn(2, 512), Pool.empty(1, 512, fmt), Pool.empty(1, 512, fmt)
    for slots in (torch.tensor([-1, -1]), torch.tensor([-1, 0])):
        store(2 * rows, slots, want)
        interpreted_graph(lambda x, slots, pool: store(2 * x, slots, pool), (rows, slots, pool))
        assert all(map(torch.equal, pool_bytes(want), pool_bytes(pool)))


def test_a_dropped_mask_would_be_seen(monkeypatch):
    """Positive control of ``margins_are_empty``."""
    monkeypatch.setattr("fp8kv_inductor.lowerings.block._guards", lambda _: defaultdict(list))
    pool = pool_between_margins(N_SLOTS, 512, "fp8_e4m3")
    args = torch.randn(1, 512).bfloat16(), torch.tensor([-1]), pool
    interpreted_graph(lambda x, slots, pool: store(rms_norm(x), slots, pool), args)
    assert not margins_are_empty(pool)


def test_a_copied_pool_would_be_seen():
    """Positive control of ``pool_copies``."""

    def copies(rows, slots, pool):
        data = pool.data.clone()
        torch.ops.fp8kv.store(rows, slots, data, pool.scale, pool.format.name)
        return data

    *_, slots, pool = store_inputs(TOKENS, "fp8_e4m3")
    code = cuda_source(copies, (nasty_rows(TOKENS), slots, pool))
    assert pool_copies(code.wrapper, pool.data)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("inverse", [False, True])
def test_pairs_of_special_values_are_rotated_like_in_eager_mode(inverse, dtype):
    """Signs of zero included, whichever product is subtracted; the first columns stay."""
    register()
    values = torch.tensor([*BF16_SPECIALS, 1.5, -2.0])
    pairs = torch.cartesian_prod(values, values).flatten()
    turns = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.6])
    cos, sin = torch.cartesian_prod(turns, turns).T[..., None].expand(2, -1, len(pairs) // 2)
    rows = torch.cat([values, values[:3], pairs]).expand(len(cos), 256).to(dtype)
    args = (rows, cos, sin, inverse)
    assert same(interpreted_graph(rope, args), rope(*args))


def test_three_dimensional_rows_with_user_code_around():
    def scaled(x, cos, sin):
        return act_quant(rope(x * 2, cos, sin), 448) + 1

    code = cuda_source(scaled, (torch.randn(8, 4, 512).bfloat16(), *angles(8)))
    assert len(code.kernels) == 1
