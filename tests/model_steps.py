"""Steps of a paged model built by hand, for tests that do without the engine."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8kv_inductor.budget import PoolPlan
from fp8kv_inductor.config import PAGE_SIZE, CacheConfig
from fp8kv_inductor.formats import get_format
from fp8kv_inductor.model_config import ModelConfig
from fp8kv_inductor.models.deepseek_v4 import DeepseekV4, load_weights
from fp8kv_inductor.models.deepseek_v4.dense import DenseReference
from fp8kv_inductor.parallel import SINGLE, Parallel
from fp8kv_inductor.pools import KVPools
from fp8kv_inductor.slots import StepBatch


def paged_model(
    config: ModelConfig,
    weights: dict[str, Tensor],
    kv_format: str,
    n_pages: int,
    dtype: torch.dtype = torch.float32,
    rounding: bool = True,
    parallel: Parallel = SINGLE,
) -> DeepseekV4:
    """A model with as many window pages as full-history pages, every pool row of them NaN."""
    cache = CacheConfig(config, "auto", torch.device("cpu"), get_format(kv_format))
    model = DeepseekV4(cache, dtype, rounding, parallel)
    load_weights(model, weights)
    pools = KVPools(PoolPlan(cache, n_pages, n_pages))
    for buffer in pools.buffers():
        if buffer.dtype == torch.uint8:
            buffer.fill_(0x7F)
        else:
            buffer.fill_(torch.nan)
    model.bind(pools)
    return model


class Requests:
    """Requests with pages of their own, in an order that no test could get right by accident."""

    def __init__(self, n_requests: int, pages: int) -> None:
        self.n_pages = n_requests * pages
        generator = torch.Generator().manual_seed(n_requests)
        shuffled = [torch.randperm(self.n_pages, generator=generator) for _ in range(2)]
        self.page_table, self.window_table = (pages_.view(n_requests, pages) for pages_ in shuffled)
        self.lengths = [0] * n_requests

    def step(self, tokens: dict[int, Tensor], ratios: Sequence[int], padding: int = 0) -> StepBatch:
        """A step with new ``tokens`` `[t]` by request, padded; logits of all but the padding."""
        counts = {request: len(new) for request, new in tokens.items()}
        offsets = [torch.arange(count) for count in counts.values()]
        positions = [
            self.lengths[request] + offset for request, offset in zip(counts, offsets, strict=True)
        ]
        for request, count in counts.items():
            self.lengths[request] += count

        def padded(parts: list[Tensor], value: int) -> Tensor:
            return torch.cat([*parts, torch.full((padding,), value)])

        position = padded(positions, -1)
        closing = {}
        for ratio in ratios:
            closes = (position >= 0) & ((position + 1) % ratio == 0)
            closing[ratio] = torch.cat([closes.nonzero()[:, 0], torch.tensor([-1])])
        return StepBatch(
            tokens=padded(list(tokens.values()), 0),
            positions=position,
            request=padded([torch.full((n,), request) for request, n in counts.items()], 0),
            offset=padded(offsets, 0),
            remaining=padded([n - 1 - o for n, o in zip(counts.values(), offsets, strict=True)], 0),
            page_table=self.page_table,
            window_table=self.used_window_pages(),
            closing=closing,
            last=torch.arange(len(position) - padding),
        )

    def used_window_pages(self) -> Tensor:
        """The window table with pages that no token has reached yet masked out."""
        pages = torch.arange(self.window_table.shape[1])
        used = torch.tensor(self.lengths).unsqueeze(1) > pages * PAGE_SIZE
        return torch.where(used, self.window_table, -1)


def decode_step(batch: StepBatch) -> StepBatch:
    """A step of one token each as a captured graph has it: every token may close every group."""
    every = torch.arange(len(batch.tokens))
    return batch._replace(closing={ratio: every for ratio in batch.closing})


def worst(actual: Tensor, expected: Tensor) -> float:
    """Largest difference."""
    return float((actual.double() - expected.double()).abs().max())


class Oracle:
    """Exact logits of a sequence, and twice how far fp32 arithmetic strays from them."""

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Tensor],
        tokens: Tensor,
        kv_format: str,
        rounding: bool,
    ) -> None:
        def logits(weights: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
            formats = get_format(kv_format), get_format("bf16")
            return DenseReference(config, weights, dtype, rounding, *formats).forward(tokens)

        self.exact = logits(weights, torch.float64)
        strays = [per_token(logits(weights, torch.float32), self.exact)]
        for seed in range(3):
            moved = logits(moved_by_an_ulp(weights, seed), torch.float32)
            strays.append(per_token(moved, self.exact))
        self.worst = 2 * max(float(stray.max()) for stray in strays)
        self.median = 2 * max(float(stray.median()) for stray in strays)


def per_token(logits: Tensor, exact: Tensor) -> Tensor:
    """Largest difference of each token."""
    return (logits.double() - exact).abs().amax(-1)


def moved_by_an_ulp(weights: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Every weight multiplied by 1 plus or minus up to an ulp."""
    generator = torch.Generator().manual_seed(seed)
    ulp = torch.finfo(torch.float32).eps
    return {
        name: weight * (1 + ulp * (2 * torch.rand(weight.shape, generator=generator) - 1))
        if weight.is_floating_point()
        else weight
        for name, weight in weights.items()
    }
