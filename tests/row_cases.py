"""Graphs around rope, act_quant and store: shapes, strides, dtypes, dynamic sizes, neighbours.

Whatever stands around the operators is exact (powers of two, maxima, copies), so that every byte is
defined. The one exception is an rms_norm in front, whose result the graph returns, too.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from interpreter import relocated, whole_storage
from nasty import BF16_SPECIALS, pool_bytes, same
from torch import Tensor

from fp8kv_inductor import FORMATS, Pool, act_quant, rope, store

N_SLOTS = 307
MARGIN = 320
"""Rows of memory in front of a pool and behind it; a multiple that keeps the pool aligned."""

CHAINS = (
    ("rope",),
    ("act_quant",),
    ("store",),
    ("rope", "act_quant"),
    ("act_quant", "store"),
    ("rope", "act_quant", "store"),
)


def rms_norm(x: Tensor) -> Tensor:
    rows = x.float()
    return (rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def largest(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    return x.float().abs().amax(dim, keepdim)


def scaled_by_row(x: Tensor) -> Tensor:
    """Like a norm a product with a reduction over the row, but exact."""
    return x * torch.where(largest(x, -1, keepdim=True) > 1.0, 0.5, 2.0).to(x.dtype)


FRONTS: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda x: x,
    "product": lambda x: x * 2,
    "row reduction": scaled_by_row,
    "rms_norm": rms_norm,
}
"""What the operators read, from `x`."""


def doubled(x: Tensor) -> Tensor:
    return (x * 2).contiguous()


BEHINDS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "nothing": lambda x, row: row,
    "product": lambda x, row: row * 2,
    "row reduction": lambda x, row: scaled_by_row(row),
    "transposed consumer": lambda x, row: doubled(row.transpose(0, -1)),
    "transposed second consumer": lambda x, row: (row, doubled(row.transpose(0, -1))),
    "transposed neighbour": lambda x, row: (row, doubled(x.transpose(0, -1))),
    "reduction over tokens": lambda x, row: (row, largest(row, 0)),
    "neighbour's reduction over tokens": lambda x, row: (row, largest(x, 0)),
    "reduction over parts of rows": lambda x, row: largest(row.unflatten(-1, (-1, 16)), -1),
    "neighbour's reduction over parts": lambda x, row: (row, largest(x.unflatten(-1, (-1, 8)), -1)),
    "second output": lambda x, row: (row, x * 2),
    "cat of columns": lambda x, row: torch.cat([row, x], -1),
    "cat of tokens": lambda x, row: torch.cat([x, row], 0),
    "split": lambda x, row: tuple(part * 2 for part in row.chunk(2, -1)),
    "every second column": lambda x, row: row[..., ::2] * 2,
    "columns backwards": lambda x, row: row.flip(-1) * 2,
    "regrouped columns": lambda x, row: doubled(row.unflatten(-1, (-1, 16)).transpose(-1, -2)),
    "neighbour alone": lambda x, row: x * 2,
    "neighbour of other rows": lambda x, row: (row, x.reshape(-1, x.shape[-1] // 2) * 2),
}
"""What the graph returns, from `x` and the operators' rows."""

LAYOUTS: dict[str, Callable[..., Tensor]] = {
    "contiguous": lambda make, tokens, *rest: make(tokens, *rest),
    "slice": lambda make, *shape: make(*shape[:-1], shape[-1] + 32)[..., 32:],
    "transposed": lambda make, *shape: make(shape[-1], *shape[1:-1], shape[0]).transpose(0, -1),
    "every second row": lambda make, tokens, *rest: make(2 * tokens, *rest)[::2],
    "every second column": lambda make, *shape: make(*shape[:-1], 2 * shape[-1])[..., ::2],
    "expanded tokens": lambda make, tokens, *rest: make(1, *rest).expand(tokens, *rest),
    "expanded columns": lambda make, *shape: make(*shape[:-1], 1).expand(shape),
}
"""Strides of `x`, from a function that makes contiguous rows of a shape."""


def looked_up(table: Tensor) -> Tensor:
    return table[torch.arange(table.shape[0], device=table.device) // 2]


INDICES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "given": (lambda slots: slots, lambda table: table),
    "computed": (lambda slots: torch.where(slots < 7, slots - N_SLOTS, slots - 1), torch.neg),
    "looked up": (lambda slots: slots.flip(0), looked_up),
}
"""What the graph makes of slots, and of cos and sin."""

SIZES = ("static", "dynamic tokens", "dynamic")


