"""Patching shares the parameters, adds none, and is undone by unpatch."""

import gc
import weakref

import pytest
import torch
from hf_small import hf, make_model, some_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

COPIED = ("compressor.kv_proj", "compressor.gate_proj", "indexer.kv_proj", "indexer.gate_proj")


def storages(module):
    return {p.untyped_storage().data_ptr() for p in module.parameters()}


def graph(model):
    return model.forward.engine.model


def test_parameters_are_shared():
    model = make_model()
    hf.patch(model, max_batch=1, max_len=128, compile=False)
    shared = storages(graph(model))
    copied = {name for name, p in model.named_parameters() if p.data_ptr() not in shared}
    assert copied == {
        name
        for name, _ in model.named_parameters()
        if name.endswith(tuple(f"{end}.weight" for end in COPIED))
    }


def test_half_precision_copies_no_large_matrix():
    model = make_model(torch.bfloat16)
    hf.patch(model, max_batch=1, max_len=128, compile=False)
    shared = storages(graph(model))
    copied = {name for name, p in model.named_parameters() if p.data_ptr() not in shared}
    matrices = {name for name in copied if model.get_parameter(name).dim() > 1}
    small = ("compressor", "mlp.gate.weight", "hc_head")
    assert all(any(part in name for part in small) for name in matrices)


def test_written_weights_are_seen():
    model = hf.patch(make_model(), max_batch=1, max_len=128, compile=False)
    tokens = some_tokens(5)
    assert model(tokens).logits.any()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert not model(tokens).logits.any()


def test_unpatch_restores_everything():
    model, tokens = make_model(), some_tokens(20)
    names = list(model.state_dict())
    expected = model(tokens).logits
    assert hf.patch(model, max_batch=1, max_len=128, compile=False) is model
    assert list(model.state_dict()) == names
    assert not torch.equal(model(tokens).logits, expected)
    pools = weakref.ref(graph(model).pools)
    assert hf.unpatch(model) is model
    assert "forward" not in model.__dict__
    assert torch.equal(model(tokens).logits, expected)
    gc.collect()
    assert pools() is None
    hf.patch(model, max_batch=1, max_len=128, compile=False)
    assert model(tokens).logits.shape == expected.shape
