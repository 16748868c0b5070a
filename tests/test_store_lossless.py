"""The headline property: rows that act_quant has rounded survive store and read bit for bit.

The pool's block of 32 lies inside act_quant's block of 64, so its power-of-two scale is not larger,
and every value of the coarser grid lies on the finer one.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fp8kv_inductor
from fp8kv_inductor import numerics
from fp8kv_inductor.formats import E4M3_MAX, FORMATS, SCALE_EXPONENT_MAX
from fp8kv_inductor.model_config import PRESETS, V4_FLASH

POW2 = [name for name, fmt in FORMATS.items() if fmt.rule == "pow2"]
MODELS = list(PRESETS.values())


def stored_and_read(rows: torch.Tensor, name: str) -> torch.Tensor:
    """Rows after a walk through a pool, in a shuffled order of slots."""
    pool = fp8kv_inductor.Pool.empty(2 * len(rows), rows.shape[1], name)
    slots = torch.randperm(pool.n_slots)[: len(rows)]
    fp8kv_inductor.store(rows, slots, pool)
    return numerics.decode_rows(pool.data[slots], pool.scale[slots], pool.format)


def rounded_rows(model, tokens: int = 256) -> torch.Tensor:
    """Rows as the model makes them: bf16, of many magnitudes, the nope part on the e4m3 grid."""
    magnitude = 10.0 ** torch.linspace(-5, 5, tokens).unsqueeze(1)
    rows = (torch.randn(tokens, model.head_dim) * magnitude).to(torch.bfloat16)
    return fp8kv_inductor.act_quant(rows, model.nope_head_dim)


@pytest.mark.parametrize("name", POW2)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_pow2_rows_survive_bit_for_bit(name, model):
    rows = rounded_rows(model)
    read = stored_and_read(rows, name)
    nope = model.nope_head_dim
    assert torch.equal(
        read[:, :nope].to(torch.bfloat16).view(torch.int16), rows[:, :nope].view(torch.int16)
    )
    assert torch.equal(read.to(torch.bfloat16).to(torch.float32), read), "exact in bf16 as well"


@pytest.mark.parametrize("name", POW2)
def test_pow2_rounds_the_rope_tail_once(name):
    rows = rounded_rows(V4_FLASH)
    tail = rows[:, V4_FLASH.nope_head_dim :]
    read = stored_and_read(rows, name)[:, V4_FLASH.nope_head_dim :]
    amax = tail.to(torch.float32).unflatten(-1, (-1, 32)).abs().amax(-1).repeat_interleave(32, -1)
    half_step = torch.maximum(tail.abs() / 16, amax / E4M3_MAX * 2 / 1024)
    assert ((read - tail).abs() <= half_step).all()
    assert not torch.equal(read, tail.to(torch.float32))


def test_amax_rounds_a_second_time():
    """The positive control: the obvious scale changes 93 % of the values, by 2.5 % rms."""
    rows = fp8kv_inductor.act_quant(
        torch.randn(512, V4_FLASH.head_dim).to(torch.bfloat16), V4_FLASH.nope_head_dim
    )
    nope = rows[:, : V4_FLASH.nope_head_dim].to(torch.float32)
    read = stored_and_read(rows, "fp8_e4m3_amax")[:, : V4_FLASH.nope_head_dim]
    changed = (read != nope).to(torch.float32).mean()
    rms = ((read - nope).square().mean() / nope.square().mean()).sqrt()
    assert 0.92 < changed < 0.94
    assert 0.02 < rms < 0.03


@given(st.lists(st.integers(0, 0xFFFF), min_size=64, max_size=64), st.sampled_from(POW2))
def test_any_finite_row_in_range_survives(bits, name):
    row = torch.tensor(bits).to(torch.int16).view(torch.bfloat16)
    limit = E4M3_MAX * 2.0**SCALE_EXPONENT_MAX
    row = row.nan_to_num(0.0).clamp(-limit, limit)
    rounded = numerics.act_quant(row.unsqueeze(0), 64)
    assert torch.equal(stored_and_read(rounded, name), rounded.to(torch.float32))
