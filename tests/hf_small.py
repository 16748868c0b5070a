"""transformers models small enough for tests, and transformers' own decode over rounded rows."""

import contextlib

import pytest
import torch
from model_steps import worst
from test_model_transformers import CONFIG, hugging_face_config

from fp8kv_inductor.formats import get_format
from fp8kv_inductor.models.deepseek_v4 import random_weights
from fp8kv_inductor.models.deepseek_v4.dense import DenseReference
from fp8kv_inductor.numerics import decode_rows, encode_rows

transformers = pytest.importorskip("transformers", reason="the integration is transformers'")
modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")

from fp8kv_inductor.integrations import hf  # noqa: E402

WEIGHTS = random_weights(CONFIG, 1, torch.float32)
PAD = 0


def make_model(dtype=torch.float32):
    """transformers' model, with the same weights each time, unpatched."""
    model = transformers.DeepseekV4ForCausalLM.from_pretrained(
        None,
        config=hugging_face_config(CONFIG),
        state_dict={name: weight.clone() for name, weight in WEIGHTS.items()},
        dtype=dtype,
        attn_implementation="eager",
    )
    return model.eval()


def patched(kv_cache_dtype="auto", dtype=torch.float32, **options):
    options = {"max_batch": 4, "max_len": 512, "prefill_chunk": 200, "compile": False} | options
    return hf.patch(make_model(dtype), kv_cache_dtype, **options)


def some_tokens(count, seed=0):
    """Token ids `[1, count]`, no padding among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, CONFIG.vocab_size, (1, count), generator=generator)


def oracle(tokens, kv_format, rounding=False):
    """Exact logits `[T, V]` of a sequence `[T]` over such pools, and twice fp32's distance."""
    formats = get_format(kv_format), get_format("bf16")
    expected, exact = (
        DenseReference(CONFIG, WEIGHTS, dtype, rounding, *formats).forward(tokens)
        for dtype in (torch.float32, torch.float64)
    )
    return exact, 2 * worst(expected, exact)


def empty_cache(model):
    """The argument that ``generate()`` starts with; a patched model replaces it by its own."""
    return {hf.OUTPUT_FIELD: transformers.DynamicCache(config=model.config)}


@torch.no_grad()
def decode(model, tokens, prompt):
    """Logits `[B, T, V]`: ``prompt`` columns at once, then one by one."""
    output = model(tokens[:, :prompt], use_cache=True, **empty_cache(model))
    logits = [output.logits]
    for column in range(prompt, tokens.shape[1]):
        cache = {hf.OUTPUT_FIELD: output[hf.OUTPUT_FIELD]}
        output = model(tokens[:, column : column + 1], use_cache=True, **cache)
        logits.append(output.logits)
    return torch.cat(logits, 1)


def free_rows(model):
    """Sequences that fit into the pools of a patched model now."""
    pages = model.forward.engine.pages
    rows = []
    while (row := pages.admit(model.forward.max_len)) is not None:
        rows.append(row)
    for row in rows:
        pages.release(row)
    return len(rows)


@contextlib.contextmanager
def rounded_rows(kv_format):
    """transformers' caches hold what pools of that format would, and bf16 index keys."""

    def rounded(rows, name):
        row_format = get_format(name)
        return decode_rows(*encode_rows(rows, row_format), row_format).to(rows.dtype)

    window, compressed = {}, modeling.DeepseekV4HCACache.update_compressor_states

    def update_compressor_states(self, name, rows):
        return compressed(self, name, rounded(rows, "bf16" if name == "indexer" else kv_format))

    with pytest.MonkeyPatch.context() as patch:
        for kind in (modeling.DynamicSlidingWindowLayer, modeling.DeepseekV4HCACache):
            window[kind] = kind.update

            def update(self, keys, values, *args, _update=kind.update, **kwargs):
                rows = rounded(keys, kv_format)
                return _update(self, rows, rows, *args, **kwargs)

            patch.setattr(kind, "update", update)
        patch.setattr(
            modeling.DeepseekV4HCACache, "update_compressor_states", update_compressor_states
        )
        yield
