"""transformers' DeepSeek-V4 on paged pools: ``patch(model, ...)`` and back: ``unpatch(model)``.

``model.forward`` becomes a step of our graph (``models/deepseek_v4``) over the parameters of
transformers' modules; tokenizers, ``generate()`` and sampling stay transformers'. Parameters are
shared, not copied, except the few that the graph holds otherwise: the compressors' projections, two
in one and fp32, and in bf16 models what the graph has in fp32 and transformers has not, such as
routers. Routed experts stay transformers' own modules, with the ``experts_implementation`` that
they have.

A patched model computes what transformers' does but for the rows of the pools, which have the
format of ``kv_cache_dtype``, and the index keys, which are bf16 there. ``rounding=True`` adds the
fp8 and fp4 round trips that the published model was trained with and transformers leaves out; fp8
pools then hold all but the rope features without a further error.

Left padding is dropped: each sequence has the positions 0, 1, ... and the logits that it has alone.
"""

from __future__ import annotations

import dataclasses
import re
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fp8kv_inductor.budget import PoolPlan
from fp8kv_inductor.config import CacheConfig, ConfigError
from fp8kv_inductor.engine import Engine
from fp8kv_inductor.models.deepseek_v4.indexer import hadamard
from fp8kv_inductor.models.deepseek_v4.model import DeepseekV4
from fp8kv_inductor.models.deepseek_v4.rotary import Rotary
from fp8kv_inductor.page_table import PageTable
from fp8kv_inductor.staging import Segment

try:
    from transformers import DeepseekV4ForCausalLM
    from transformers.cache_utils import Cache
    from transformers.modeling_outputs import MoeCausalLMOutputWithPast
except ImportError as error:
    raise ImportError(
        "transformers with DeepSeek-V4 is not installed; needed: 5.8 or newer, "
        "pip install 'fp8kv_inductor[hf]'"
    ) from error

CACHE_FIELDS = ("cache", "past_key_values")
"""The newer and the older name of the cache, as an argument and in outputs."""

OUTPUT_FIELD = next(
    name
    for name in CACHE_FIELDS
    if name in {field.name for field in dataclasses.fields(MoeCausalLMOutputWithPast)}
)

FIXED_CONFIG = {
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "attention_bias": False,
    "mlp_bias": False,
}
"""Values that other models could have, but not our graph."""

ROPE_TYPES = ("default", "yarn")

REFUSED = (
    "inputs_embeds",
    "labels",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
)
"""Arguments of the forward that need transformers' own."""

RENAMED = [
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^model\.", ""),
        (r"^embed_tokens", "embed"),
        (r"^lm_head", "head"),
        (r"^hc_head\.hc_", "hc_head_"),
        (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
        (r"input_layernorm", "attn_norm"),
        (r"post_attention_layernorm", "ffn_norm"),
        (r"self_attn", "attn"),
        (r"sinks", "attn_sink"),
        (r"q_a_norm", "q_norm"),
        (r"([qo])_([ab])_proj", r"w\1_\2"),
        (r"compressor\.indexer", "indexer"),
        (r"indexer\.scorer", "indexer"),
        (r"indexer\.(?=kv_|gate_|position)", "indexer.compressor."),
        (r"compressor\.kv_norm", "compressor.norm"),
        (r"compressor\.gate_proj", "compressor.wgate"),
        (r"kv_proj", "wkv"),
        (r"position_bias", "ape"),
        (r"\.mlp\.", ".ffn."),
        (r"e_score_correction_bias", "bias"),
        (r"shared_experts\.gate_proj", "shared_experts.w1"),
        (r"shared_experts\.down_proj", "shared_experts.w2"),
        (r"shared_experts\.up_proj", "shared_experts.w3"),
    )
]
"""From transformers' names of weights to ours, applied in this order."""


