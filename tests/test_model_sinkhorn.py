"""The Sinkhorn operator of the hyper-connections."""

import pytest
import torch
from interpreter import DEVICES, launch

from fp8kv_inductor import ops
from fp8kv_inductor.kernels.sinkhorn import sinkhorn as kernel


def sinkhorn(logits, iterations, eps):
    """Rows, then columns, matrix by matrix."""
    result = []
    for matrix in logits:
        comb = torch.stack([row.exp() / row.exp().sum() + eps for row in matrix])
        comb = torch.stack([column / (column.sum() + eps) for column in comb.T]).T
        for _ in range(iterations - 1):
            comb = torch.stack([row / (row.sum() + eps) for row in comb])
            comb = torch.stack([column / (column.sum() + eps) for column in comb.T]).T
        result.append(comb)
    return torch.stack(result)


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_against_fp64(iterations):
    logits = torch.randn(9, 4, 4) * 3
    exact = sinkhorn(logits.double(), iterations, 1e-6)
    bound = 2 * (sinkhorn(logits, iterations, 1e-6) - exact).abs().max()
    assert (ops.sinkhorn(logits, iterations, 1e-6) - exact).abs().max() <= bound


def test_rows_and_columns_sum_to_one():
    comb = ops.sinkhorn(torch.randn(50, 4, 4), 20, 1e-6)
    torch.testing.assert_close(comb.sum(1), torch.ones(50, 4), atol=1e-5, rtol=0)
    torch.testing.assert_close(comb.sum(2), torch.ones(50, 4), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    "logits",
    [torch.randn(3, 4, 4), torch.randn(0, 4, 4), torch.randn(3, 4, 8)[..., ::2]],
    ids=["plain", "empty", "strided"],
)
def test_opcheck(logits):
    torch.library.opcheck(torch.ops.fp8kv.sinkhorn.default, (logits, 20, 1e-6))
    assert torch.equal(ops.sinkhorn(logits, 20, 1e-6), ops.sinkhorn(logits.clone(), 20, 1e-6))


@pytest.mark.parametrize(
    ("logits", "iterations", "error", "message"),
    [
        (torch.randn(4, 4), 20, ValueError, "logits has 2 dimensions"),
        (torch.randn(1, 4, 4).half(), 20, ValueError, "logits has dtype"),
        (torch.randn(1, 4, 3), 20, RuntimeError, "rows and columns"),
        (torch.randn(1, 4, 4), 0, ValueError, "iterations is 0"),
    ],
)
def test_errors(logits, iterations, error, message):
    with pytest.raises(error, match=message):
        ops.sinkhorn(logits, iterations, 1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("n", [1, 33])
def test_kernel(device, n, size):
    logits = (torch.randn(n, 2 * size, size) * 3)[:, ::2]
    exact = sinkhorn(logits.double(), 20, 1e-6)
    bound = 2 * (ops.sinkhorn(logits, 20, 1e-6) - exact).abs().max()
    difference = (launch(device, kernel, logits, 20, 1e-6) - exact).abs().max()
    assert difference <= bound.clamp_min(torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("device", DEVICES)
def test_kernel_of_no_tokens(device):
    assert launch(device, kernel, torch.randn(0, 4, 4), 20, 1e-6).shape == (0, 4, 4)
