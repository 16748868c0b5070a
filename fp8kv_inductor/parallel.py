"""Tensor parallel: each rank has some heads, output groups and expert columns, and all KV rows.

A KV row is one latent that all heads read, so every rank computes and stores the same rows. The
partial outputs of a layer's attention are summed by one all-reduce, those of its experts, routed
and shared, by another.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fp8kv_inductor.config import ConfigError
from fp8kv_inductor.model_config import ModelConfig

DIVIDED_SIZES = ("n_heads", "o_groups", "moe_inter_dim", "vocab_size")
"""Sizes of a model that are divided among the ranks."""


@dataclass(frozen=True)
class Parallel:
    """One rank's place among those that run a model together.

    Collectives are written in torch's public in-place form on new tensors. Dynamo turns them into
    functional ones, so they are nodes of the compiled graph.

    Attributes:
        rank: 0 to ``world_size - 1``.
        world_size: ranks; with 1, nothing is divided and no process group is needed.
        group: their process group, None for the default one.
        sum_dtype: of the parts of a sum and of the sum, which is then rounded once, as one process
            does; None for the dtype of the weights.
    """

    rank: int = 0
    world_size: int = 1
    group: dist.ProcessGroup | None = None
    sum_dtype: torch.dtype | None = None

    def check(self, model: ModelConfig) -> None:
        """Raise ConfigError if the ranks cannot have equal parts of the model."""
        sizes = {name: getattr(model, name) for name in DIVIDED_SIZES}
        uneven = [f"{name}={n}" for name, n in sizes.items() if n % self.world_size]
        if uneven:
            fitting = [
                world_size
                for world_size in range(1, self.world_size)
                if not any(n % world_size for n in sizes.values())
            ]
            raise ConfigError(
                f"found world size {self.world_size} and {', '.join(uneven)} in {model.name!r}; "
                "needed: a world size that divides them; use "
                f"{' or '.join(map(str, fitting))}"
            )

    def share(self, size: int) -> int:
        """This rank's part of ``size`` heads, groups or columns."""
        return size // self.world_size

    def shard(self, weight: Tensor, axis: int) -> Tensor:
        """This rank's part of a whole weight along ``axis``, as a view."""
        return weight.tensor_split(self.world_size, axis)[self.rank]

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of the ranks' ``x``, any shape and dtype, with the same bits on every rank."""
        if self.world_size == 1:
            return x
        total = x.clone()
        dist.all_reduce(total, group=self.group)
        return total

    def all_gather(self, x: Tensor) -> Tensor:
        """`[..., N]` of each rank, joined in order of rank: `[..., world_size * N]`."""
        if self.world_size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.world_size)]
        dist.all_gather(parts, x, group=self.group)
        return torch.cat(parts, -1)


SINGLE = Parallel()
"""One process that has the whole model."""


@contextmanager
def from_environment(device: str | None = None) -> Iterator[Parallel]:
    """The place that ``torchrun`` gives this process; world size 1 and no group without it.

    Ranks on CUDA talk through NCCL, and the GPU of index ``LOCAL_RANK`` becomes the current device,
    which plain ``"cuda"`` means from then on. Ranks on the CPU talk through gloo. Sums are fp32 on
    CUDA, if there are several ranks. On the CPU they are fp64, also of a single process: the order
    of such a sum does not show in bf16, so any number of ranks gives the same tokens.

    Args:
        device: "cuda", "cpu", or None for CUDA if there is one.

    Raises:
        ConfigError: there are fewer GPUs than ranks on this machine.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    on_cuda = device == "cuda" or (device is None and torch.cuda.is_available())
    if world_size == 1:
        yield SINGLE if on_cuda else Parallel(sum_dtype=torch.float64)
        return
    if on_cuda:
        dist.init_process_group("nccl", device_id=_own_gpu())
    else:
        dist.init_process_group("gloo")
    sum_dtype = torch.float32 if on_cuda else torch.float64
    yield Parallel(dist.get_rank(), world_size, dist.group.WORLD, sum_dtype)
    # Not after an error: the others may wait for this rank in a collective. It leaves, and torchrun
    # ends them.
    dist.destroy_process_group()


def _own_gpu() -> torch.device:
    """Make the GPU of this process the current device."""
    local_rank, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local_rank >= gpus:
        raise ConfigError(
            f"found {gpus} GPUs; rank {local_rank} of this machine needs one of its own; start at "
            f"most {gpus} processes per machine, or use the CPU"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
