"""A torch without the private names that a lowering needs: one warning, right result."""

import subprocess
import sys
import warnings

import pytest

from fp8kv_inductor import _compat

HIDDEN = """
import warnings
import torch
from fp8kv_inductor import _compat
hidden = {hidden!r}
exists = _compat._exists
_compat._exists = lambda name: name not in hidden and exists(name)

from fp8kv_inductor import Pool, act_quant, indexer_scores, register, sparse_attention, store
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    pools = [Pool.empty(8, 64, "fp8_e4m3") for _ in range(2)]
    register()
ours = [str(w.message) for w in caught if "fp8kv_inductor" in str(w.message)]

def step(rows, slots, pool, keys):
    store(act_quant(rows, 64), slots, pool)
    q, indices = rows.unsqueeze(1), slots.clamp_min(0).unsqueeze(1)
    out, _ = sparse_attention(q, pool, pool, indices, None, torch.zeros(1), 1, 0.1)
    pages, counts = torch.zeros(1, 1, dtype=torch.int64), torch.full((3,), 8)
    return out, indexer_scores(q, torch.ones(3, 1), keys, pages, pages[0].expand(3), counts, 8)

rows, slots, keys = torch.randn(3, 64), torch.tensor([1, -1, 2]), Pool.empty(8, 64, "bf16")
store(torch.randn(8, 64), torch.arange(8), keys)
want = step(rows, slots, pools[0], keys)
got = torch.compile(step, fullgraph=True)(rows, slots, pools[1], keys)
assert torch.equal(pools[0].data, pools[1].data) and torch.equal(pools[0].scale, pools[1].scale)
for left, right in zip(want, got):
    # Sums of 64 products in any order: as many roundings of the products' magnitudes each.
    largest = torch.cat([rows, keys.data.float()]).abs().max()
    products = 64 * rows.abs().max() * largest
    assert (left - right).abs().max() <= 2 * 64 * 2**-24 * products
print(ours)
"""


EVERY_NAME = sorted({name for names in _compat.LOWERING_NAMES.values() for name in names})


@pytest.mark.parametrize(
    "hidden",
    [_compat.LOWERING_NAMES["rows"][:1], _compat.LOWERING_NAMES["attention"][:1], EVERY_NAME],
    ids=["rows", "reads", "a torch that nobody knows"],
)
def test_hidden_names_give_one_warning_and_the_right_bytes(hidden):
    result = subprocess.run(
        [sys.executable, "-c", HIDDEN.format(hidden=hidden)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    (message,) = eval(result.stdout.splitlines()[-1])
    assert hidden[0] in message and "right but slower" in message


def test_this_torch_has_every_name():
    assert {name: _compat.missing_names(name) for name in _compat.LOWERING_NAMES} == {
        name: [] for name in _compat.LOWERING_NAMES
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from fp8kv_inductor.lowerings import register_lowerings

        assert register_lowerings()["rows"] == ("rope", "act_quant", "store")
