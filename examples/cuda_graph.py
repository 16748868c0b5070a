"""A decode layer in a CUDA graph: captured once, replayed on other tokens, slots and counts.

python examples/cuda_graph.py              # needs a GPU of compute capability 8.9 or newer
python examples/cuda_graph.py --device cpu # the same steps without the capture
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from fp8kv_inductor import Pool, rope, sparse_attention, store

BATCH, HEADS, HEAD_DIM, ROPE_DIM, WINDOW, ROWS = 4, 16, 128, 64, 128, 256


def captured(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """``step`` as a graph. What it returns is overwritten by the next replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # Compile and load before the capture, never inside it.
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


@torch.no_grad()
def main(device: str) -> None:
    torch.manual_seed(0)
    window = Pool.empty(BATCH * WINDOW, HEAD_DIM, "fp8_e4m3", device)
    cmp = Pool.empty(ROWS, HEAD_DIM, "fp8_e4m3", device)
    # Everything that changes between replays lives at a fixed address.
    q = torch.zeros(BATCH, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
    row = torch.zeros(BATCH, HEAD_DIM, dtype=torch.bfloat16, device=device)
    positions = torch.full((BATCH,), -1, device=device)
    counts = torch.zeros(BATCH, dtype=torch.int64, device=device)
    picks = torch.arange(ROWS, device=device).expand(BATCH, ROWS)
    sink = torch.zeros(HEADS, device=device)
    first = torch.arange(BATCH, device=device) * WINDOW

    def layer() -> Tensor:
        frequency = 1e4 ** -torch.linspace(0, 1, ROPE_DIM // 2, device=device)
        cos, sin = (positions[:, None] * frequency).cos(), (positions[:, None] * frequency).sin()
        live = positions >= 0
        store(rope(row, cos, sin), torch.where(live, first + positions % WINDOW, -1), window)
        column = torch.arange(WINDOW, device=device)
        slots = torch.where(column <= positions[:, None], first[:, None] + column, -1)
        indices = torch.cat([slots, picks], 1)
        out, _ = sparse_attention(
            rope(q, cos, sin), window, cmp, indices, counts, sink, WINDOW, HEAD_DIM**-0.5
        )
        return rope(out, cos, sin, inverse=True)

    compiled = torch.compile(layer, fullgraph=True)
    step = captured(compiled) if device == "cuda" else compiled
    step()  # Captured with nothing alive: no row is stored, no column exists.
    store(torch.randn(ROWS, HEAD_DIM, device=device), torch.arange(ROWS, device=device), cmp)
    for position in range(8):
        positions.fill_(position)
        counts.fill_(position * 4)
        q.copy_(torch.randn(q.shape))
        row.copy_(torch.randn(row.shape))
        found = step().clone()
        torch.testing.assert_close(found, layer())
    print(f"8 steps on {device}: each equals the eager layer; last norm {found.norm():.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("found no GPU; --device cpu runs the same steps without the capture")
    main(arguments.device)
