"""A model of your own on fp8 rows: one attention layer, compiled into one graph.

python examples/compile_your_model.py
"""

import torch
from torch import Tensor, nn

from fp8kv_inductor import Pool, act_quant, rope, sparse_attention, store

DIM, HEADS, HEAD_DIM, ROPE_DIM, WINDOW = 256, 8, 128, 64, 64


class Layer(nn.Module):
    """Multi-query attention over the last ``WINDOW`` tokens; a row is both K and V."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(DIM, HEADS * HEAD_DIM, bias=False)
        self.kv = nn.Linear(DIM, HEAD_DIM, bias=False)
        self.norm = nn.RMSNorm(HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)
        self.sink = nn.Parameter(torch.zeros(HEADS))
        self.pool = Pool.empty(WINDOW, HEAD_DIM, "fp8_e4m3")  # Buffers: updated in place.

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Attend from `x` `[T, DIM]` at `positions` `[T]`."""
        angle = positions[:, None] * 1e4 ** -torch.linspace(0, 1, ROPE_DIM // 2)
        cos, sin = angle.cos(), angle.sin()
        q = rope(self.q(x).unflatten(-1, (HEADS, HEAD_DIM)), cos, sin)
        row = act_quant(rope(self.norm(self.kv(x)), cos, sin), HEAD_DIM - ROPE_DIM)
        store(row, positions % WINDOW, self.pool)
        age = (positions[:, None] - torch.arange(WINDOW)) % WINDOW
        slots = torch.where(age <= positions[:, None], torch.arange(WINDOW), -1)
        scale = HEAD_DIM**-0.5
        pool = self.pool
        out, _ = sparse_attention(q, pool, pool, slots, None, self.sink, WINDOW, scale)
        return self.out(rope(out, cos, sin, inverse=True).flatten(1))


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    layer = Layer()
    step = torch.compile(layer, fullgraph=True)
    for position in range(100):
        y = step(torch.randn(1, DIM), torch.tensor([position]))
    print(f"100 tokens, {layer.pool.nbytes()} bytes of rows, output of norm {y.norm():.3f}")


if __name__ == "__main__":
    main()
