"""The place among the ranks that the environment gives a process."""

import pytest
import torch

from fp8kv_inductor.config import ConfigError
from fp8kv_inductor.parallel import SINGLE, Parallel, from_environment


@pytest.fixture(autouse=True)
def without_torchrun(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("world_size", [None, "1"])
def test_one_process_needs_no_group(monkeypatch, world_size):
    if world_size:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    with from_environment("cpu") as parallel:
        assert parallel == Parallel(sum_dtype=torch.float64)
        assert not torch.distributed.is_initialized()
    with from_environment("cuda") as parallel:
        assert parallel == SINGLE


def test_fewer_gpus_than_ranks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ConfigError, match="found 1 GPUs; rank 1"), from_environment("cuda"):
        pass


def test_one_rank_passes_tensors_through():
    x = torch.randn(3)
    assert SINGLE.all_reduce(x) is x and SINGLE.all_gather(x) is x
    assert torch.equal(SINGLE.shard(x, 0), x) and SINGLE.share(8) == 8
