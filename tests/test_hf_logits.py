"""A patched model's logits: against transformers' own decode, and against the dense oracle."""

import pytest
import torch
from hf_small import CONFIG, PAD, decode, make_model, oracle, patched, rounded_rows, some_tokens
from model_steps import per_token, worst

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS, PROMPT = 262, 250  # Decode closes groups of 4 and of 128, and the window slides.
FORMATS = [("auto", "bf16"), ("fp8_e4m3", "fp8_e4m3")]


@pytest.fixture(scope="module")
def exact():
    """Exact logits and a bound, by format of the rows."""
    return {fmt: oracle(some_tokens(TOKENS)[0], fmt) for _, fmt in FORMATS}


@pytest.fixture(scope="module")
def theirs():
    """Logits of transformers' own decode, by format of the rows."""
    found = {}
    for fmt in ("fp32", "bf16", "fp8_e4m3"):
        with rounded_rows(fmt):
            found[fmt] = decode(make_model(), some_tokens(TOKENS), PROMPT)[0]
    return found


@pytest.mark.parametrize(("kv_cache_dtype", "fmt"), FORMATS)
def test_prefill_and_decode(kv_cache_dtype, fmt, exact, theirs):
    """Medians, as arithmetic in another order may round an element of a row to its other neighbour.

    That moves later tokens by far less than rounding all rows does.
    """
    ours = decode(patched(kv_cache_dtype), some_tokens(TOKENS), PROMPT)[0]
    expected, bound = exact[fmt]
    format_moves = per_token(theirs["fp32"], theirs[fmt].double()).median()
    assert format_moves > 2 * bound
    for steps in (slice(PROMPT), slice(PROMPT, None)):
        assert per_token(ours, expected)[steps].median() <= bound
        assert per_token(ours, theirs[fmt].double())[steps].median() <= 2 * bound
    assert worst(ours, theirs[fmt]) < format_moves


def test_bf16_weights(exact):
    """As far from exact arithmetic as twice transformers' own bf16 decode; picks move in both."""
    expected, _ = exact["fp8_e4m3"]
    with rounded_rows("fp8_e4m3"):
        theirs = decode(make_model(torch.bfloat16), some_tokens(TOKENS), PROMPT)[0]
    ours = decode(patched("fp8_e4m3", torch.bfloat16), some_tokens(TOKENS), PROMPT)[0]
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert per_token(ours, expected).median() <= 2 * per_token(theirs, expected).median()


def test_rounding_is_the_published_models():
    """The median: fp32 arithmetic in another order may round a row to the other neighbour."""
    tokens = some_tokens(140)
    expected, bound = oracle(tokens[0], "bf16", rounding=True)
    distances = {
        rounding: per_token(patched(rounding=rounding)(tokens).logits[0], expected).median()
        for rounding in (True, False)
    }
    assert distances[True] <= bound < distances[False]


def test_left_padding_changes_nothing():
    prompts = [some_tokens(count, count)[0] for count in (140, 9, 61)]
    width = max(map(len, prompts))
    padded = torch.full((len(prompts), width), PAD)
    mask = torch.zeros_like(padded)
    for i, prompt in enumerate(prompts):
        padded[i, -len(prompt) :] = prompt
        mask[i, -len(prompt) :] = 1
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    logits = patched()(padded, attention_mask=mask, position_ids=positions).logits
    for found, prompt in zip(logits, prompts, strict=True):
        expected, bound = oracle(prompt, "bf16")
        assert worst(found[-len(prompt) :], expected) <= bound
        assert not found[: -len(prompt)].any()


def test_columns_to_keep(exact):
    model, tokens = patched(prefill_chunk=60), some_tokens(TOKENS)[:, :150]
    expected, bound = exact["bf16"]
    for kept, columns in ((0, range(150)), (1, [149]), (70, range(80, 150)), ([5, 149, 60],) * 2):
        kept = torch.tensor(kept) if isinstance(kept, list) else kept
        logits = model(tokens, logits_to_keep=kept).logits
        assert logits.shape == (1, len(columns), CONFIG.vocab_size)
        assert worst(logits[0], expected[list(columns)]) <= bound
