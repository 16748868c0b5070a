"""``generate()`` of a patched model: greedy, sampled, padded, again, on from an earlier cache."""

import gc

import pytest
import torch
from hf_small import CONFIG, PAD, decode, free_rows, hf, make_model, oracle, patched, some_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = {"do_sample": False, "pad_token_id": PAD, "eos_token_id": None}


def generate(model, prompts, count, **options):
    """New tokens `[B, count]` behind prompts, padded on the left."""
    width = max(prompt.shape[1] for prompt in prompts)
    ids = torch.full((len(prompts), width), PAD)
    for row, prompt in zip(ids, prompts, strict=True):
        row[width - prompt.shape[1] :] = prompt
    options = GREEDY | options
    found = model.generate(ids, attention_mask=(ids != PAD).long(), max_new_tokens=count, **options)
    return found[:, width:]


@pytest.fixture(scope="module")
def model():
    return patched()


PROMPTS = [some_tokens(count, count) for count in (125, 40, 1)]
COUNT = 8


@pytest.fixture(scope="module")
def batch(model):
    return generate(model, PROMPTS, COUNT)


@pytest.mark.parametrize("index", range(len(PROMPTS)))
def test_greedy_tokens_of_padded_prompts(batch, index):
    tokens = torch.cat([PROMPTS[index][0], batch[index]])
    expected, bound = oracle(tokens, "bf16")
    steps = expected[-COUNT - 1 : -1]
    missed = steps.max(-1).values - steps[torch.arange(COUNT), batch[index]]
    assert missed.max() <= 2 * bound


def test_as_transformers_own(batch, model):
    """Without padding, which transformers' compressors pool; short, so that no pick moves."""
    expected = generate(make_model(), PROMPTS[1:2], COUNT)
    assert torch.equal(generate(model, PROMPTS[1:2], COUNT), expected)


def test_rows_are_free_again(model, batch):
    """Two calls of a batch of three in four rows: nothing of the first one is left."""
    assert torch.equal(generate(model, PROMPTS, COUNT), batch)
    gc.collect()
    assert free_rows(model) == 4


def test_sampling_and_several_sequences_of_a_prompt(model):
    options = {"do_sample": True, "temperature": 0.8, "num_return_sequences": 3}
    found = []
    for _ in range(2):
        torch.manual_seed(1)
        found.append(generate(model, PROMPTS[1:2], COUNT, **options))
    assert found[0].shape == (3, COUNT)
    assert torch.equal(*found)
    assert not torch.equal(found[0][0], found[0][1])


def test_without_a_cache(model):
    expected = generate(model, PROMPTS[1:2], 3)
    assert torch.equal(generate(model, PROMPTS[1:2], 3, use_cache=False), expected)
    gc.collect()
    assert free_rows(model) == 4


def test_on_from_the_cache_of_an_earlier_call(model):
    """A second turn: the first one's cache, the whole conversation as input."""
    first = model.generate(PROMPTS[1], max_new_tokens=5, return_dict_in_generate=True, **GREEDY)
    cache = first[hf.OUTPUT_FIELD]
    assert free_rows(model) == 3
    turn = torch.cat([first.sequences, some_tokens(9, 9)], 1)
    expected = model.generate(turn, max_new_tokens=5, **GREEDY)
    found = model.generate(turn, max_new_tokens=5, **{hf.OUTPUT_FIELD: cache}, **GREEDY)
    assert torch.equal(found, expected)
    cache.reset()
    assert free_rows(model) == 4


@pytest.mark.parametrize("name", hf.CACHE_FIELDS)
def test_both_spellings_of_the_cache(model, name):
    tokens = PROMPTS[1]
    output = model(tokens[:, :-2], use_cache=True)
    again = model(tokens[:, -2:-1], **{name: output[hf.OUTPUT_FIELD]})
    assert again[hf.OUTPUT_FIELD] is output[hf.OUTPUT_FIELD]
    last = model(tokens[:, -1:], **{name: again[hf.OUTPUT_FIELD]}).logits
    expected, bound = oracle(tokens[0], "bf16")
    assert (last[0, 0].double() - expected[-1]).abs().max() <= bound


def test_two_caches_do_not_touch(model):
    tokens = [some_tokens(30, seed) for seed in (1, 2)]
    caches = [{}, {}]
    logits = [[], []]
    for start in range(0, 30, 10):
        for i in range(2):
            output = model(tokens[i][:, start : start + 10], use_cache=True, **caches[i])
            caches[i] = {hf.OUTPUT_FIELD: output[hf.OUTPUT_FIELD]}
            logits[i].append(output.logits)
    for i in range(2):
        expected, bound = oracle(tokens[i][0], "bf16")
        assert (torch.cat(logits[i], 1)[0].double() - expected).abs().max() <= bound


def test_a_tuple_on_request(model):
    logits, cache = model(PROMPTS[1], return_dict=False)
    assert logits.shape == (1, 40, CONFIG.vocab_size)
    assert isinstance(cache, hf.PooledCache)
    assert decode(model, PROMPTS[1], 40).shape == logits.shape
