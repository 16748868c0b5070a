"""The evaluation on a random model: its metrics, and the JSON that comes out."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from quality_small import READER
from safetensors.torch import save_file

from bench.quality import corpus, evaluate, recall
from fp8kv_inductor.formats import get_format
from fp8kv_inductor.models.deepseek_v4 import random_weights
from fp8kv_inductor.models.deepseek_v4.dense import DenseReference

FORMATS = ["bf16", "fp8_e4m3", "fp8_e4m3_amax", "fp8_e4m3_ue8m0"]


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    path = tmp_path_factory.mktemp("evaluate") / "reader.safetensors"
    save_file(random_weights(READER, 0), path)
    return evaluate.Settings(
        READER,
        path,
        "cpu",
        compile=False,
        sequence=256,
        heldout_bytes=512,
        picks_bytes=256,
        prompts=2,
        distances={"200": 200, "300": 300},
        batch=2,
        chunk=100,
    )


@pytest.fixture(scope="module")
def result(settings):
    return evaluate.evaluate(settings)


def test_the_json_has_every_format_and_key(result, settings):
    again = json.loads(json.dumps(result))
    assert list(again["formats"]) == FORMATS
    for values in again["formats"].values():
        assert set(values) == {
            "bits_per_byte",
            "over_bf16",
            "kl",
            "top1_agreement",
            "recall",
            "selection_overlap",
            "row_error",
            "lossless",
        }
        assert set(values["recall"]) == set(settings.distances)
        assert set(values["row_error"]) == {"nope", "rope"}
    assert again["device"] == "cpu" and again["versions"]["torch"] == torch.__version__
    assert again["heldout_bytes"] == 512 and again["recall_prompts"] == 2


def test_bf16_agrees_with_itself(result):
    base = result["formats"]["bf16"]
    assert base["over_bf16"]["percent"] == 0
    assert base["kl"] == 0 and base["top1_agreement"] == base["selection_overlap"] == 1
    assert base["row_error"] == {"nope": 0, "rope": 0}


def test_formats_differ_where_they_should(result):
    """Power-of-two scales change the rope tail alone; amax changes everything."""
    formats = result["formats"]
    pow2, amax, one_byte = (formats[name] for name in FORMATS[1:])
    assert pow2["row_error"]["nope"] == one_byte["row_error"]["nope"] == 0
    assert amax["row_error"]["nope"] > 0.01 and pow2["row_error"]["rope"] > 0.01
    assert pow2["lossless"] and one_byte["lossless"] and not amax["lossless"]
    assert pow2["kl"] == one_byte["kl"] > 0
    assert pow2["bits_per_byte"] == one_byte["bits_per_byte"]
    assert 0 < amax["top1_agreement"] <= 1 and 0.5 < amax["selection_overlap"] < 1


@torch.no_grad()
def test_bits_per_byte_are_those_of_the_oracle(result, settings):
    """Within twice what bf16 pools and bf16 weights leave open in the oracle."""
    weights = {
        n: w.to(torch.float32) if w.is_floating_point() else w
        for n, w in random_weights(READER, 0).items()
    }
    nats = []
    for sequence in evaluate.heldout_sequences(settings):
        tokens = torch.tensor(sequence)
        oracle = DenseReference(READER, weights, torch.float64, True, get_format("bf16"))
        nats.append(F.cross_entropy(oracle.forward(tokens)[:-1], tokens[1:]))
    expected = torch.stack(nats).mean().item() / math.log(2)
    found = result["formats"]["bf16"]["bits_per_byte"]
    # A logit of order one in bf16 is off by 2^-9; roundings of some hundred operations add up
    # like the root of their number.
    assert abs(found - expected) <= 2**-9 * 300**0.5 / math.log(2)


def test_overlap_counts_common_picks():
    base = torch.tensor([[0, -1], [0, 1], [0, 1], [0, 1], [0, 1], [0, 1], [2, 3]])
    ours = torch.tensor([[0, -1], [5, 6], [5, 6], [5, 6], [5, 6], [1, 0], [3, 9]])
    assert evaluate.overlap(ours, base) == pytest.approx((1 + 0.5) / 2)


def test_recall_counts_whole_codes(settings):
    """Engines that repeat the code, that repeat three digits of it, and that do not."""

    class Parrot:
        def __init__(self, wrong):
            self.wrong = wrong

        def generate(self, prompts, new_tokens):
            outputs = []
            for tokens in prompts:
                opening = bytes(tokens[-recall.FIRST_DIGIT :])
                start = bytes(tokens).index(opening) + recall.FIRST_DIGIT
                digits = tokens[start : start + new_tokens]
                outputs.append([*digits[: len(digits) - self.wrong], *[0] * self.wrong])
            return outputs

    for wrong, rate in ((0, 1.0), (1, 0.0), (4, 0.0)):
        rates = evaluate.recall_rates(Parrot(wrong), settings)
        assert rates == dict.fromkeys(settings.distances, rate)


def test_the_table_has_a_row_per_format(result):
    head, rows = evaluate.rows_of(result)
    assert [row[0] for row in rows] == [f"`{name}`" for name in FORMATS]
    lines = evaluate.markdown(head, rows).splitlines()
    assert len(lines) == 2 + len(FORMATS)
    assert len({line.count("|") for line in lines}) == 1
    assert {"recall at 200", "recall at 300"} <= set(head)


def test_held_out_text_is_long_enough():
    longest = max(recall.DISTANCES.values())
    assert len(corpus.heldout()) > 2 * longest


def test_neighbouring_sequences_are_no_evidence_of_their_own():
    base = torch.full((8,), 2.0, dtype=torch.float64)
    once = torch.tensor([0.0, 0.02], dtype=torch.float64)
    alone = evaluate.over_base(base[:2] + once, base[:2], 1)
    repeated = evaluate.over_base(base + once.repeat_interleave(4), base, 4)
    assert alone == pytest.approx({"percent": 0.5, "error": 0.5}) and repeated == pytest.approx(
        alone
    )
