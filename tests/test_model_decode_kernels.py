"""Kernels of a decode layer's attention part, without matrix products; DESIGN.md says why each."""

import expecttest
import pytest
import torch

from fp8kv_inductor.chains import DecodeLayer, decode_inputs
from fp8kv_inductor.lowerings.cross_compile import cuda_source, launches

OPERATORS = ("rope", "act_quant", "store", "indexer_scores", "sparse_attention")


def kernels(ratio: int) -> str:
    """One line per launch: kind of kernel, and which of our operators are in it.

    A kernel over rows holds them or loops over them, ``per`` or ``red``, as the version likes.
    """
    with torch.no_grad():
        code = cuda_source(DecodeLayer("fp8_e4m3", ratio), decode_inputs(64))
    lines = []
    for name in launches(code.wrapper):
        kind = name.split("_")[1] if name.startswith("triton_") else name
        kind = "row" if kind in ("per", "red") else kind
        inside = [op for op in OPERATORS if f"_{op}_" in name]
        lines.append(" ".join([kind, *inside]))
    return "\n".join(lines)


def test_window_layer():
    expecttest.assert_expected_inline(
        kernels(0),
        """\
row rope act_quant store
row
row rope
poi
fp8kv_read
poi sparse_attention
poi""",
    )


@pytest.mark.skipif(
    torch.__version__ < "2.13",
    reason="older torch has a kernel less: the store of the index state joins that of the rows",
)
def test_layer_with_indexer():
    expecttest.assert_expected_inline(
        kernels(4),
        """\
poi
poi
poi
row rope act_quant store
poi store
row rope
row store
poi store
row
poi rope
row
poi
poi
poi
tem indexer_scores
row rope
poi
fp8kv_read
poi sparse_attention
poi""",
    )


def test_layer_without_indexer():
    expecttest.assert_expected_inline(
        kernels(128),
        """\
poi
poi
row
poi
row rope act_quant store
poi store
row
row rope
poi
fp8kv_read
poi sparse_attention
poi""",
    )


def test_a_single_token_is_compiled():
    """What a graph of one token loads by token has no index, unlike in every other graph."""
    with torch.no_grad():
        code = cuda_source(DecodeLayer("fp8_e4m3", 4), decode_inputs(1))
    assert "fp8kv_read" in launches(code.wrapper)
