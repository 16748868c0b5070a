"""A small paged runner: ragged prefill, batched decode, one compiled graph for each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fp8kv_inductor.budget import (
    WINDOW_RATIO,
    PoolPlan,
    lookback_pages,
    plan_pages,
    window_pages_for,
)
from fp8kv_inductor.config import CacheConfig, ConfigError
from fp8kv_inductor.graphs import CapturedStep
from fp8kv_inductor.models.deepseek_v4 import DeepseekV4
from fp8kv_inductor.page_table import PageTable
from fp8kv_inductor.pools import KVPools
from fp8kv_inductor.sampling import sample
from fp8kv_inductor.slots import StepBatch
from fp8kv_inductor.staging import MIN_SIZE, Segment, StepInputs


@dataclass
class Request:
    """One generation.

    Attributes:
        prompt: token ids.
        max_new_tokens: tokens to generate.
        temperature: 0 for greedy.
        generator: source of randomness, None if greedy.
        row: row of the page tables, -1 before admission.
        position: next position to run; everything before it is in the pools.
        output: tokens generated so far.
        context: tokens that prefill runs: the prompt, and after a preemption the output so far.
    """

    prompt: list[int]
    max_new_tokens: int
    temperature: float
    generator: torch.Generator | None
    row: int = -1
    position: int = 0
    output: list[int] = field(default_factory=list)
    context: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.context = self.prompt

    @property
    def stored_tokens(self) -> int:
        """Tokens whose rows the pools hold in the end; the last one sampled is never run."""
        return len(self.prompt) + self.max_new_tokens - 1

    @property
    def done(self) -> bool:
        """All tokens are generated."""
        return len(self.output) == self.max_new_tokens


Kind = Literal["prefill", "decode"]
"""A step runs a chunk of prompts, or one token of every running request."""

CudaGraph = Literal["capture", "reduce-overhead"]
"""How decode becomes a CUDA graph: captured by :class:`CapturedStep`, or by Inductor itself."""


class StepResult(NamedTuple):
    """What one step did.

    Attributes:
        kind: what it ran.
        tokens: request id -> token sampled in this step.
    """

    kind: Kind
    tokens: dict[int, int]


class Engine:
    """Runs a DSV4 model on the pools of one cache mode.

    A step is either a prefill chunk or a decode step, and prompts go first. A request is admitted,
    in order of arrival, when a row and the pages of its prompt are there, and takes further pages
    while it decodes. When none is free, the youngest running request is preempted: its pages go to
    the others, and it waits, first in line, until prefill can run its prompt and its output so far
    again. The oldest one always runs on, so all come to their ends. A batch-invariant engine works
    without preemption, see ``batch_invariant`` below.

    Each rank of a tensor-parallel model has an engine. They get the same requests and budget in the
    same order, run the same steps, and sample the same tokens from the same logits.

    Attributes:
        model: the model, bound to the pools.
        cache: its cache mode.
        plan: the pools that the budget holds.
        pages: which request holds which pages.
        preemptions: how often a running request had to give its pages up.
    """

    def __init__(
        self,
        model: DeepseekV4,
        budget: int | PoolPlan,
        *,
        max_batch: int = 8,
        max_len: int = 4096,
        prefill_chunk: int = 512,
        compile: bool = True,
        compile_options: dict[str, Any] | None = None,
        cuda_graph: CudaGraph | None = None,
        batch_invariant: bool = False,
    ) -> None:
        """Plan and allocate the pools, bind them to the model, wrap it for compilation.

        Nothing is compiled before the first step of each kind; :meth:`warm_up` takes both.

        Args:
            model: with its weights loaded; an engine has it for itself.
            budget: bytes for all pools, or a plan made elsewhere.
            max_batch: requests that run at the same time.
            max_len: tokens of the longest request, prompt and output together, rounded up to
                whole pages.
            prefill_chunk: prompt tokens of one prefill step, of all its requests together.
            compile: False runs the model eagerly.
            compile_options: Inductor's, as for ``torch.compile(options=...)``.
            cuda_graph: run decode as a CUDA graph, captured at its first step; prefill, whose
                sizes change, never is one.
            batch_invariant: a request gets the same bits whatever else runs. All its steps then
                have sizes of their own: prompts are run one at a time, in chunks padded to
                ``prefill_chunk``, decode steps have ``max_batch`` rows as always, and a request
                starts when all its pages are free, so that none is preempted. Costs time where
                prompts are short and pages where answers are long.

        Raises:
            ConfigError: the budget does not hold one page, the model has fewer than max_len
                positions, the device cannot have the graph, or a plan has too few window pages for
                whole chunks.
            ValueError: a limit is too small.
        """
        for name, value, least in (
            ("max_batch", max_batch, 1),
            ("max_len", max_len, 1),
            ("prefill_chunk", prefill_chunk, 2),
        ):
            if value < least:
                raise ValueError(f"found {name}={value}; needed: {least} or more")
        cache = model.cache
        if max_len > cache.model.max_seq_len:
            raise ConfigError(
                f"found max_len={max_len}; {cache.model.name!r} has {cache.model.max_seq_len} "
                "positions; lower max_len"
            )
        if cuda_graph is not None and cache.device.type != "cuda":
            raise ConfigError(
                f"found cuda_graph={cuda_graph!r} on {cache.device}; needed: a CUDA device, or None"
            )
        if cuda_graph == "reduce-overhead" and not compile:
            raise ConfigError(
                "found cuda_graph='reduce-overhead' without compile; it is a mode of "
                "torch.compile; use 'capture'"
            )
        self.model = model
        self.cache = cache
        self.prefill_chunk = prefill_chunk
        window_pages_beside = partial(window_pages, cache, max_batch, prefill_chunk)
        self.plan = (
            budget
            if isinstance(budget, PoolPlan)
            else plan_pages(cache, budget, window_pages_beside)
        )
        self._batch_invariant = batch_invariant
        needed = window_pages_beside(self.plan.num_pages)
        if batch_invariant and self.plan.window_pages < needed:
            raise ConfigError(
                f"found {self.plan.window_pages} window pages; batch_invariant needs {needed} for "
                f"max_batch={max_batch} and prefill_chunk={prefill_chunk}, or chunks would end "
                "where other requests leave pages; plan more, or lower one of them"
            )
        self._pools = KVPools(self.plan)
        model.bind(self._pools)
        self._inputs = StepInputs(
            cache.model.ratios,
            max(prefill_chunk, max_batch),
            max_batch,
            -(-max_len // cache.page_size),
            cache.device,
        )
        self.pages = PageTable(self.plan, self._inputs.page_table, self._inputs.window_table)
        self._prefill = _step_function(model, "prefill", compile, compile_options)
        if cuda_graph == "reduce-overhead":
            compile_options = {**(compile_options or {}), "triton.cudagraphs": True}
        self._decode = _step_function(model, "decode", compile, compile_options)
        self._capture = cuda_graph == "capture"
        self._captured: CapturedStep | None = None
        # The read chooses its splits, and so the scratch of a token, for the size that it is
        # compiled at: the first chunk is padded to the largest.
        self._first_prefill = compile
        self.preemptions = 0
        self._requests: dict[int, Request] = {}
        self._waiting: deque[int] = deque()
        self._running: list[int] = []
        self._next_id = 0

    def add_request(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> int:
        """Queue a request.

        Args:
            prompt: one or more token ids.
            max_new_tokens: tokens to generate, one or more.
            temperature: 0 for greedy.
            seed: of the request's own random generator; same seed, same tokens.

        Returns:
            The request's id.

        Raises:
            ConfigError: it can never fit into the pools or into ``max_len``.
            ValueError: an argument is out of its range.
        """
        self._check_tokens(prompt)
        if max_new_tokens < 1:
            raise ValueError(f"found max_new_tokens={max_new_tokens}; needed: 1 or more")
        if not 0 <= temperature < float("inf"):
            raise ValueError(f"found temperature={temperature}; needed: 0 or more, and finite")
        generator = None
        if temperature > 0:
            generator = torch.Generator(self.cache.device).manual_seed(seed)
        request = Request(list(prompt), max_new_tokens, temperature, generator)
        self.pages.check(request.stored_tokens)
        request_id = self._next_id
        self._next_id += 1
        self._requests[request_id] = request
        self._waiting.append(request_id)
        return request_id

    @property
    def unfinished(self) -> bool:
        """Whether a request is waiting or running."""
        return bool(self._waiting or self._running)

    def finished(self, request_id: int) -> list[int] | None:
        """Hand over the tokens of a finished request, once; None while it waits or runs.

        Raises:
            KeyError: no such request, or already handed over.
        """
        if not self._requests[request_id].done:
            return None
        return self._requests.pop(request_id).output

    def step(self) -> StepResult:
        """Admit what fits, then run one prefill chunk or one decode step.

        Raises:
            RuntimeError: there is no unfinished request.
        """
        if not self.unfinished:
            raise RuntimeError("no request is waiting or running; add_request first")
        self._admit()
        requests = {i: self._requests[i] for i in self._running}
        prompts = {i: r for i, r in requests.items() if r.position < len(r.context)}
        if prompts:
            return StepResult("prefill", self._prefill_step(prompts))
        return StepResult("decode", self._decode_step(self._grown()))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        progress: Callable[[int], None] | None = None,
    ) -> list[list[int]]:
        """Generate ``max_new_tokens`` tokens after each prompt.

        Args:
            prompts: token ids of each request.
            max_new_tokens: tokens to generate per request.
            temperature: 0 for greedy.
            seed: request i draws with ``seed + i``.
            progress: called after each step with the number of tokens that it sampled.

        Raises:
            ConfigError: a request can never fit.
            ValueError: an argument is out of its range.
        """
        ids = [
            self.add_request(prompt, max_new_tokens, temperature, seed + i)
            for i, prompt in enumerate(prompts)
        ]
        outputs: dict[int, list[int]] = {}
        while len(outputs) < len(ids):
            result = self.step()
            if progress is not None:
                progress(len(result.tokens))
            outputs |= {
                i: tokens for i in result.tokens if (tokens := self.finished(i)) is not None
            }
        return [outputs[i] for i in ids]

    def score(self, tokens: Sequence[int]) -> Tensor:
        """Logits `[T, V]` (fp32, on the CPU) after each of T given tokens, by chunked prefill.

        Raises:
            ConfigError: the tokens can never fit.
            RuntimeError: requests that are not finished hold the row or the pages.
            ValueError: no tokens, or one outside the vocabulary.
        """
        self._check_tokens(tokens)
        self.pages.check(len(tokens))
        row = self.pages.admit(len(tokens))
        if row is None:
            raise RuntimeError("no free row or pages; score when the running requests are finished")
        logits: list[Tensor] = []
        position = 0
        while position < len(tokens):
            end = min(len(tokens), position + self.prefill_chunk)
            end = self.pages.extend(row, position, end)
            segment = Segment(row, position, list(tokens[position:end]))
            count = end - position
            logits.append(self.run_prefill([segment], range(count))[:count].cpu())
            position = end
            self.pages.slide(row, position)
        self.pages.release(row)
        return torch.cat(logits)

    def warm_up(self, kinds: Sequence[Kind] = ("prefill", "decode")) -> None:
        """Compile the graphs of these kinds by a step of nothing but padding each."""
        for kind in kinds:
            if kind == "prefill":
                self.run_prefill([], [])
            else:
                self.run_decode([])

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        vocab_size = self.cache.model.vocab_size
        if not tokens:
            raise ValueError("found no tokens; needed: one or more")
        if not 0 <= min(tokens) <= max(tokens) < vocab_size:
            raise ValueError(
                f"found token ids {min(tokens)} .. {max(tokens)}; "
                f"{self.cache.model.name!r} knows 0 .. {vocab_size - 1}"
            )

    def _admit(self) -> None:
        while self._waiting:
            request = self._requests[self._waiting[0]]
            tokens = first = request.stored_tokens
            if not self._batch_invariant:
                # One more than prefill stores, or its work could be lost to the first decode step.
                first = min(len(request.context) + 1, tokens)
            row = self.pages.admit(tokens, first)
            if row is None:
                return
            request.row = row
            self._running.append(self._waiting.popleft())

    def _grown(self) -> dict[int, Request]:
        """The running requests, each with a page for its next token; the youngest may give way."""
        grown: dict[int, Request] = {}
        while len(grown) < len(self._running):
            request_id = self._running[len(grown)]
            request = self._requests[request_id]
            if self.pages.grow(request.row, request.position + 1):
                grown[request_id] = request
            else:
                self._preempt(self._running.pop())
        return grown

    def _preempt(self, request_id: int) -> None:
        request = self._requests[request_id]
        self.pages.release(request.row)
        request.row, request.position = -1, 0
        request.context = request.prompt + request.output
        self._waiting.appendleft(request_id)
        self.preemptions += 1

    def _prefill_step(self, prompts: dict[int, Request]) -> dict[int, int]:
        segments: list[Segment] = []
        last: list[int] = []
        complete: dict[int, Request] = {}
        room = self.prefill_chunk
        for request_id, request in prompts.items():
            start = request.position
            end = self.pages.extend(request.row, start, min(len(request.context), start + room))
            segments.append(Segment(request.row, start, request.context[start:end]))
            request.position = end
            room -= end - start
            if end == len(request.context):
                complete[request_id] = request
                last.append(self.prefill_chunk - room - 1)
            if not room or self._batch_invariant:
                break
        logits = self.run_prefill(segments, last)
        for request in prompts.values():
            self.pages.slide(request.row, request.position)
        return self._sample(logits, dict(enumerate(complete)))

    def _decode_step(self, requests: dict[int, Request]) -> dict[int, int]:
        segments: list[Segment] = []
        for request in requests.values():
            self.pages.extend(request.row, request.position, request.position + 1)
            segments.append(Segment(request.row, request.position, request.output[-1:]))
            request.position += 1
        logits = self.run_decode(segments)
        for request in requests.values():
            self.pages.slide(request.row, request.position)
        return self._sample(logits, {request.row: i for i, request in requests.items()})

    def _sample(self, logits: Tensor, requests: dict[int, int]) -> dict[int, int]:
        """Sample, append and finish: ``requests`` maps rows of ``logits`` to request ids."""
        if not requests:
            return {}
        temperatures = [0.0] * logits.shape[0]
        generators: list[torch.Generator | None] = [None] * logits.shape[0]
        for row, request_id in requests.items():
            temperatures[row] = self._requests[request_id].temperature
            generators[row] = self._requests[request_id].generator
        sampled = sample(logits, temperatures, generators).tolist()
        tokens = {request_id: sampled[row] for row, request_id in requests.items()}
        for request_id, token in tokens.items():
            request = self._requests[request_id]
            request.output.append(token)
            if request.done:
                self.pages.release(request.row)
                self._running.remove(request_id)
        return tokens

    def _check_pools(self) -> None:
        if self.model.pools is not self._pools:
            raise RuntimeError(
                "found the model bound to other pools than this engine's; its page tables and its "
                "captured graphs belong to the pools that it made; make a new Engine instead of "
                "rebuilding them"
            )

    @torch.no_grad()
    def run_prefill(self, segments: Sequence[Segment], last: Sequence[int]) -> Tensor:
        """One prefill step of a caller that schedules by itself; arguments as in ``StepInputs``.

        The caller admits rows of :attr:`pages`, extends them before a step and slides them after.

        Returns:
            `[max(len(last), 2), V]` logits of the tokens ``last``, then of padding.
        """
        self._check_pools()
        whole = self._first_prefill or self._batch_invariant
        size = self.prefill_chunk if whole else MIN_SIZE
        self._first_prefill = False
        batch = self._inputs.prefill(segments, last, size)
        per_token = (batch.tokens, batch.positions, batch.request, batch.offset, batch.remaining)
        for tensor in (*per_token, *batch.closing.values(), batch.last):
            torch._dynamo.mark_dynamic(tensor, 0)
        return self._prefill(batch)

    @torch.no_grad()
    def run_decode(self, segments: Sequence[Segment]) -> Tensor:
        """One decode step of a caller that schedules by itself; logits `[R, V]` by row."""
        self._check_pools()
        if self._capture and self._captured is None:
            # Of padding, which stores nothing: the warm-up runs the step more than once.
            self._captured = CapturedStep(self._decode, self.model, self._inputs.decode([]))
        return (self._captured or self._decode)(self._inputs.decode(segments))


def window_pages(cache: CacheConfig, max_batch: int, prefill_chunk: int, num_pages: int) -> int:
    """Window pages beside ``num_pages``: they also let a full batch decode while a chunk runs."""
    lookback = lookback_pages(cache.model.window_size, cache.page_size)
    wanted = max_batch * lookback + -(-prefill_chunk // cache.page_size)
    return max(window_pages_for(num_pages, WINDOW_RATIO), min(wanted, num_pages))


def _step_function(
    model: nn.Module, name: str, compile: bool, options: dict[str, Any] | None
) -> Callable[[StepBatch], Tensor]:
    """``model`` as a function that torch.compile treats on its own.

    Dynamo keeps graphs and learns dynamic sizes per code object, which all calls of one
    ``forward`` share. A copy of the code gives prefill and decode of each engine one graph each.
    """

    def step(batch: StepBatch) -> Tensor:
        return model(batch)

    step.__code__ = step.__code__.replace(co_name=name)
    if not compile:
        return step
    return torch.compile(step, backend="inductor", fullgraph=True, dynamic=False, options=options)
