"""The one place that loads the lowerings."""

from __future__ import annotations

import importlib


def register() -> None:
    """Teach Inductor the ``fp8kv::`` operators. Safe to call often; the first call does the work.

    Resolving a cache mode and making a pool call it, so users rarely have to.
    """
    importlib.import_module("fp8kv_inductor.lowerings").register()
