"""``fp8kv doctor``: versions, the device, and which path each lowering takes here and why."""

from __future__ import annotations

import platform
import warnings
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

import fp8kv_inductor
from fp8kv_inductor import _compat, lowerings
from fp8kv_inductor.config import KV_CACHE_DTYPES, CacheConfig, ConfigError
from fp8kv_inductor.formats import get_format
from fp8kv_inductor.model_config import V4_FLASH


@dataclass(frozen=True)
class LoweringPath:
    """What compiled graphs do with the operators of one lowering file.

    Attributes:
        path: "full" is the fastest path that the package has for this device; "reduced" compiles
            to something slower; "eager" calls the operator's eager implementation.
        reason: why, in one line.
    """

    path: Literal["full", "reduced", "eager"]
    reason: str


def run(device: str | None = None) -> dict[str, Any]:
    """Look at this installation; the result is what ``--json`` prints.

    Args:
        device: "cuda", "cpu", or None for CUDA if there is one.
    """
    there = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    capability = cuda_capability(there)
    usable = there.type == "cpu" or capability is not None
    modes = {mode: mode_state(mode, there) for mode in KV_CACHE_DTYPES}
    return {
        "versions": versions(),
        "device": {
            "type": there.type,
            "name": device_name(there) if usable else None,
            "capability": None if capability is None else ".".join(map(str, capability)),
        },
        "kv_cache_dtypes": modes,
        "lowerings": {
            name: asdict(lowering_path(name, there, capability))
            for name in (_compat.LOWERING_NAMES if usable else ())
        },
        "problem": modes["fp8_e4m3"]["problem"],
    }


def versions() -> dict[str, str | None]:
    """Versions of everything that generated code depends on; None for what is not installed."""
    return {
        "fp8kv_inductor": fp8kv_inductor.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_version(),
    }


def triton_version() -> str | None:
    """Version of Triton, None where it is not installed."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return None


def device_name(device: torch.device) -> str:
    """A name for people."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def cuda_capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability; None for the CPU and for a GPU that does not answer."""
    try:
        return torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    except (RuntimeError, AssertionError):
        return None


def mode_state(mode: str, device: torch.device) -> dict[str, Any]:
    """Row format of a cache mode, its bytes per element, and what stands against it here."""
    row_format = get_format(KV_CACHE_DTYPES[mode])
    return {
        "format": row_format.name,
        "bytes_per_element": row_format.bytes_per_element(V4_FLASH.head_dim),
        "problem": mode_problem(mode, device),
    }


def mode_problem(mode: str, device: torch.device) -> str | None:
    """Why a cache mode cannot run on a device, in one line; None if it can."""
    if device.type == "cuda" and cuda_capability(device) is None:
        return "found no usable CUDA device; needed: a GPU and a torch with CUDA, or --device cpu"
    try:
        with warnings.catch_warnings():
            # Lowerings that are missing have lines of their own.
            warnings.simplefilter("ignore")
            CacheConfig.resolve(V4_FLASH, mode, device)
    except ConfigError as error:
        return " ".join(str(error).split())
    if device.type == "cuda" and triton_version() is None:
        return f"found no triton; kv_cache_dtype={mode!r} on a GPU needs it; install triton"
    return None


def lowering_path(
    name: str, device: torch.device, capability: tuple[int, int] | None
) -> LoweringPath:
    """The path of one lowering file, a key of ``_compat.LOWERING_NAMES``."""
    try:
        lowerings.register_file(name)
    except (ImportError, AttributeError) as error:
        return LoweringPath("eager", f"{error} (found torch {torch.__version__})")
    if device.type == "cpu":
        return LoweringPath("reduced", "the C++ backend takes ordinary reductions")
    if name == "rows":
        return LoweringPath("full", "block maxima inside the tile, a chain is one Triton kernel")
    if name == "attention":
        return _read_path(capability)
    return LoweringPath("full", "Triton template")


def _read_path(capability: tuple[int, int] | None) -> LoweringPath:
    from fp8kv_inductor.kernels import attention

    if capability != attention.HOPPER:
        return LoweringPath("full", "Triton template")
    if attention.hopper_read() is None:
        return LoweringPath(
            "reduced", "Triton template; this triton lacks the Gluon that kernels/hopper needs"
        )
    return LoweringPath("full", "the Gluon read of kernels/hopper, or else a Triton template")


def print_table(result: dict[str, Any], console: Console) -> None:
    """Print the result for people."""
    table = Table(show_header=False)
    for name, version in result["versions"].items():
        table.add_row(name, version or "not installed", "")
    device = result["device"]
    capability = f"compute capability {device['capability']}" if device["capability"] else ""
    table.add_row("device", device["name"] or f"no {device['type']}", capability)
    table.add_section()
    for mode, state in result["kv_cache_dtypes"].items():
        size = f"{state['bytes_per_element']:g} bytes/element"
        table.add_row(mode, size, state["problem"] or "works here")
    table.add_section()
    for name, lowering in result["lowerings"].items():
        table.add_row(f"lowerings/{name}.py", lowering["path"], lowering["reason"])
    console.print(table)
