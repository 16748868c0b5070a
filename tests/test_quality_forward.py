"""The training forward against the dense oracle: values, gradients, and what has none.

Values: twice the error of fp32 arithmetic in the oracle itself, as in ``test_model_dense.py``.
Gradients likewise, by weight.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from model_steps import Oracle, per_token

from bench.quality import forward
from bench.quality.forward import TrainingForward
from fp8kv_inductor import numerics
from fp8kv_inductor.formats import get_format
from fp8kv_inductor.model_config import TINY
from fp8kv_inductor.models.deepseek_v4 import random_weights
from fp8kv_inductor.models.deepseek_v4.dense import DenseReference, StraightThrough

CONFIG = replace(
    TINY,
    dim=64,
    q_lora_rank=32,
    o_lora_rank=32,
    index_topk=16,
    moe_inter_dim=64,
    vocab_size=64,
    original_seq_len=256,
)
LENGTH = 384


@pytest.fixture(scope="module")
def weights():
    return random_weights(CONFIG, 0, torch.float32)


def some_tokens(batch: int, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(CONFIG.vocab_size, (batch, length))


def in_fp64(weights, requires_grad=False):
    return {
        name: w.double().requires_grad_(requires_grad) if w.is_floating_point() else w
        for name, w in weights.items()
    }


@torch.no_grad()
@pytest.mark.parametrize("fmt", [None, "fp8_e4m3"])
def test_every_sequence_equals_the_oracle(weights, fmt):
    tokens = some_tokens(2)
    row_format = fmt and get_format(fmt)
    result = TrainingForward(CONFIG, weights, row_format=row_format)(tokens)
    for sequence, logits in zip(tokens, result.logits, strict=True):
        dense = DenseReference(CONFIG, weights, torch.float64, kv_format=row_format)
        exact = dense.forward(sequence)
        oracle = Oracle(CONFIG, weights, sequence, fmt or "bf16", True)
        distance = per_token(logits, exact)
        assert distance.max() <= oracle.worst
        assert distance.median() <= oracle.median


@torch.no_grad()
def test_chunks_of_queries_change_nothing(weights, monkeypatch):
    tokens = some_tokens(2)
    model = TrainingForward(CONFIG, in_fp64(weights), torch.float64)
    whole = model(tokens)
    monkeypatch.setattr(forward, "CHUNK_SCORES", 1)
    parts = model(tokens)
    # Sums in another order: a few ulps of logits of order one.
    torch.testing.assert_close(parts.logits, whole.logits, rtol=0, atol=1e-12)
    torch.testing.assert_close(parts.index_loss, whole.index_loss)


@torch.no_grad()
def test_dense_sees_more_than_sparse(weights):
    """The positive control: whether the indexer's choice is followed shows in the logits."""
    tokens = some_tokens(1)
    model = TrainingForward(CONFIG, weights)
    every = replace(CONFIG, index_topk=LENGTH)
    dense, sparse = model(tokens, sparse=False).logits, model(tokens).logits
    assert not torch.allclose(dense[:, 128:], sparse[:, 128:], atol=1e-2)
    torch.testing.assert_close(TrainingForward(every, weights)(tokens).logits, dense)


@pytest.mark.parametrize("chunk_scores", [1, 1 << 27])
def test_gradients_equal_those_of_the_oracle(weights, monkeypatch, chunk_scores):
    """Of every weight but the indexer's, which the oracle cannot train."""
    monkeypatch.setattr(forward, "CHUNK_SCORES", chunk_scores)
    tokens = some_tokens(1, 256)[0]
    target = tokens.roll(-1)
    ours, exact = in_fp64(weights, True), in_fp64(weights, True)
    single = {
        name: w.detach().float().requires_grad_()
        for name, w in exact.items()
        if w.is_floating_point()
    } | {n: w for n, w in weights.items() if "tid2eid" in n}
    logits = TrainingForward(CONFIG, ours, torch.float64)(tokens.unsqueeze(0)).logits[0]
    F.cross_entropy(logits, target).backward()
    for theirs, dtype in ((exact, torch.float64), (single, torch.float32)):
        F.cross_entropy(DenseReference(CONFIG, theirs, dtype).forward(tokens), target).backward()
    untrained = {n for n in ours if ".indexer." in n or n.endswith(("gate.bias", "tid2eid"))}
    for name in untrained:
        assert ours[name].grad is None or not ours[name].grad.any(), name

    def strays(gradients, name):
        """Largest error of a weight's gradient, as a share of its largest element."""
        expected = exact[name].grad
        return float((gradients[name].grad - expected).abs().max() / expected.abs().max())

    names = ours.keys() - untrained
    bound = 2 * max(strays(single, name) for name in names)
    assert max(strays(ours, name) for name in names) <= bound < 1


def test_the_index_loss_reaches_the_indexer_alone(weights):
    ours = in_fp64(weights, True)
    loss = TrainingForward(CONFIG, ours, torch.float64)(some_tokens(1, 256)).index_loss
    loss.backward()
    assert loss > 0
    reached = {name for name, w in ours.items() if w.grad is not None and w.grad.any()}
    assert reached == {name for name in ours if ".indexer." in name}, (
        "weights outside of the indexer, or not all of it"
    )


def test_roundings_are_the_identity_to_gradients():
    x = torch.randn(8, 128, requires_grad=True)
    rounded = numerics.act_quant(x.detach(), 64)
    gradient = torch.randn(8, 128)
    out = StraightThrough.apply(x, rounded)
    assert torch.equal(out, rounded) and not torch.equal(out, x)
    out.backward(gradient)
    assert torch.equal(x.grad, gradient)


def test_lengths_are_whole_windows(weights):
    with pytest.raises(ValueError, match="a multiple of 128"):
        TrainingForward(CONFIG, weights)(some_tokens(1, 100))
