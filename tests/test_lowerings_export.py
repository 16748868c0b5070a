"""torch.export and AOTInductor: dynamic numbers of tokens and slots, the pool written in place."""

import contextlib
import subprocess
import sys

import pytest
import torch
from interpreter import DEVICES
from nasty import HEAD_DIM
from torch.export import Dim

from fp8kv_inductor import act_quant, reference, register, rope
from fp8kv_inductor.chains import MODEL, angles
from fp8kv_inductor.demo import CPU_OPTIONS
from fp8kv_inductor.formats import get_format

FMT = get_format("fp8_e4m3")
HEADS, COLUMNS, WINDOW = 4, 40, 16


class Step(torch.nn.Module):
    """A row is stored, then the pool that it lies in is read; pools are arguments."""

    def forward(self, row, cos, sin, slots, data, scale, q, indices, counts, sink):
        row = act_quant(rope(row, cos, sin), MODEL.nope_head_dim)
        torch.ops.fp8kv.store(row, slots, data, scale, FMT.name)
        pools, width = (data, scale, data, scale), (WINDOW, HEAD_DIM**-0.5)
        return torch.ops.fp8kv.sparse_attention(q, *pools, indices, counts, sink, *width, FMT.name)


def step_inputs(tokens, n_slots, device="cpu"):
    slots = torch.randperm(n_slots)[:tokens]
    slots[1:2] = -1
    tensors = (
        torch.randn(tokens, HEAD_DIM).bfloat16(),
        *angles(tokens),
        slots,
        torch.randint(0x70, (n_slots, HEAD_DIM), dtype=torch.uint8),
        torch.rand(n_slots, FMT.scales_per_row(HEAD_DIM)).to(FMT.scale_dtype),
        torch.randn(tokens, HEADS, HEAD_DIM).bfloat16(),
        torch.randint(-1, n_slots, (tokens, COLUMNS), dtype=torch.int32),
        torch.randint(COLUMNS, (tokens,), dtype=torch.int32),
        torch.randn(HEADS),
    )
    return tuple(tensor.to(device) for tensor in tensors)


def exported(device="cpu"):
    register()
    tokens, n_slots = {0: Dim("tokens", max=4096)}, {0: Dim("n_slots", max=1 << 23)}
    dynamic = (*[tokens] * 4, n_slots, n_slots, *[tokens] * 3, None)
    return torch.export.export(Step(), step_inputs(5, 97, device), dynamic_shapes=dynamic)


def check(step, tokens, n_slots, device="cpu"):
    """The bytes of eager mode on the CPU, and a read of them within twice a bf16 read's error."""
    args = step_inputs(tokens, n_slots)
    there = tuple(tensor.clone().to(device) for tensor in args)
    out, lse = (result.cpu().double() for result in step(*there))
    Step()(*args)
    *_, data, scale, q, indices, counts, sink = args
    assert torch.equal(there[4].cpu(), data) and torch.equal(there[5].cpu(), scale)
    pools, width = (data, scale, data, scale), (WINDOW, HEAD_DIM**-0.5)

    def oracle(dtype):
        return reference.sparse_attention(
            q, *pools, indices, counts, sink, *width, FMT.name, dtype=dtype
        )

    (want, want_lse), (low, low_lse) = oracle(torch.float64), oracle(torch.bfloat16)
    assert (out - want).norm() <= 2 * (low.double() - want).norm()
    assert (lse - want_lse).norm() <= 2 * (low_lse.double() - want_lse).norm()


SIZES = [(5, 97), (2, 50), (64, 1000)]


def test_exported_programs_survive_a_file(tmp_path):
    torch.export.save(exported(), tmp_path / "step.pt2")
    step = torch.export.load(tmp_path / "step.pt2").module()
    for tokens, n_slots in SIZES:
        check(step, tokens, n_slots)


PLAIN_PACKAGE = """
import sys, torch
from torch.export import export
class Double(torch.nn.Module):
    def forward(self, x):
        return 2 * x
package = torch._inductor.aoti_compile_and_package(
    export(Double(), (torch.ones(2, device="cuda"),)), package_path=sys.argv[1]
)
torch._inductor.aoti_load_package(package)
"""


@pytest.mark.parametrize("device", DEVICES)
def test_ahead_of_time_package(device, tmp_path):
    if device == "cuda":
        # In another process, which may crash: packages of some builds do.
        command = [sys.executable, "-c", PLAIN_PACKAGE, str(tmp_path / "plain.pt2")]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("this torch cannot load any CUDA package of AOTInductor, without us either")
    options = {"aot_inductor.compile_wrapper_opt_level": "O0"}
    if device == "cpu":
        options |= CPU_OPTIONS
    package = torch._inductor.aoti_compile_and_package(
        exported(device), package_path=str(tmp_path / "step.pt2"), inductor_configs=options
    )
    step = torch._inductor.aoti_load_package(package)
    for tokens, n_slots in SIZES:
        check(step, tokens, n_slots, device)
    if device == "cpu":
        args = step_inputs(5, 97)
        args[3][0] = 97
        before = args[4].clone()
        # AOTInductor of torch 2.11 and 2.12 prints an operator's error and goes on.
        raises = pytest.raises(RuntimeError, match="slot 97 is beyond the pool of 97 slots")
        with contextlib.nullcontext() if torch.__version__ < "2.13" else raises:
            step(*args)
        assert torch.equal(args[4], before)
