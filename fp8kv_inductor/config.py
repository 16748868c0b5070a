"""Resolving a cache mode: the one decision about formats, made before any pool exists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fp8kv_inductor.formats import RowFormat, get_format
from fp8kv_inductor.model_config import ModelConfig
from fp8kv_inductor.registration import register

KV_CACHE_DTYPES = {
    "auto": "bf16",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e4m3_amax": "fp8_e4m3_amax",
    "fp8_e4m3_ue8m0": "fp8_e4m3_ue8m0",
}
"""``kv_cache_dtype`` string -> row format of the window and compressed pools."""

FP8_CAPABILITY = (8, 9)
"""First CUDA compute capability with e4m3 conversions."""

PAGE_SIZE = 128
"""Tokens per page, of the full history and of the window."""

IDX_FORMAT = get_format("bf16")
"""Rows of the indexer keys: an error there would change routing."""

STATE_FORMAT = get_format("fp32")
"""Rows of the compressor states, which are accumulators."""


class ConfigError(ValueError):
    """A cache mode that this model, device or budget cannot have."""


@dataclass(frozen=True)
class CacheConfig:
    """A resolved cache mode. Planner, pools and model take their formats from here.

    Attributes:
        model: shapes of the model.
        kv_cache_dtype: the string it was resolved from.
        device: where the pools lie.
        kv_format: rows of the window and the compressed pools, always quantized together.
        idx_format: rows of the indexer keys; an error there would change routing.
        state_format: rows of the compressor states, which are accumulators.
    """

    model: ModelConfig
    kv_cache_dtype: str
    device: torch.device
    kv_format: RowFormat
    idx_format: RowFormat = IDX_FORMAT
    state_format: RowFormat = STATE_FORMAT

    @property
    def page_size(self) -> int:
        """Tokens per page: ``PAGE_SIZE``, the same for every mode."""
        return PAGE_SIZE

    @classmethod
    def resolve(
        cls,
        model: Any,
        kv_cache_dtype: str = "auto",
        device: torch.device | str | None = None,
    ) -> CacheConfig:
        """Check that the mode is possible here and register the lowerings.

        Args:
            model: a ModelConfig, a preset's name, a Hugging Face DSV4 config, model or dict.
            kv_cache_dtype: a key of ``KV_CACHE_DTYPES``.
            device: where the pools will lie; by default CUDA if there is one, else the CPU.

        Raises:
            ConfigError: not a DSV4 model, unknown string, unsuitable head_dim or GPU.
        """
        try:
            model_config = ModelConfig.from_any(model)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"kv_cache_dtype={kv_cache_dtype!r} needs a DeepSeek-V4 model: {error}"
            ) from error
        if kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ConfigError(
                f"found kv_cache_dtype={kv_cache_dtype!r}; needed: one of "
                f"{', '.join(map(repr, KV_CACHE_DTYPES))}"
            )
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(device)
        row_format = get_format(KV_CACHE_DTYPES[kv_cache_dtype])
        if row_format.quantized:
            _check_quantized(model_config, kv_cache_dtype, row_format, device)
        register()
        return cls(model_config, kv_cache_dtype, device, row_format)


def _check_quantized(
    model: ModelConfig, kv_cache_dtype: str, row_format: RowFormat, device: torch.device
) -> None:
    if model.head_dim % row_format.block:
        raise ConfigError(
            f"found head_dim {model.head_dim} in {model.name!r}; kv_cache_dtype="
            f"{kv_cache_dtype!r} needs a multiple of {row_format.block}; "
            "use kv_cache_dtype='auto'"
        )
    if device.type not in ("cuda", "cpu"):
        raise ConfigError(
            f"found device type {device.type!r}; kv_cache_dtype={kv_cache_dtype!r} needs "
            "'cuda' or 'cpu'"
        )
    check_device(row_format, device, f"kv_cache_dtype={kv_cache_dtype!r}")


def check_device(row_format: RowFormat, device: torch.device, asked: str) -> None:
    """Refuse a GPU that cannot convert to and from the codes of a format.

    Args:
        row_format: what rows look like.
        device: where they lie.
        asked: what needs the format, for the message.

    Raises:
        ConfigError: there is no such GPU, or it has no e4m3 conversions.
    """
    if device.type != "cuda" or not row_format.quantized:
        return
    try:
        capability = torch.cuda.get_device_capability(device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"found no usable CUDA device behind {str(device)!r} ({error}); "
            f"{asked} needs a GPU there, or device='cpu'"
        ) from error
    if capability < FP8_CAPABILITY:
        raise ConfigError(
            f"found a GPU of compute capability {capability[0]}.{capability[1]}; "
            f"{asked} needs {FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]} or newer "
            "(Ada, Hopper, Blackwell); use kv_cache_dtype='auto' or the CPU"
        )
