"""A store and a read behind it, whatever formats, shapes, strides, slots, counts and sinks.

Rows that nobody reads hold NaN, and every byte of the pools' memory is compared. Results are held
to a bound that counts roundings.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from interpreted_graph import interpreted_graph
from interpreter import relocated, whole_storage
from torch import Tensor

from fp8kv_inductor import get_format, numerics, reference, register, rope

EXAMPLES = int(os.environ.get("FP8KV_EXAMPLES", "0"))
"""Examples per test for a longer run by hand."""

FORMATS = ("fp8_e4m3", "fp8_e4m3_amax", "fp8_e4m3_ue8m0", "bf16")
N_SLOTS, MARGIN = 53, 16
"""Rows of a pool, and of the memory in front of it and behind it."""

LIVE: dict[str, Callable[[Tensor], Tensor]] = {
    "some": lambda column: torch.rand(column.shape) < 0.7,
    "all": lambda column: column >= 0,
    "none": lambda column: column < 0,
    "not the first 32": lambda column: column >= 32,
    "the last": lambda column: column == column.shape[1] - 1,
}
"""Which columns have a slot, by their number."""

COUNTS: dict[str, Callable[[int, int], Tensor | None]] = {
    "some": lambda tokens, width: torch.randint(0, width + 1, (tokens,)),
    "no tensor": lambda tokens, width: None,
    "zero": lambda tokens, width: torch.zeros(tokens, dtype=torch.int64),
    "out of range": lambda tokens, width: torch.randint(-2, 2, (tokens,)) * 100_000,
}


@dataclass(frozen=True)
class Case:
    """One graph and its inputs.

    Attributes:
        stored: rows stored in front of the read.
        one_pool: the window pool is the compressed pool, too.
        strided: queries, tables and pools are views of larger or transposed tensors.
        rotated: an inverse rope follows the read.
        q_exponent, row_exponent: powers of two that queries and rows are multiplied by.
        dynamic: sizes are dynamic.
    """

    fmt: str = "fp8_e4m3"
    dtype: torch.dtype = torch.bfloat16
    tokens: int = 3
    heads: int = 3
    head_dim: int = 64
    columns: int = 75
    n_window: int = 37
    stored: int = 2
    live: str = "some"
    counts: str = "some"
    sink: float | None = None
    index_dtype: torch.dtype = torch.int32
    one_pool: bool = False
    strided: bool = False
    rotated: bool = False
    q_exponent: int = 0
    row_exponent: int = 0
    dynamic: bool | None = None

    def inputs(self) -> dict[str, Any]:
        """Every call gives the same; pools as data and scale."""
        torch.manual_seed(0)
        column = torch.arange(self.columns).expand(self.tokens, -1)
        indices = torch.randint(N_SLOTS, (self.tokens, self.columns))
        indices = torch.where(LIVE[self.live](column), indices, -1).to(self.index_dtype)
        counts = COUNTS[self.counts](self.tokens, self.columns - self.n_window)
        q = torch.randn(self.tokens, self.heads, self.head_dim) * 2.0**self.q_exponent
        angles = torch.rand(self.tokens, self.head_dim // 4) * 2 * math.pi
        sink = torch.randn(self.heads) if self.sink is None else torch.tensor(self.sink)
        inputs = {
            "rows": self.rows(self.stored).to(self.dtype),
            "slots": torch.randperm(N_SLOTS)[: self.stored],
            "q": q.to(self.dtype),
            "indices": indices,
            "counts": counts if counts is None else counts.to(self.index_dtype),
            "sink": sink.expand(self.heads).contiguous(),
            "cos": angles.cos(),
            "sin": angles.sin(),
        }
        inputs["slots"][:1] = -1
        live = self.exists(indices, counts)
        window, cmp = indices[:, : self.n_window], indices[:, self.n_window :]
        used = window[live[:, : self.n_window]], cmp[live[:, self.n_window :]]
        if self.strided:
            inputs |= {
                "q": inputs["q"].transpose(0, 1).contiguous().transpose(0, 1),
                "indices": torch.nn.functional.pad(indices, (3, 2))[:, 3:-2],
                "counts": counts if counts is None else counts.repeat_interleave(2)[::2],
                "rows": torch.nn.functional.pad(inputs["rows"], (32, 0))[:, 32:],
            }
        if self.one_pool:
            inputs["window"] = inputs["cmp"] = self.pool(torch.cat(used))
        else:
            inputs["window"], inputs["cmp"] = map(self.pool, used)
        return inputs

    def rows(self, count: int) -> Tensor:
        exponents = torch.randint(-4, 4, (count, 1)) + self.row_exponent
        return torch.randn(count, self.head_dim) * torch.exp2(exponents.float())

    def pool(self, used: Tensor) -> tuple[Tensor, Tensor]:
        """Rows where ``used`` says, NaN everywhere else in the memory around them."""
        fmt, n = get_format(self.fmt), N_SLOTS + 2 * MARGIN
        parts = []
        for part in numerics.encode_rows(self.rows(N_SLOTS), fmt):
            width = part.shape[1] + (32 if self.strided else 0)
            memory = torch.empty(n, width, dtype=part.dtype)
            memory.view(torch.uint8).fill_(0xFF)
            view = memory[MARGIN:-MARGIN, : part.shape[1]]
            slots = used.unique().long()
            view[slots] = part[slots]
            parts.append(view)
        return tuple(parts)

    def exists(self, indices: Tensor, counts: Tensor | None) -> Tensor:
        """Which columns exist."""
        live, column = indices >= 0, torch.arange(self.columns)
        return (
            live if counts is None else live & (column - self.n_window < counts[:, None].clamp(0))
        )

    def graph(
        self, rows, slots, q, indices, counts, sink, cos, sin, window, cmp
    ) -> tuple[Tensor, Tensor]:
        torch.ops.fp8kv.store(rows, slots, *window, self.fmt)
        pools, scale = (*window, *cmp), self.head_dim**-0.5
        out, lse = torch.ops.fp8kv.sparse_attention(
            q, *pools, indices, counts, sink, self.n_window, scale, self.fmt
        )
        return (rope(out, cos, sin, inverse=True) if self.rotated else out), lse

    def loose_graph(self, inputs: dict[str, Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The graph as a function of tensors alone, and these."""
        names = [name for name in inputs if inputs[name] is not None]

        def graph(*tensors: Any) -> tuple[Tensor, Tensor]:
            return self.graph(**{"counts": None, **dict(zip(names, tensors, strict=True))})

        return graph, tuple(inputs[name] for name in names)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    def pick(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    columns = pick(75, 0, 1, 31, 32, 33, 64, 130)
    return Case(
        fmt=pick(*FORMATS),
        dtype=pick(torch.bfloat16, torch.float16, torch.float32),
        tokens=pick(3, 0, 1, 2),
        heads=pick(3, 1, 16, 20),
        head_dim=pick(64, 32, 96, 160, 512),
        columns=columns,
        n_window=pick(columns // 2, 0, columns),
        stored=pick(2, 0, 1, 5),
        live=pick(*LIVE),
        counts=pick(*COUNTS),
        sink=pick(None, -math.inf, -1e30, 0.0, 80.0, math.inf),
        index_dtype=pick(torch.int32, torch.int64),
        one_pool=pick(False, True),
        strided=pick(False, True),
        rotated=pick(False, True),
        q_exponent=pick(0, -8, 3),
        row_exponent=pick(0, -6, 6),
        dynamic=pick(None, True),
    )


def check(case: Case, run: Callable[..., Any], device: str = "cpu", narrow: bool = False) -> None:
    """What ``run`` makes of the case against eager bytes and the exact read of these bytes.

    Args:
        case: what to try.
        run: from a graph and its tensors to the result.
        device: where the tensors lie.
        narrow: rows and weights may be rounded to bf16 for the tensor cores, if queries are bf16.
    """
    register()
    inputs, want = case.inputs(), case.inputs()
    if device != "cpu":
        inputs = {name: relocated(value, device) for name, value in inputs.items()}
        if case.one_pool:
            inputs["cmp"] = inputs["window"]
    graph, tensors = case.loose_graph(inputs)
    out, lse = (result.cpu() for result in run(graph, tensors))
    torch.ops.fp8kv.store(want["rows"], want["slots"], *want["window"], case.fmt)
    for tier in ("window", "cmp"):
        for ours, eager in zip(inputs[tier], want[tier], strict=True):
            assert torch.equal(whole_storage(ours).cpu(), whole_storage(eager))
    assert out.dtype == case.dtype and out.is_contiguous() and lse.dtype == torch.float32
    check_read(case, want, out.double(), lse.double(), narrow and case.dtype == torch.bfloat16)


def check_read(case: Case, inputs: dict[str, Any], out: Tensor, lse: Tensor, narrow: bool) -> None:
    """A bound on what roundings do to the exact result.

    A score is a sum of D products, times two factors (softmax_scale, log2 e): D + 4 roundings of
    what its terms' magnitudes sum to. Its exponential is off by as much, the maximum's by as much
    again; of the maximum, which may be the sink, 4 roundings are counted. exp, the sum over K
    columns, the sink and the quotient add K + 8. All of that multiplies the weighted magnitudes of
    the rows; weights below fp32's normal numbers may be zero. Narrow rows and weights each are off
    by half an ulp of bf16. The result is rounded once, and once more if it is rotated.
    """
    fmt, scale = get_format(case.fmt), case.head_dim**-0.5
    tables = inputs["indices"], inputs["counts"]
    arguments = inputs["q"], *inputs["window"], *inputs["cmp"], *tables, inputs["sink"]
    want, want_lse = reference.sparse_attention(*arguments, case.n_window, scale, case.fmt)
    live, in_window = case.exists(*tables), torch.arange(case.columns) < case.n_window
    window, cmp = (numerics.decode_rows(*inputs[tier], fmt).double() for tier in ("window", "cmp"))
    slots = inputs["indices"].long().clamp(0)
    rows = torch.where(in_window[:, None], window[slots], cmp[slots])
    rows = rows.masked_fill(~live.unsqueeze(-1), 0.0)

    unit, half_bf16 = 2.0**-24, 2.0**-9 if narrow else 0.0
    q, magnitudes = inputs["q"].double(), rows.abs()
    scores = torch.einsum("thd,tkd->thk", q, rows) * scale
    terms = torch.einsum("thd,tkd->thk", q.abs(), magnitudes) * scale
    per_score = (case.head_dim + 4) * unit + half_bf16
    score_error = torch.cat([terms, terms.new_zeros(*terms.shape[:2], 1)], -1).amax(-1) * per_score
    top = torch.maximum(want_lse, inputs["sink"].double()).abs()
    weight_error = 2 * score_error + (case.columns + 8) * unit + 2 * half_bf16
    there = want_lse > -math.inf
    weight_error += 4 * unit * torch.where(there & top.isfinite(), top, 0.0)
    sink = inputs["sink"].double().expand(case.tokens, -1).unsqueeze(-1)
    scores = torch.cat([scores.masked_fill(~live.unsqueeze(1), -math.inf), sink], -1)
    weights = scores.softmax(-1)[..., :-1].nan_to_num(0.0)

    eps, normal = torch.finfo(case.dtype).eps, torch.finfo(case.dtype).smallest_normal
    bound = torch.einsum("thk,tkd->thd", weights, magnitudes) * weight_error.expm1().unsqueeze(-1)
    bound += magnitudes.sum(1).unsqueeze(1) * torch.finfo(torch.float32).smallest_normal
    bound += (want.abs() + bound) * eps / 2 + normal * eps
    if case.rotated:
        want = reference.rope(want, inputs["cos"], inputs["sin"], inverse=True)
        tail = bound[..., -2 * inputs["cos"].shape[1] :].unflatten(-1, (-1, 2))
        tail[:] = tail.sum(-1, keepdim=True)
        bound += (want.abs() + bound) * eps / 2 + normal * eps
    assert out.isfinite().all()
    assert ((out - want).abs() <= bound).all()
    assert torch.equal(lse > -math.inf, there)
    assert ((lse - want_lse).abs() <= weight_error + 8 * unit * want_lse.abs())[there].all()


def examples(number):
    return settings(max_examples=EXAMPLES or number, suppress_health_check=list(HealthCheck))


def compiled(case):
    def run(graph, tensors):
        torch._dynamo.reset()
        return torch.compile(graph, fullgraph=True, dynamic=case.dynamic)(*tensors)

    return run


@examples(60)
@given(cases())
def test_eager(case):
    check(case, lambda graph, tensors: graph(*tensors))


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "slots": lambda slots: slots.flip(0),
    "indices": lambda indices: indices.where(torch.arange(indices.shape[1]) != 1, -1),
    "q": lambda q: q * 1.01,
    "sink": lambda sink: sink + 0.01,
}


@pytest.mark.parametrize("tensor", WRONG)
def test_a_wrong_read_would_be_seen(tensor):
    """Positive control: another slot, one column less, a query or a sink that is a little off."""
    case = Case(dtype=torch.float32, live="all")
    at = list(case.inputs()).index(tensor)

    def run(graph, tensors):
        return graph(*tensors[:at], WRONG[tensor](tensors[at]), *tensors[at + 1 :])

    with pytest.raises(AssertionError):
        check(case, run)


@examples(2)
@given(cases())
@example(Case(sink=math.inf, live="not the first 32", dynamic=True, rotated=True))
def test_cpp_backend(case):
    check(case, compiled(case))


@examples(10)
@given(cases())
@example(Case(tokens=0))
@example(Case(columns=0, n_window=0))
@example(Case(strided=True, rotated=True, one_pool=True))
def test_cuda_code_in_the_interpreter(case):
    def run(graph, tensors):
        return interpreted_graph(graph, tensors, case.dynamic)

    check(case, run, narrow=True)


@pytest.mark.gpu
@examples(40)
@given(cases())
def test_on_a_gpu(case):
    check(case, lambda graph, tensors: graph(*tensors), "cuda", narrow=True)
    check(case, compiled(case), "cuda", narrow=True)
