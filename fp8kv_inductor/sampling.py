"""Picking the next token of each request, on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sample(
    logits: Tensor,
    temperatures: Sequence[float],
    generators: Sequence[torch.Generator | None],
) -> Tensor:
    """One token per row: greedy at temperature 0, else drawn from ``softmax(logits / t)``.

    A draw is an exponential race, ``argmax(p / e)`` with ``e`` exponential noise, taken in log
    space. Each row draws from its own generator, so a request's tokens do not depend on its
    neighbours in the batch.

    Args:
        logits: `[S, V]` fp32.
        temperatures: S values, 0 or more.
        generators: S generators on the device of ``logits``; None for greedy rows.

    Returns:
        `[S]` int64.
    """
    drawn = [row for row, temperature in enumerate(temperatures) if temperature > 0]
    if not drawn:
        return logits.argmax(-1)
    noise = torch.ones_like(logits)
    for row in drawn:
        noise[row].exponential_(generator=generators[row])
    divisors = logits.new_tensor([t if t > 0 else 1.0 for t in temperatures])
    return (logits / divisors.unsqueeze(1) - noise.log()).argmax(-1)
