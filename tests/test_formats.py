"""RowFormat's arithmetic, and the README table that quotes it."""

import re
from pathlib import Path

import pytest
import torch

from fp8kv_inductor import FORMATS, get_format
from fp8kv_inductor.config import KV_CACHE_DTYPES
from fp8kv_inductor.model_config import V4_FLASH

README = (Path(__file__).parent.parent / "README.md").read_text()


@pytest.mark.parametrize(
    ("name", "row_bytes"),
    [
        ("bf16", 256),
        ("fp32", 512),
        ("fp8_e4m3", 136),
        ("fp8_e4m3_amax", 136),
        ("fp8_e4m3_ue8m0", 132),
    ],
)
def test_row_bytes(name, row_bytes):
    fmt = get_format(name)
    assert fmt.name == name and FORMATS[name] is fmt
    assert fmt.row_bytes(128) == row_bytes
    assert fmt.bytes_per_element(128) == row_bytes / 128


@pytest.mark.parametrize("head_dim", [1, 16, 48, 513])
def test_rows_of_broken_blocks_are_refused(head_dim):
    with pytest.raises(
        ValueError, match=f"a row has {head_dim}; head_dim must be a multiple of 32"
    ):
        get_format("fp8_e4m3").scales_per_row(head_dim)
    assert get_format("bf16").row_bytes(head_dim) == 2 * head_dim


def test_unknown_format():
    with pytest.raises(ValueError, match="unknown row format 'int8'; known: bf16, fp32, fp8_e4m3"):
        get_format("int8")


def test_the_readme_table_quotes_every_kv_format():
    section = README.partition("## Row formats")[2].partition("\n## ")[0]
    _header, *table = re.findall(r"^\| `(\w+)` \| (.+) \|$", section, re.MULTILINE)
    expected = []
    for name in KV_CACHE_DTYPES.values():
        fmt = get_format(name)
        scale = f"{dtype_name(fmt.scale_dtype)} per {fmt.block}" if fmt.quantized else "none"
        sizes = fmt.row_bytes(V4_FLASH.head_dim), fmt.bytes_per_element(V4_FLASH.head_dim)
        cells = [dtype_name(fmt.code_dtype), scale, fmt.rule, *map(str, sizes)]
        expected.append((name, " | ".join(cells)))
    assert table == expected
    assert f"bytes per row of {V4_FLASH.head_dim}" in README


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
