"""Angles of the rotary embedding, from positions on the device.

Layers without a compressor turn by ``rope_theta``. Layers with one, and their compressed rows, turn
by ``compress_rope_theta`` with YaRN's frequencies (https://arxiv.org/abs/2309.00071, section 3.2),
but without its attention factor.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fp8kv_inductor.model_config import ModelConfig


class Rope(NamedTuple):
    """cos and sin of the angles of some positions, `[T, R / 2]` fp32 each."""

    cos: Tensor
    sin: Tensor


def inverse_frequencies(model: ModelConfig, compressed: bool) -> Tensor:
    """Radians per position of each feature pair, `[R / 2]` fp32.

    YaRN slows pairs that turn fewer than ``beta_slow`` times over the original length by the full
    factor, leaves pairs that turn more than ``beta_fast`` times alone, and blends in between.
    """
    dim = model.rope_head_dim
    theta = model.compress_rope_theta if compressed else model.rope_theta
    pair = torch.arange(0, dim, 2, dtype=torch.float32)
    frequency = 1.0 / theta ** (pair / dim)
    if not compressed or model.rope_factor == 1.0:
        return frequency

    def pair_that_turns(times: float) -> float:
        wavelength = model.original_seq_len / (times * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(model.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(model.beta_slow)), dim - 1)
    slowed = ((pair / 2 - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequency / model.rope_factor * slowed + frequency * (1 - slowed)


class Rotary(nn.Module):
    """The frequencies of both kinds of layers."""

    window_frequency: Tensor
    compressed_frequency: Tensor

    def __init__(self, model: ModelConfig, device: torch.device | None = None) -> None:
        super().__init__()
        for name, compressed in (("window_frequency", False), ("compressed_frequency", True)):
            frequency = inverse_frequencies(model, compressed).to(device)
            self.register_buffer(name, frequency, persistent=False)

    def forward(self, positions: Tensor, compressed: bool) -> Rope:
        """Angles at ``positions`` `[T]`, for layers with a compressor if ``compressed``."""
        frequency = self.compressed_frequency if compressed else self.window_frequency
        angle = positions.to(torch.float32).unsqueeze(1) * frequency
        return Rope(angle.cos(), angle.sin())
