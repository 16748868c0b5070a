"""What a patched model refuses, and how: before it changes anything."""

import copy

import pytest
import torch
from hf_small import CONFIG, empty_cache, free_rows, hf, make_model, patched, some_tokens

from fp8kv_inductor.config import ConfigError

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = some_tokens(6).expand(2, 6)


@pytest.fixture(scope="module")
def model():
    return patched(max_batch=2, max_len=20)


def mask(*rows):
    return torch.tensor(rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": None}, r"needed: input_ids \[B, S\]"),
        ({"input_ids": TOKENS[0]}, r"needed: input_ids \[B, S\]"),
        ({"input_ids": TOKENS[:, :0]}, r"needed: input_ids \[B, S\]"),
        ({"inputs_embeds": torch.zeros(2, 6, 64)}, "found inputs_embeds.*unpatch"),
        ({"labels": TOKENS}, "found labels"),
        ({"output_hidden_states": True, "output_attentions": True}, "output_attentions, output_h"),
        ({"attention_mask": torch.ones(2, 5)}, r"attention_mask \(2, 5\); needed.*6 tokens"),
        ({"attention_mask": torch.ones(2, 1, 6, 6)}, r"attention_mask \(2, 1, 6, 6\)"),
        ({"attention_mask": {"sliding_attention": None}}, "attention_mask as dict"),
        ({"attention_mask": mask([1] * 6, [1, 1, 1, 1, 1, 0])}, "padding on the left"),
        ({"attention_mask": mask([1] * 6, [0, 1, 1, 0, 1, 1])}, "padding on the left"),
        ({"position_ids": torch.arange(6)[None] + 1}, r"position_ids 1 \.\. 6.*needed: 0 \.\. 5"),
        ({"input_ids": some_tokens(21)}, "sequence of 21 tokens; the pools hold 20.*max_len"),
        ({"input_ids": TOKENS[:1].expand(3, 6)}, "found 3 sequences and room for 2.*max_batch"),
        ({"attention_mask": torch.zeros(2, 6)}, "nothing but padding"),
    ],
)
def test_arguments(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        model(**({"input_ids": TOKENS} | arguments))
    assert free_rows(model) == 2


def test_caches(model):
    output = model(TOKENS, use_cache=True)
    cache = output[hf.OUTPUT_FIELD]
    for arguments, message in (
        ({"input_ids": TOKENS[:1], "cache": cache}, "found 1 sequences for a cache of 2"),
        ({"input_ids": TOKENS, "cache": cache, "past_key_values": cache}, "found both"),
        ({"input_ids": TOKENS}, "found 2 sequences and room for 0; drop or reset"),
        ({"input_ids": TOKENS, "attention_mask": torch.ones(2, 6), "cache": cache}, "12 tokens"),
        (
            {
                "input_ids": TOKENS,
                "attention_mask": torch.cat([torch.ones(2, 7), torch.zeros(2, 5)], 1),
                "cache": cache,
            },
            "padding on the left",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            model(**arguments)
    for call in (
        lambda: copy.deepcopy(cache),
        lambda: cache.crop(3),
        lambda: cache.reorder_cache(torch.tensor([1, 0])),
        lambda: cache.batch_repeat_interleave(2),
    ):
        with pytest.raises(NotImplementedError, match=r"beam search.*needed: greedy"):
            call()
    assert cache.get_seq_length() == 6
    with pytest.raises(ValueError, match="cache of another patched model"):
        patched(max_batch=2, max_len=20)(TOKENS, cache=cache)
    filled = empty_cache(make_model())
    make_model()(TOKENS, **filled)
    (filled,) = filled.values()
    with pytest.raises(ValueError, match=r"found a DynamicCache of 6 tokens; needed: the cache"):
        model(TOKENS, cache=filled)


def test_an_empty_cache_is_replaced_once(model):
    """Going on with transformers' own object would start again at position 0."""
    given = empty_cache(model)
    with pytest.raises(ValueError, match="sequence of 21 tokens"):
        model(some_tokens(21), **given)
    output = model(TOKENS, **given)
    with pytest.raises(ValueError, match=r"DynamicCache that an earlier call replaced.*output"):
        model(TOKENS, **given)
    assert output[hf.OUTPUT_FIELD].get_seq_length() == 6


def test_beam_search(model):
    with pytest.raises(NotImplementedError, match="beam search"):
        model.generate(TOKENS[:1], max_new_tokens=4, num_beams=2, pad_token_id=0, eos_token_id=None)


def changed(**values):
    model = make_model()
    for name, value in values.items():
        setattr(model.config, name, value)
    return model


def quantized():
    model = make_model()
    model.is_quantized = True  # As transformers' quantizers mark theirs.
    return model


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "attention_factor": 1.2}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.nn.Linear(2, 2), "needs a DeepSeek-V4 model"),
        (lambda: patched(), "replaced already"),
        (lambda: changed(hidden_act="gelu"), "found hidden_act='gelu', needed: 'silu'"),
        (
            lambda: changed(rope_parameters={"main": YARN, "compress": YARN}),
            "found main attention_factor=1.2, needed: 1.0",
        ),
        (lambda: quantized(), "found quantized weights; needed: bf16 or fp32"),
        (lambda: make_model(torch.float16), "found torch.float16 weights; needed: bf16 or fp32"),
        (lambda: changed(index_n_heads=16), "weights are not those that its configuration"),
        (lambda: make_model().to("meta"), "needs.*'cuda' or 'cpu'"),
    ],
)
def test_models(make, message):
    with pytest.raises(ConfigError, match=message):
        hf.patch(make(), max_batch=1, max_len=128)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_batch": 0}, "found max_batch=0"),
        ({"max_len": 1 << 20}, "found max_len=1048576.*has 4096 positions"),
        ({"kv_cache_dtype": "int4"}, "found kv_cache_dtype='int4'; needed: one of"),
    ],
)
def test_limits(limits, message):
    with pytest.raises(ValueError, match=message):
        hf.patch(make_model(), **({"max_batch": 1, "max_len": 128} | limits))


def test_a_loop_over_experts_cannot_be_compiled():
    model = make_model()
    model.set_experts_implementation("eager")
    with pytest.raises(ConfigError, match=r"experts_implementation='eager'.*grouped_mm"):
        hf.patch(model, max_batch=1, max_len=128)
    hf.patch(model, max_batch=1, max_len=128, compile=False)
    assert model(TOKENS[:1]).logits.shape == (1, 6, CONFIG.vocab_size)


def test_unpatch_needs_a_patched_model():
    with pytest.raises(ValueError, match="needed: a patched one"):
        hf.unpatch(make_model())
