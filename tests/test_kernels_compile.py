"""GPU code of the kernels on a machine without a GPU: compiled for every generation, and read."""

import functools
import re

import pytest
import torch
from compile_kernel import TRITON, compile_kernel, cuobjdump, e4m3_cast_source

from fp8kv_inductor import numerics
from fp8kv_inductor.kernels.act_quant import act_quant_kernel
from fp8kv_inductor.kernels.attention import (
    choose_read_config,
    combine_kernel,
    combine_warps,
    prefill_kernel,
    split_kernel,
)
from fp8kv_inductor.kernels.indexer import indexer_kernel, keys_per_program
from fp8kv_inductor.kernels.launch import rows_per_program
from fp8kv_inductor.kernels.rope import ROPE_OPTIONS, rope_kernel
from fp8kv_inductor.kernels.store import store_kernel
from fp8kv_inductor.model_config import V4_FLASH

SHARED_BYTES = {89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Shared memory that a program may use, by compute capability (CUDA programming guide)."""

slower_on_new_triton = pytest.mark.skipif(
    TRITON >= (3, 8), reason="triton 3.8 loads rows in another way and spills: right, but slower"
)

D = V4_FLASH.head_dim
BLOCK = 32
ROWS = rows_per_program(D)

POINTERS = {
    **dict.fromkeys(("window_data", "cmp_data", "data"), "*u8"),
    **dict.fromkeys(("window_scale", "cmp_scale", "scale"), "*fp16"),
    **dict.fromkeys(("q", "x", "rows", "out", "idx_data"), "*bf16"),
    **dict.fromkeys(("cos", "sin", "sink", "lse", "weights"), "*fp32"),
    **dict.fromkeys(("partial_out", "partial_lse"), "*fp32"),
    **dict.fromkeys(("indices", "counts", "slots", "page_rows", "request"), "*i32"),
}
PARTS = {"combine": torch.float16, "combine_plain": torch.float32}
UNIT_STRIDES = ("stride_index_column", "stride_count", "stride_sink", "stride_slots")


def read_constants(arch: int) -> tuple[dict, dict]:
    config = choose_read_config(V4_FLASH.n_heads, D, torch.bfloat16, SHARED_BYTES[arch])
    tile = {"BLOCK_H": config.block_h, "BLOCK_K": config.block_k, "STAGES": config.num_stages}
    constants = {"D": D, "BLOCK": BLOCK, "BLOCK_D": D, **tile}
    return constants, {"num_warps": config.num_warps}


@functools.cache
def compiled(name: str, arch: int):
    """A kernel of `head_dim` 512 in format fp8_e4m3, with the constants of its launcher."""
    row = {"D": D, "ROWS": ROWS, "BLOCK_D": D}
    encode = {**row, "ROUND_FIRST": arch < 90}
    options: dict = {}
    types = dict(POINTERS)
    if name == "rope":
        kernel, constants = rope_kernel, {**row, "PAIRS": 32, "INVERSE": False}
        options = ROPE_OPTIONS
    elif name == "act_quant":
        kernel = act_quant_kernel
        constants = {
            **encode,
            "FEATURES": V4_FLASH.nope_head_dim,
            "BLOCK": 64,
            "AMAX_MIN": numerics.ACT_QUANT_AMAX_MIN,
            "EXPONENT_MAX": numerics.act_quant_exponent_max(torch.bfloat16),
        }
    elif name in ("store", "store_amax"):
        kernel, constants = store_kernel, {**encode, "BLOCK": BLOCK, "POW2": name == "store"}
    elif name == "prefill":
        kernel = prefill_kernel
        constants, options = read_constants(arch)
        constants["PAIRS"] = V4_FLASH.rope_head_dim // 2
    elif name == "split":
        kernel = split_kernel
        constants, options = read_constants(arch)
        constants["SPLITS"] = 10
    elif name in PARTS:
        kernel, constants = combine_kernel, {"D": D, "SPLITS": 10, "BLOCK_S": 16, "BLOCK_D": D}
        types["partial_out"] = f"*fp{8 * PARTS[name].itemsize}"
        options = {"num_warps": combine_warps(PARTS[name])}
    else:
        kernel = indexer_kernel
        constants = {
            "D": V4_FLASH.index_head_dim,
            "PAGE_SIZE": 32,
            "BLOCK_H": V4_FLASH.index_n_heads,
            "BLOCK_N": keys_per_program(torch.bfloat16),
            "BLOCK_D": V4_FLASH.index_head_dim,
        }
    constants |= {stride: 1 for stride in UNIT_STRIDES if stride in kernel.arg_names}
    types["softmax_scale"] = "fp32"
    return compile_kernel(
        kernel, arch, types, constants, lambda name: name.startswith("stride"), options
    )


KERNELS = ["rope", "act_quant", "store", "store_amax", "prefill", "split", *PARTS, "indexer"]
ENCODERS = ["act_quant", "store", "store_amax"]


@pytest.mark.parametrize("arch", SHARED_BYTES)
@pytest.mark.parametrize("name", KERNELS)
def test_compiles_and_fits(name, arch):
    kernel = compiled(name, arch)
    assert kernel.asm["cubin"]
    assert kernel.metadata.shared <= SHARED_BYTES[arch]


@pytest.mark.parametrize("arch", SHARED_BYTES)
@pytest.mark.parametrize("name", PARTS)
def test_parts_are_added_up_within_threads(name, arch):
    """Across warps, through shared memory, it takes five times as long."""
    assert "bar.sync" not in compiled(name, arch).asm["ptx"]


@pytest.mark.parametrize("arch", SHARED_BYTES)
def test_rope_rounds_every_product(arch):
    ptx = compiled("rope", arch).asm["ptx"]
    assert "fma" not in ptx
    assert len(re.findall(r"mul\.rn\.f32\s", ptx)) == 2 * ROWS * D // 128


@pytest.mark.parametrize("arch", SHARED_BYTES)
@pytest.mark.parametrize("name", ["rope", *ENCODERS])
def test_subnormals_are_kept(name, arch):
    assert ".ftz" not in compiled(name, arch).asm["ptx"]


@pytest.mark.parametrize("arch", SHARED_BYTES)
def test_division_is_exactly_rounded(arch):
    ptx = compiled("store_amax", arch).asm["ptx"]
    divisions = set(re.findall(r"div\.[\w.]*f32", ptx))
    assert divisions == {"div.rn.f32"}
    assert "rcp." not in ptx
    assert not re.findall(r"div\.[\w.]*f32", compiled("store", arch).asm["ptx"])


@pytest.mark.parametrize("arch", SHARED_BYTES)
@pytest.mark.parametrize("name", ENCODERS)
def test_cast_to_e4m3(name, arch):
    """One instruction from fp32, or through fp16 after rounding onto the e4m3 grid."""
    ptx = compiled(name, arch).asm["ptx"]
    casts = set(re.findall(r"cvt\.[\w.]*\.e4m3x2\.\w+", ptx))
    assert casts == {f"cvt.rn.satfinite.e4m3x2.{e4m3_cast_source(arch)}"}


@slower_on_new_triton
@pytest.mark.parametrize("name", ["prefill", "split"])
def test_reads_use_tensor_cores_and_wide_asynchronous_loads(name):
    ptx = compiled(name, 90).asm["ptx"]
    assert re.search(r"wgmma\.mma_async[\w.]*f32\.bf16\.bf16", ptx)
    assert re.search(r"cp\.async\.cg\.shared\.global.*0x10", ptx)


@slower_on_new_triton
@pytest.mark.parametrize("name", ["prefill", "split"])
def test_reads_spill_no_registers_on_sm_90(name):
    usage = cuobjdump(compiled(name, 90).asm["cubin"], "-res-usage")
    assert re.findall(r"STACK:(\d+)", usage) == ["0"]