@dataclass(frozen=True)
class Case:
    """One graph: ``front``, the operators of ``chain``, ``behind``.

    Attributes:
        heads: 0 for rows `[T, D]`.
        block, blocks: of ``act_quant``.
        pairs: of ``rope``.
        sizes: what is dynamic.
    """

    chain: tuple[str, ...]
    front: str = "nothing"
    behind: str = "nothing"
    layout: str = "contiguous"
    dtype: torch.dtype = torch.bfloat16
    tokens: int = 5
    heads: int = 0
    width: int = 128
    block: int = 64
    blocks: int = 1
    pairs: int = 16
    inverse: bool = False
    fmt: str = "fp8_e4m3"
    indices: str = "given"
    slot_dtype: torch.dtype = torch.int64
    sizes: str = "static"

    def inputs(self, device: str = "cpu") -> tuple[Any, ...]:
        """`x, cos, sin, slots, pool`; every call gives the same."""
        torch.manual_seed(0)
        lead = (self.tokens, self.heads) if self.heads else (self.tokens,)
        x = LAYOUTS[self.layout](lambda *shape: nasty(shape, self.dtype), *lead, self.width)
        theta = torch.rand(self.tokens, self.pairs) * 2 * math.pi
        slots = torch.randperm(N_SLOTS)[: math.prod(lead)].view(lead).to(self.slot_dtype)
        slots.view(-1)[1::3] = -1
        tensors = relocated((x, theta.cos(), theta.sin(), slots), device)
        if self.sizes == "dynamic tokens" and self.tokens > 1:
            for tensor in tensors:
                torch._dynamo.mark_dynamic(tensor, 0)
        return *tensors, pool_between_margins(N_SLOTS, self.width, self.fmt, device)

    @property
    def dynamic(self) -> bool | None:
        """The argument of torch.compile."""
        return True if self.sizes == "dynamic" else None

    def graph(self, x: Tensor, *rest: Any) -> tuple[Tensor | None, Any]:
        """The result of an rms_norm in front, and that of the whole graph."""
        front = FRONTS[self.front](x)
        result = BEHINDS[self.behind](x, self.rows(front, *rest))
        return front if self.front == "rms_norm" else None, result

    def expected(self, normed: Tensor | None, x: Tensor, *rest: Any) -> Any:
        """The result in eager mode, behind the given result of an rms_norm."""
        front = FRONTS[self.front](x) if normed is None else normed
        return BEHINDS[self.behind](x, self.rows(front, *rest))

    def rows(self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, pool: Pool) -> Tensor:
        of_slots, of_angles = INDICES[self.indices]
        slots, cos, sin = of_slots(slots), of_angles(cos), of_angles(sin)
        for op in self.chain:
            if op == "rope":
                x = rope(x, cos, sin, self.inverse)
            elif op == "act_quant":
                x = act_quant(x, self.blocks * self.block, self.block)
            else:
                store(x.flatten(0, -2), slots.flatten(), pool)
        return x


def pool_between_margins(n_slots: int, width: int, fmt: str, device: str = "cpu") -> Pool:
    """Rows of zeros in the middle of a larger pool."""
    memory = Pool.empty(MARGIN + n_slots + MARGIN, width, fmt, device)
    data, scale = (part[MARGIN : MARGIN + n_slots] for part in (memory.data, memory.scale))
    return Pool(data, scale, memory.format)


def margins_are_empty(pool: Pool) -> bool:
    """Whether nothing but rows of a :func:`pool_between_margins` was written."""
    return all(
        whole_storage(part).count_nonzero() == part.flatten().view(torch.uint8).count_nonzero()
        for part in (pool.data, pool.scale)
    )


def nasty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Values of many scales; zero, infinite and NaN ones between them; the last row is zeros."""
    values = torch.randn(shape) * torch.exp2(torch.randint(-12, 8, (*shape[:-1], 1)).float())
    if shape[0] > 1:
        values[-1] *= 0.0
    where = torch.randint(values.numel(), (len(BF16_SPECIALS),))
    values.view(-1)[where] = torch.tensor(BF16_SPECIALS)
    return values.to(dtype)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    def pick(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    width = pick(128, 32, 64, 96, 160, 192, 224, 256, 512)
    block = pick(*(size for size in (64, 16, 32, 128) if size <= width))
    tokens = pick(5, 1, 2, 32)
    return Case(
        chain=pick(*CHAINS),
        front=pick(*FRONTS),
        behind=pick(*BEHINDS),
        layout=pick(*LAYOUTS),
        dtype=pick(torch.bfloat16, torch.float16, torch.float32),
        tokens=tokens,
        heads=pick(0, 3) if tokens < 32 else 0,
        width=width,
        block=block,
        blocks=draw(st.integers(1, width // block)),
        pairs=draw(st.integers(1, width // 2)),
        inverse=pick(False, True),
        fmt=pick(*FORMATS),
        indices=pick(*INDICES),
        slot_dtype=pick(torch.int64, torch.int32),
        sizes=pick(*SIZES),
    )


def check_bytes(
    case: Case, run: Callable[[Callable[..., Any], tuple[Any, ...]], Any], device: str = "cpu"
) -> None:
    """What ``run`` makes of a graph and its inputs equals eager mode on the CPU."""
    inputs, eager_inputs = case.inputs(device), case.inputs()
    normed, *got = relocated(flattened(run(case.graph, inputs)), "cpu")
    want = flattened(case.expected(normed, *eager_inputs))
    assert all(map(same, got, want)) and len(got) == len(want)
    assert margins_are_empty(inputs[-1])
    pools = copy.deepcopy(inputs[-1]).cpu(), eager_inputs[-1]
    assert all(map(torch.equal, *map(pool_bytes, pools)))


def flattened(result: Any) -> tuple[Any, ...]:
    """The leaves of nested tuples."""
    return sum(map(flattened, result), ()) if isinstance(result, tuple) else (result,)