def patch(
    model: DeepseekV4ForCausalLM,
    kv_cache_dtype: str = "fp8_e4m3",
    *,
    max_batch: int,
    max_len: int,
    prefill_chunk: int = 512,
    rounding: bool = False,
    compile: bool = True,
    compile_options: dict[str, Any] | None = None,
) -> DeepseekV4ForCausalLM:
    """Give a model pooled caches: prefill and decode run through the ``fp8kv::`` operators.

    The pools are allocated here, on the model's device, for ``max_batch`` sequences of ``max_len``
    tokens. With ``compile``, prefill and decode are one graph each, compiled by the first step of
    each; do not wrap the model in ``torch.compile`` yourself.

    Args:
        model: of transformers, bf16 or fp32 weights on one device. Weights written in place
            after this call are seen, but for those that are copied (see above).
        kv_cache_dtype: a key of ``config.KV_CACHE_DTYPES``.
        max_batch: sequences that caches hold at the same time, all caches together.
        max_len: tokens of the longest sequence, prompt and output together.
        prefill_chunk: prompt tokens of one prefill step.
        rounding: also make the rounding steps of the published model.
        compile: False runs the graph eagerly.
        compile_options: Inductor's, as for ``torch.compile(options=...)``.

    Returns:
        ``model`` itself.

    Raises:
        ConfigError: not such a model, or one that the graph or the pools cannot have.
        ValueError: a limit is too small.
    """
    cache = CacheConfig.resolve(model, kv_cache_dtype, _device(model))
    _check(model, compile)
    pages = -(-max_len // cache.page_size)
    one = PoolPlan(cache, pages, 0)
    window_pages = max_batch * one.reserve_for(max_len) + -(-prefill_chunk // cache.page_size)
    engine = Engine(
        _shared_graph(model, cache, rounding),
        PoolPlan(cache, max_batch * pages, window_pages),
        max_batch=max_batch,
        max_len=max_len,
        prefill_chunk=prefill_chunk,
        compile=compile,
        compile_options=compile_options,
    )
    model.forward = PooledForward(engine, max_len, model.config.use_cache)
    return model


def unpatch(model: DeepseekV4ForCausalLM) -> DeepseekV4ForCausalLM:
    """Give a patched model its own forward back; the pools go with the last cache in them.

    Returns:
        ``model`` itself.

    Raises:
        ValueError: it is not patched.
    """
    if not isinstance(model.__dict__.get("forward"), PooledForward):
        raise ValueError(
            f"found {type(model).__name__} with its own forward; needed: a patched one"
        )
    del model.forward
    return model


class PooledCache(Cache):
    """Sequences of one batch in the pools; a patched model returns it and takes it back.

    Its rows of the page table are free again when it is reset or no longer referenced.

    Attributes:
        rows: row of the page table of each sequence; empty before the first tokens.
        positions: tokens of each sequence in the pools.
        columns: columns of ``input_ids`` so far, padding included.
    """

    is_linear = (False,)
    is_croppable = False

    def __init__(self, pages: PageTable) -> None:
        super().__init__(layers=[])
        self.pages = pages
        self.rows: list[int] = []
        self.positions: list[int] = []
        self.columns = 0
        weakref.finalize(self, _release, pages, self.rows).atexit = False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns so far."""
        return self.columns

    def reset(self) -> None:
        """Forget all tokens."""
        _release(self.pages, self.rows)
        self.positions = []
        self.columns = 0

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            "found a call that copies, reorders or cuts a cache in pools (beam search, assisted "
            "generation, deepcopy); needed: greedy search or sampling, each cache used for one "
            "batch; or unpatch the model"
        )

    reorder_cache = crop = update = _refuse
    batch_repeat_interleave = batch_select_indices = __deepcopy__ = _refuse


def _release(pages: PageTable, rows: list[int]) -> None:
    while rows:
        pages.release(rows.pop())


class PooledForward:
    """The forward of a patched model, in place of ``DeepseekV4ForCausalLM.forward``."""

    def __init__(self, engine: Engine, max_len: int, use_cache: bool) -> None:
        self.engine = engine
        self.max_len = max_len
        self.use_cache = use_cache
        self._replaced: weakref.WeakSet[Cache] = weakref.WeakSet()

    def __call__(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Cache | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run ``S`` more tokens of ``B`` sequences.

        Args:
            input_ids: `[B, S]`.
            attention_mask: `[B, columns so far + S]`, 0 for padding on the left, or None.
            position_ids: `[B, S]`; may only say what the mask says: 0, 1, ... from each sequence's
                first token on.
            past_key_values: the cache by its older name.
            use_cache: False forgets the tokens at once, unless a cache was given.
            logits_to_keep: the last so many columns, 0 for all, or a list of columns `[K]`.
            cache: what an earlier call returned, or None. An empty cache of another kind, such as
                ``generate()`` makes, is replaced: go on with the one in the output.
            return_dict: False for a tuple.

        Returns:
            transformers' output with logits `[B, K, vocab_size]`, zeros for padding, and the cache.

        Raises:
            ValueError: what the pools or the graph cannot do, and what to do.
        """
        refused = [n for n in REFUSED if not (kwargs.get(n) is None or kwargs[n] is False)]
        if refused:
            raise ValueError(
                f"found {', '.join(refused)}; a patched model runs tokens for logits alone: "
                "unpatch it first"
            )
        if input_ids is None or input_ids.dim() != 2 or not input_ids.numel():
            raise ValueError("needed: input_ids [B, S] with one or more tokens")
        if cache is not None and past_key_values is not None:
            raise ValueError("found both cache and past_key_values; needed: one of them")
        given = past_key_values if cache is None else cache
        pooled = self._pooled(given, input_ids.shape[0])
        stored = pooled.positions or [0] * input_ids.shape[0]
        tokens = _new_tokens(input_ids, attention_mask, pooled.columns, stored)
        _check_positions(position_ids, stored, tokens)
        self._admit(pooled, stored, tokens)

        columns = range(input_ids.shape[1])
        kept = (
            list(columns[-logits_to_keep:])
            if isinstance(logits_to_keep, int)
            else [columns[i] for i in logits_to_keep.tolist()]
        )
        run = self._decode if len(columns) == 1 else self._prefill
        logits = run(pooled, tokens, kept, len(columns))
        pooled.columns += len(columns)
        if given is not None and given is not pooled:
            self._replaced.add(given)
        keep = given is not None or (self.use_cache if use_cache is None else use_cache)
        output = MoeCausalLMOutputWithPast(
            logits=logits, **({OUTPUT_FIELD: pooled} if keep else {})
        )
        return output.to_tuple() if return_dict is False else output

    def _pooled(self, cache: Cache | None, batch: int) -> PooledCache:
        if not isinstance(cache, PooledCache):
            if cache is not None and cache.get_seq_length():
                raise ValueError(
                    f"found a {type(cache).__name__} of {cache.get_seq_length()} tokens; needed: "
                    "the cache that this patched model returned, or none"
                )
            if cache in self._replaced:
                raise ValueError(
                    f"found a {type(cache).__name__} that an earlier call replaced by a cache in "
                    "pools; needed: the cache in that call's output"
                )
            return PooledCache(self.engine.pages)
        if cache.pages is not self.engine.pages:
            raise ValueError("found the cache of another patched model; needed: one of this model")
        if cache.rows and len(cache.rows) != batch:
            raise ValueError(
                f"found {batch} sequences for a cache of {len(cache.rows)}; needed: the same batch"
            )
        return cache

    def _admit(
        self, pooled: PooledCache, stored: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> None:
        """Check lengths, and take rows for a new batch."""
        longest = max(start + len(new) for start, new in zip(stored, tokens, strict=True))
        if longest > self.max_len:
            raise ValueError(
                f"found a sequence of {longest} tokens; the pools hold {self.max_len} of each: "
                "patch with a larger max_len"
            )
        if pooled.rows:
            return
        for _ in tokens:
            row = self.engine.pages.admit(self.max_len)
            if row is None:
                free = len(pooled.rows)
                pooled.reset()
                raise ValueError(
                    f"found {len(tokens)} sequences and room for {free}; drop or reset() the "
                    "caches of earlier calls, or patch with a larger max_batch"
                )
            pooled.rows.append(row)
        pooled.positions = [0] * len(tokens)

    def _decode(
        self, pooled: PooledCache, tokens: Sequence[Sequence[int]], kept: list[int], columns: int
    ) -> Tensor:
        pages = self.engine.pages
        segments = [
            Segment(row, start, new)
            for row, start, new in zip(pooled.rows, pooled.positions, tokens, strict=True)
            if new
        ]
        for segment in segments:
            pages.extend(segment.row, segment.start, segment.start + 1)
        logits = self.engine.run_decode(segments)
        for i, new in enumerate(tokens):
            pooled.positions[i] += len(new)
            pages.slide(pooled.rows[i], pooled.positions[i])
        padding = torch.tensor([not new for new in tokens], device=logits.device)
        chosen = logits[pooled.rows].masked_fill(padding.unsqueeze(1), 0.0)
        return chosen.unsqueeze(1)[:, [0] * len(kept)]

    def _prefill(
        self, pooled: PooledCache, tokens: Sequence[Sequence[int]], kept: list[int], columns: int
    ) -> Tensor:
        """Chunks of ``prefill_chunk`` tokens, of all sequences one after the other."""
        pages, rows, positions = self.engine.pages, pooled.rows, pooled.positions
        ends = [start + len(new) for start, new in zip(positions, tokens, strict=True)]
        logits: Tensor | None = None
        while pending := [i for i, end in enumerate(ends) if positions[i] < end]:
            segments: list[Segment] = []
            last: list[int] = []
            places: list[tuple[int, int]] = []
            used = 0
            for i in pending:
                room = self.engine.prefill_chunk - used
                if not room:
                    break
                start = positions[i]
                end = pages.extend(rows[i], start, min(ends[i], start + room))
                behind = len(tokens[i]) - (ends[i] - start)
                segments.append(Segment(rows[i], start, tokens[i][behind : behind + end - start]))
                first = columns - (ends[i] - start)
                for place, column in enumerate(kept):
                    if first <= column < first + end - start:
                        last.append(used + column - first)
                        places.append((i, place))
                used += end - start
                positions[i] = end
            found = self.engine.run_prefill(segments, last)
            for i in pending:
                pages.slide(rows[i], positions[i])
            if logits is None:
                logits = found.new_zeros(len(tokens), len(kept), found.shape[-1])
            if places:
                sequences, slots = torch.tensor(places, device=found.device).unbind(1)
                logits[sequences, slots] = found[: len(places)]
        if logits is None:
            raise ValueError("found nothing but padding; needed: one or more tokens")
        return logits


def _new_tokens(
    input_ids: Tensor, mask: Tensor | None, columns: int, stored: Sequence[int]
) -> list[list[int]]:
    """Tokens of each sequence without its padding on the left."""
    ids = input_ids.tolist()
    if mask is None:
        return ids
    batch, new = input_ids.shape
    if not isinstance(mask, Tensor) or mask.shape != (batch, columns + new):
        found = tuple(mask.shape) if isinstance(mask, Tensor) else f"as {type(mask).__name__}"
        raise ValueError(
            f"found an attention_mask {found}; needed: one entry for each of the {columns + new} "
            f"tokens so far of {batch} sequences, or None"
        )
    tokens = []
    for row, live, start in zip(ids, mask[:, -new:].bool().tolist(), stored, strict=True):
        padding = live.index(True) if True in live else new
        if not all(live[padding:]) or (padding and start):
            raise ValueError(
                "found masked tokens behind a sequence's first one; needed: padding on the left, "
                "tokenizer.padding_side = 'left'"
            )
        tokens.append(row[padding:])
    return tokens


def _check_positions(
    position_ids: Tensor | None, stored: Sequence[int], tokens: Sequence[Sequence[int]]
) -> None:
    if position_ids is None:
        return
    rows = position_ids.expand(len(tokens), -1).tolist()
    for given, start, new in zip(rows, stored, tokens, strict=True):
        needed = list(range(start, start + len(new)))
        if new and given[-len(new) :] != needed:
            raise ValueError(
                f"found position_ids {given[-len(new)]} .. {given[-1]} for {len(new)} tokens "
                f"behind {start} others; needed: {needed[0]} .. {needed[-1]}, or position_ids=None"
            )


def _device(model: nn.Module) -> torch.device:
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        raise ConfigError(
            f"found weights on {', '.join(sorted(map(str, devices)))}; needed: one device"
        )
    return devices.pop()


def _check(model: DeepseekV4ForCausalLM, compile: bool) -> None:
    """Refuse what the graph could only compute wrongly; names and shapes are checked later."""
    if not isinstance(model, DeepseekV4ForCausalLM):
        raise ConfigError(f"found a {type(model).__name__}; needed: a DeepseekV4ForCausalLM")
    if "forward" in model.__dict__:
        raise ConfigError(
            "found a model whose forward is replaced already, by patch() or by hooks; needed: an "
            "unpatched model that was loaded onto one device"
        )
    kind = "quantized" if getattr(model, "is_quantized", False) else model.dtype
    if kind not in (torch.bfloat16, torch.float32):
        raise ConfigError(
            f"found {kind} weights; needed: bf16 or fp32, e.g. "
            "from_pretrained(..., quantization_config=FineGrainedFP8Config(dequantize=True))"
        )
    config = model.config
    wrong = [
        (name, getattr(config, name), value)
        for name, value in FIXED_CONFIG.items()
        if getattr(config, name, value) != value
    ]
    for kind in ("main", "compress"):
        rope = config.rope_parameters[kind]
        if (rope_type := rope.get("rope_type", "default")) not in ROPE_TYPES:
            wrong.append((f"{kind} rope_type", rope_type, ROPE_TYPES))
        if (factor := rope.get("attention_factor", 1.0)) != 1.0:
            wrong.append((f"{kind} attention_factor", factor, 1.0))
    if wrong:
        raise ConfigError("; ".join(f"found {n}={x!r}, needed: {y!r}" for n, x, y in wrong))
    if compile and config._experts_implementation == "eager":
        raise ConfigError(
            "found experts_implementation='eager', a loop that no single graph can hold; needed: "
            "model.set_experts_implementation('grouped_mm') or 'batched_mm', or compile=False"
        )


@torch.no_grad()
def _shared_graph(model: DeepseekV4ForCausalLM, cache: CacheConfig, rounding: bool) -> DeepseekV4:
    """Our graph over the parameters of ``model``."""
    meta = torch.device("meta")
    graph = DeepseekV4(dataclasses.replace(cache, device=meta), model.dtype, rounding)
    graph.cache = cache
    graph.rotary = Rotary(cache.model, cache.device)
    blocks: list[Any] = list(graph.layers)
    for block in blocks:
        block.ffn.experts = nn.Module()
        if block.attn.indexer is not None:
            matrix = hadamard(cache.model.index_head_dim)
            block.attn.indexer.hadamard = matrix.to(cache.device)
    weights: dict[str, Tensor] = {}
    for name, weight in model.state_dict(keep_vars=True).items():
        if ".experts." in name:
            continue
        for pattern, ours in RENAMED:
            name = pattern.sub(ours, name)
        weights[name] = weight
    for name in [name for name in weights if name.endswith("compressor.wkv.weight")]:
        parts = (weights.pop(name), weights.pop(name.replace("wkv", "wgate")))
        weights[name.replace("wkv", "wkv_gate")] = torch.cat([part.float() for part in parts])
    for name, expected in graph.state_dict().items():
        # The head stays in the model's dtype: its logits are transformers' own, and it is large.
        if name in weights and name != "head.weight":
            weights[name] = weights[name].to(expected.dtype)
    try:
        graph.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise ConfigError(
            f"found a {type(model).__name__} whose weights are not those that its configuration "
            f"says: {error}"
        ) from error
    for block, layer in zip(blocks, model.model.layers, strict=True):
        block.ffn.experts = layer.mlp.experts
    return graph
