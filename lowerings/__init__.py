"""How each operator becomes Inductor IR; file names are op names."""

if __name__ != "fp8kv_inductor.lowerings":
    raise ImportError(
        f"the lowerings were imported as {__name__!r}; import fp8kv_inductor.lowerings"
    )

import importlib
import warnings
from functools import cache

import torch

from fp8kv_inductor import _compat


def register() -> None:
    """Register the lowerings, once per process, and make sure that the cache key is in place."""
    if register_lowerings():
        importlib.import_module(f"{__name__}.cache_key").install()


@cache
def register_lowerings() -> dict[str, tuple[str, ...]]:
    """Register every lowering that this torch can carry.

    An operator without a lowering stays right: Inductor calls its eager implementation.

    Returns:
        lowering file -> the operators that it lowers.
    """
    registered: dict[str, tuple[str, ...]] = {}
    problems: list[str] = []
    for name in _compat.LOWERING_NAMES:
        try:
            registered[name] = register_file(name)
        except (ImportError, AttributeError) as error:
            problems.append(f"{name}: {error}")
    if problems:
        warnings.warn(
            f"fp8kv_inductor does not know torch {torch.__version__} well enough to lower all of "
            f"its operators; compiled graphs call the eager ones instead, right but slower "
            f"({'; '.join(problems)})",
            stacklevel=3,
        )
    return registered


def register_file(name: str) -> tuple[str, ...]:
    """Register one lowering file, once per process; returns the operators that it lowers.

    Raises:
        ImportError, AttributeError: this torch cannot carry it.
    """
    if missing := _compat.missing_names(name):
        raise ImportError(f"needs {', '.join(missing)}")
    return _register_file(name)


@cache
def _register_file(name: str) -> tuple[str, ...]:
    return importlib.import_module(f"{__name__}.{name}").register()
