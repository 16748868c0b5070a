"""``fp8kv code``: generated CUDA code on any machine."""

import json

import pytest

from fp8kv_inductor import cli


@pytest.mark.parametrize(("chain", "kernels"), [("store-chain", 1), ("q-chain", 1)])
def test_json(capsys, chain, kernels):
    assert cli.main(["code", chain, "--target", "sm_89", "--rows", "8", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {"target", "kernels", "names", "pool_copies", "source"}
    assert (result["target"], result["kernels"], result["pool_copies"]) == ("sm_89", kernels, 0)
    assert len(result["names"]) == kernels
    assert all(f"def {name}(" in result["source"] for name in result["names"])
    assert "cc=89" in result["source"]


def test_source(capsys):
    assert cli.main(["code", "read-prefill", "--fmt", "bf16", "--target", "sm_100"]) == 0
    source = capsys.readouterr().out
    assert "triton_tem_fused_sparse_attention_0" in source
    assert "BLOCK : tl.constexpr = 0" in source, "bf16 rows have no block scales"


@pytest.mark.parametrize(("chain", "kernels"), [("read-prefill", 1), ("read-decode", 3)])
def test_the_read_of_sm_90_is_named(capsys, chain, kernels):
    assert cli.main(["code", chain, "--rows", "8", "--json"]) == 0
    names = json.loads(capsys.readouterr().out)["names"]
    assert names[0] == "fp8kv_read" and len(names) == kernels


def test_a_decode_layer_copies_no_pool(capsys):
    assert cli.main(["code", "decode-layer", "--rows", "4", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["pool_copies"] == 0
    assert sum("store" in name for name in result["names"]) >= 3


def test_an_unknown_chain_is_bad_usage(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["code", "no-such-chain"])
    assert stopped.value.code == 2
    assert "store-chain" in capsys.readouterr().err
