"""Fixtures and settings of the whole suite."""

from collections.abc import Iterator

import hypothesis
import pytest
import torch

from fp8kv_inductor.config import FP8_CAPABILITY

hypothesis.settings.register_profile(
    "repeatable", derandomize=True, database=None, deadline=None, max_examples=40
)
hypothesis.settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked ``gpu`` where no GPU can run them."""
    if not torch.cuda.is_available():
        reason = "needs a CUDA GPU"
    elif torch.cuda.get_device_capability() < FP8_CAPABILITY:
        reason = f"needs a GPU of compute capability {FP8_CAPABILITY} or newer"
    else:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def seed() -> None:
    """Random tensors do not depend on which tests ran before."""
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For many tiny operators: threads gain nothing, and on shared cores wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
