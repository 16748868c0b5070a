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

from fp8kv_inductor import Pool, act_quant, register, store
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    pools = [Pool.empty(8, 64, "fp8_e4m3") for _ in range(2)]
    register()
ours = [str(w.message) for w in caught if "fp8kv_inductor" in str(w.message)]

def step(rows, slots, pool):
    store(act_quant(rows, 64), slots, pool)

rows, slots = torch.randn(3, 64), torch.tensor([1, -1, 2])
step(rows, slots, pools[0])
torch.compile(step, fullgraph=True)(rows, slots, pools[1])
assert torch.equal(pools[0].data, pools[1].data) and torch.equal(pools[0].scale, pools[1].scale)
print(ours)
"""


@pytest.mark.parametrize("lowering", ["rows", "attention"])
def test_a_hidden_name_gives_one_warning_and_the_right_bytes(lowering):
    hidden = _compat.LOWERING_NAMES[lowering][:1]
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
