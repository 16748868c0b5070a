"""The lossless claim end to end: with the rope tail kept aside, pow2 pools are bf16 pools.

Kept aside means that the tail is rounded before the store, alike in all formats. What is left to
the pools are rows that power-of-two scales hold exactly, so the read has the same operands, and
where it adds them in the same order, as on the CPU, the same results.
"""

import pytest
import torch
from quality_small import READER
from safetensors.torch import save_file

from bench.quality import evaluate
from fp8kv_inductor import Pool, numerics, ops
from fp8kv_inductor.formats import FORMATS
from fp8kv_inductor.model_config import BYTES
from fp8kv_inductor.models.deepseek_v4 import random_weights
from fp8kv_inductor.models.deepseek_v4.attention import Attention

POW2 = [name for name, fmt in FORMATS.items() if fmt.rule == "pow2"]


def run(settings, fmt, aside=True):
    """Logits of a prompt, tokens that follow it, and what every attention layer gave."""
    engine = evaluate.make_engine(settings, fmt, compile=False)
    if aside:
        evaluate.keep_tail_aside(engine.model, evaluate.pow2_block())
    outputs: list[torch.Tensor] = []
    for module in engine.model.modules():
        if isinstance(module, Attention):
            module.register_forward_hook(lambda _, __, out: outputs.append(out))
    tokens = evaluate.heldout_sequences(settings)[0][:400]
    logits = engine.score(tokens)
    generated = engine.generate([tokens[:300], tokens[:150]], 40)
    return logits, generated, outputs


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("lossless") / "weights.safetensors"
    save_file(random_weights(READER, 0), path)
    at = evaluate.Settings(
        READER, path, "cpu", sequence=512, distances={"256": 256}, batch=2, chunk=200
    )
    return at, run(at, "bf16")


@pytest.mark.parametrize("fmt", POW2)
def test_attention_outputs_are_bit_identical(base, fmt):
    at, (logits, generated, outputs) = base
    ours, continued, attention = run(at, fmt)
    assert torch.equal(ours, logits) and continued == generated
    assert len(attention) == len(outputs) > 2 * READER.n_layers
    for a, b in zip(attention, outputs, strict=True):
        assert torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.mark.parametrize(("fmt", "aside"), [("fp8_e4m3_amax", True), ("bf16", False)])
def test_others_are_not(base, fmt, aside):
    """The positive control: amax scales change the rest of the row, and the tail matters."""
    at, (logits, _, _) = base
    assert not torch.equal(run(at, fmt, aside=aside)[0], logits)


def test_keeping_the_tail_aside_rounds_nothing_else():
    rows = torch.randn(64, BYTES.head_dim).to(torch.bfloat16)
    nope = BYTES.nope_head_dim
    own = ops.act_quant(rows, nope)
    aside = ops.act_quant(own, BYTES.head_dim, evaluate.pow2_block())
    assert torch.equal(aside[:, :nope], own[:, :nope])
    assert not torch.equal(aside[:, nope:], own[:, nope:])


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", POW2)
def test_compiled_stores_hold_the_same_rows(fmt):
    """On a GPU sums of the read have another order for each format; the rows are the same bits."""
    config, n_slots = BYTES, 4096
    rows = torch.randn(n_slots, config.head_dim, device="cuda").to(torch.bfloat16)
    slots = torch.randperm(n_slots, device="cuda")
    block = evaluate.pow2_block()

    def step(rows, slots, pool):
        own = ops.act_quant(rows, config.nope_head_dim)
        ops.store(ops.act_quant(own, config.head_dim, block), slots, pool)

    def stored(name):
        torch._dynamo.reset()
        pool = Pool.empty(n_slots, config.head_dim, name, "cuda")
        torch.compile(step, fullgraph=True)(rows, slots, pool)
        return numerics.decode_rows(pool.data, pool.scale, pool.format)

    assert torch.equal(stored(fmt), stored("bf16"))
    assert not torch.equal(stored("fp8_e4m3_amax"), stored("bf16"))
