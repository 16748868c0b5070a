"""Our passes over graphs, and our source code as part of Inductor's cache keys.

Inductor hashes the graph and its configuration, not the lowerings: without the key of this pass a
changed lowering would hit code that the old one generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

import fp8kv_inductor
from fp8kv_inductor.lowerings import inverse_rope, small_reductions

SUFFIXES = (".py", ".jinja")


@cache
def source_files() -> tuple[str, ...]:
    """Every file of the package that can change generated code: sources and templates."""
    folders = [Path(__file__).parent, Path(fp8kv_inductor.__file__).parent]
    files = {file for folder in folders for file in folder.rglob("*") if file.suffix in SUFFIXES}
    return tuple(sorted(map(str, files)))


class SourceKey(CustomGraphPass):
    """The passes of ``inverse_rope`` and ``small_reductions``; its uuid is a hash of our source.

    Where Inductor has room for one pass only, it also runs the pass that was there before.
    """

    def __init__(self, earlier: Any = None) -> None:
        self.earlier = earlier

    def __call__(self, graph: torch.fx.Graph) -> None:
        if self.earlier is not None:
            self.earlier(graph)
        inverse_rope.fuse(graph)
        small_reductions.unroll(graph)

    def uuid(self) -> Any:
        own = get_hash_for_files(source_files())
        if self.earlier is None:
            return own
        earlier = self.earlier.uuid() if isinstance(self.earlier, CustomGraphPass) else None
        return None if earlier is None else (own, earlier)


def install() -> None:
    """Add the key to Inductor's passes, next to those of other projects. Idempotent."""
    current = config.post_grad_custom_pre_pass
    if isinstance(current, Sequence):
        if not any(isinstance(entry, SourceKey) for entry in current):
            config.post_grad_custom_pre_pass = [*current, SourceKey()]
    elif not isinstance(current, SourceKey):
        config.post_grad_custom_pre_pass = SourceKey(current)
