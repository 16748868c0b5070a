"""The checkpoint that comes with the package."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from bench.quality import corpus, evaluate, recall
from bench.quality.forward import TrainingForward
from fp8kv_inductor.model_config import BYTES, PRESETS
from fp8kv_inductor.models.deepseek_v4 import shipped_weights

ASCII_BITS = 7


@pytest.fixture(scope="module")
def model():
    weights = {
        name: w.to(torch.float32) if w.is_floating_point() else w
        for name, w in load_file(shipped_weights(BYTES)).items()
    }
    return TrainingForward(BYTES, weights)


def test_it_is_the_only_one_and_small():
    shipped = {name: path for name in PRESETS if (path := shipped_weights(PRESETS[name]))}
    assert shipped.keys() == {BYTES.name}
    assert shipped[BYTES.name].stat().st_size <= 12 << 20


@torch.no_grad()
def test_it_knows_its_language(model):
    """Held-out text takes less than a third of the bits of ASCII."""
    tokens = torch.tensor([list(corpus.heldout()[:2048])])
    nats = F.cross_entropy(model(tokens).logits[0, :-1], tokens[0, 1:])
    assert nats.item() / math.log(2) < ASCII_BITS / 3


@torch.no_grad()
def test_it_repeats_a_code_from_outside_of_the_window(model):
    text = np.frombuffer(corpus.heldout(), np.uint8)
    right = 0
    for question in recall.prompts(0, text, 8 * BYTES.window_size, 8):
        tokens = torch.tensor([question.tokens + question.answer])
        count = tokens.shape[1]
        padded = F.pad(tokens, (0, -count % BYTES.window_size))
        picks = model(padded).logits[0, count - recall.DIGITS - 1 : count - 1].argmax(-1)
        right += torch.equal(picks, tokens[0, -recall.DIGITS :])
    assert right > 4


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["bf16", "fp8_e4m3"])
def test_compiled_steps_repeat_codes_from_far_back(fmt):
    """Picks among a thousand rows: what a kernel gets wrong now and then is not repeated."""
    settings = evaluate.Settings(
        BYTES, shipped_weights(BYTES), "cuda", sequence=4096, distances={"4K": 4096}, prompts=16
    )
    engine = evaluate.make_engine(settings, fmt, compile=True)
    assert evaluate.recall_rates(engine, settings)["4K"] > 0.9
    tokens = evaluate.heldout_sequences(settings)[0]
    assert torch.equal(engine.score(tokens), engine.score(tokens))
