"""Pools of KV rows as module buffers.

Buffers, not arguments: torch.compile then treats them as static addresses, so a captured CUDA
graph writes into them in place.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fp8kv_inductor.budget import PoolPlan
from fp8kv_inductor.config import check_device
from fp8kv_inductor.formats import RowFormat, get_format
from fp8kv_inductor.registration import register


class Pool(nn.Module):
    """`[N, D]` rows of one format.

    Attributes:
        data: `[N, D]` in ``format.code_dtype``.
        scale: `[N, D / block]` in ``format.scale_dtype``; `[N, 0]` for formats without scales.
        format: the row format.
    """

    data: Tensor
    scale: Tensor

    def __init__(self, data: Tensor, scale: Tensor, format: RowFormat) -> None:
        """Wrap existing tensors, strided views included; nothing is copied.

        Raises:
            ConfigError: rows of that format cannot be had on that device.
            ValueError: the tensors are not rows of that format.
        """
        super().__init__()
        expected = (data.shape[0], format.scales_per_row(data.shape[1]))
        if data.dtype != format.code_dtype or (
            format.quantized and (scale.dtype != format.scale_dtype or scale.shape != expected)
        ):
            raise ValueError(
                f"pool of {data.dtype} {tuple(data.shape)} with scales {scale.dtype} "
                f"{tuple(scale.shape)}; format {format.name!r} needs {format.code_dtype} data "
                f"and {format.scale_dtype} scales {expected}"
            )
        check_device(format, data.device, f"format {format.name!r}")
        register()
        self.register_buffer("data", data, persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self.format = format

    @classmethod
    def empty(
        cls,
        n_slots: int,
        head_dim: int,
        format: RowFormat | str,
        device: torch.device | str = "cpu",
    ) -> Pool:
        """A new pool of ``n_slots`` zero rows of ``head_dim`` elements."""
        row_format = get_format(format) if isinstance(format, str) else format
        data = torch.zeros(n_slots, head_dim, dtype=row_format.code_dtype, device=device)
        scales = row_format.scales_per_row(head_dim)
        scale = torch.zeros(n_slots, scales, dtype=row_format.scale_dtype, device=device)
        return cls(data, scale, row_format)

    @property
    def n_slots(self) -> int:
        """Number of rows."""
        return self.data.shape[0]

    def nbytes(self) -> int:
        """Bytes that the rows and their scales take."""
        return self.data.nbytes + self.scale.nbytes


class LayerPools(nn.Module):
    """The pools of one layer; tiers that its compress ratio does not have are None."""

    window: Pool
    cmp: Pool | None
    state: Pool | None
    idx: Pool | None
    idx_state: Pool | None

    def __init__(self, pools: dict[str, Pool]) -> None:
        super().__init__()
        for tier in ("window", "cmp", "state", "idx", "idx_state"):
            self.register_module(tier, pools.get(tier))


class KVPools(nn.Module):
    """All pools of a model, one :class:`LayerPools` per layer, allocated from a plan."""

    def __init__(self, plan: PoolPlan) -> None:
        super().__init__()
        self.plan = plan
        tiers: list[dict[str, Pool]] = [{} for _ in plan.cache.model.compress_ratios]
        for shape in plan.shapes:
            tiers[shape.layer][shape.tier] = Pool.empty(
                shape.n_slots, shape.width, shape.row_format, plan.cache.device
            )
        self.layers = nn.ModuleList(LayerPools(pools) for pools in tiers)

    def nbytes(self) -> int:
        """Bytes that the pools take; equal to ``plan.nbytes``."""
        return sum(pool.nbytes() for pool in self.modules() if isinstance(pool, Pool))
