"""The training script: what it learns from, what it saves, and that the loss falls."""

import json
import math

import numpy as np
import pytest
import torch
from quality_small import READER
from safetensors import safe_open

from bench.quality import corpus, recall, train
from bench.quality.forward import TrainingForward
from fp8kv_inductor.config import CacheConfig
from fp8kv_inductor.model_config import BYTES
from fp8kv_inductor.models.deepseek_v4 import DeepseekV4, load_safetensors, reference_weights

CPU = torch.device("cpu")
SMALL = train.Schedule(
    lengths=(128, 256, 384),
    tokens=512,
    check_prompts=1,
    check_bytes=256,
    distances={"256": 256},
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A few steps of training: the checkpoint and the best check."""
    out = tmp_path_factory.mktemp("train") / "reader.safetensors"
    text = corpus.heldout()[:20000]
    best = train.train(READER, 60, out, CPU, text=text, schedule=SMALL, max_steps=41)
    return out, best


def test_the_loss_falls(run):
    out, best = run
    lines = [json.loads(line) for line in out.with_suffix(".jsonl").read_text().splitlines()]
    steps = [line for line in lines if "text" in line]
    assert [line["step"] for line in steps] == [20, 40]
    assert steps[1]["text"] < steps[0]["text"] < math.log(256) + 2
    (checked,) = (line for line in lines if "check" in line)
    assert checked["check"]["bits_per_byte"] == best.bits_per_byte < 8
    assert set(best.recall) == {"256"}


def test_the_checkpoint_loads_as_it_was_checked(run):
    """Matrices are bf16, so the served model has the very weights that were checked."""
    out, best = run
    with safe_open(out, "pt") as file:
        assert json.loads(file.metadata()["recall"]) == best.recall
        assert {file.get_tensor(n).dtype for n in file.keys()} == {  # noqa: SIM118
            torch.bfloat16,
            torch.float32,
            torch.int32,
        }
    model = DeepseekV4(CacheConfig.resolve(READER, "auto", "cpu"), torch.float32)
    load_safetensors(model, out)
    forward = TrainingForward(READER, reference_weights(model))
    again = train.check(forward, np.frombuffer(corpus.heldout(), np.uint8), SMALL, CPU)
    assert again.bits_per_byte == pytest.approx(best.bits_per_byte, rel=1e-6)


def test_the_trained_model_fits_its_checkpoint():
    weights = train.as_saved(train.initial_weights(BYTES, 0))
    assert sum(weight.nbytes for weight in weights.values()) < 12 << 20
    assert set(BYTES.compress_ratios) == {0, 4, 128}
    assert BYTES.index_topk < min(recall.DISTANCES.values()) // 4
    assert max(recall.DISTANCES.values()) + recall.CODE_BYTES <= BYTES.max_seq_len


def test_answers_and_text_are_weighed_apart():
    """Digits that cannot be known, and names, are in no loss."""
    model = TrainingForward(READER, train.initial_weights(READER, 0))
    text = np.frombuffer(corpus.heldout(), np.uint8)
    sequences = recall.batch(np.random.default_rng(0), text, 8, 256, recall.Mix(0.3, 0.5))
    parts, _ = train.losses(model, sequences, CPU, sparse=True)
    tokens = torch.from_numpy(sequences.tokens).long()
    nats = -model(tokens).logits.log_softmax(-1)[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]
    for name, mask in (
        ("text", sequences.text),
        ("answer", sequences.answers),
        ("copy", sequences.copies),
    ):
        expected = nats[torch.from_numpy(mask[:, 1:])].mean()
        torch.testing.assert_close(parts[name], expected)


def test_routers_move_against_their_load():
    weights = {"gate.bias": torch.zeros(READER.n_routed_experts)}
    loads = {"gate": torch.tensor([0.7, 0.1, 0.1, 0.1]), "hashed": torch.ones(4)}
    train.balance(READER, weights, loads)
    assert weights["gate.bias"][0] < 0 < weights["gate.bias"][1:].min()


def test_a_snapshot_restores():
    weights = {"w": torch.ones(3, requires_grad=True)}
    good = train.snapshot(weights)
    with torch.no_grad():
        weights["w"].fill_(torch.nan)
    train.restore(weights, good)
    assert torch.equal(weights["w"], torch.ones(3))


def test_the_rate_rises_stays_and_falls():
    rates = [train.learning_rate(1.0, *at) for at in ((0, 0.0), (500, 0.2), (900, 0.7), (999, 1.0))]
    assert rates == [pytest.approx(x) for x in (0.01, 1.0, 0.5, 0.02)]
