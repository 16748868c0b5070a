"""A step as one CUDA graph: captured once, replayed over inputs and pools that do not move."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fp8kv_inductor.models.deepseek_v4 import DeepseekV4
from fp8kv_inductor.slots import StepBatch

Place = tuple[int, torch.Size]
"""Address and shape of a tensor."""


def places(batch: StepBatch) -> list[Place]:
    """Where every field of a batch lies: all of it that a captured graph remembers."""
    closing = batch.closing.values()
    tensors = [*(field for field in batch if isinstance(field, Tensor)), *closing]
    return [(tensor.data_ptr(), tensor.shape) for tensor in tensors]


class CapturedStep:
    """A model's step of fixed sizes, captured by ``torch.cuda.graph``.

    A replay reads tokens, positions, counts and page tables from where the batch of the capture
    lies, and reads and writes the pools that the model had then. It launches all kernels at once,
    so it does not check slots: one beyond its pool skips its row.

    ``step`` runs once before the capture, which compiles, loads and times its kernels. Whoever
    captures a compiled model by hand has to do the same: torch.compile cannot start inside of a
    capture. Eager calls can.
    """

    @torch.no_grad()
    def __init__(
        self, step: Callable[[StepBatch], Tensor], model: DeepseekV4, batch: StepBatch
    ) -> None:
        """Warm up and capture; both run the step on ``batch``.

        Args:
            step: calls ``model``, compiled or eager, and returns logits.
            model: bound to its pools.
            batch: of the sizes of every later one, for instance all padding, which stores nothing.

        Raises:
            RuntimeError: the current stream is capturing already.
            ValueError: the batch is not on a GPU.
        """
        if batch.tokens.device.type != "cuda":
            raise ValueError(
                f"found a batch on {batch.tokens.device}; needed: one on a GPU; call the step "
                "itself on other devices"
            )
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "found a capture running on the current stream; a CapturedStep is a graph of its "
                "own: make it before, or call the step, once compiled, inside of yours"
            )
        self._model = model
        self._pools = model.pools
        # Kept alive: the graph reads it, whoever else has forgotten it.
        self._batch = batch
        self._places = places(batch)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step(batch)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads, NCCL's among them, may use CUDA meanwhile.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._logits = step(batch)

    def __call__(self, batch: StepBatch) -> Tensor:
        """Replay the step.

        Args:
            batch: with the addresses and shapes of the one that was captured.

        Returns:
            the logits, in a tensor that the next call overwrites.

        Raises:
            RuntimeError: the model has other pools now.
            ValueError: the batch lies elsewhere, or has other sizes.
        """
        if self._model.pools is not self._pools:
            raise RuntimeError(
                "found the model bound to other pools than at the capture; a replay would use the "
                "old ones; capture again"
            )
        if places(batch) != self._places:
            raise ValueError(
                "found a batch at other addresses or of other sizes than at the capture, which a "
                "replay would not read; fill the same buffers (StepInputs.decode) or capture again"
            )
        self._graph.replay()
        return self._logits
