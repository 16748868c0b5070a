"""A kernel sees what it has stored itself.

Inductor's kernels that loop over a row twice store a value in the first loop and load it again in
the second. Triton gives loads and stores layouts of their own: a store moves 16 bytes a thread, a
load as many elements as the narrowest dtype around it allows. Where rows are 256 bf16 features and
a warp has a row of its own, a thread of triton 3.6 loads what a thread of another warp has stored,
with nothing between them that waits, and a row of garbage comes out now and then.
"""

from __future__ import annotations

import functools
from typing import Any

import sympy
from torch._inductor.codegen.triton import TritonKernel

STORED = "_fp8kv_stored"
"""Attribute of a kernel: names of the buffers that it has stored since the last barrier."""


@functools.cache
def wait_for_stores() -> None:
    """Put a barrier between a kernel's store of a buffer and its later load of that buffer."""
    kernel_class: Any = TritonKernel
    original_load, original_store = kernel_class.load, kernel_class.store

    def store(self: Any, name: str, *args: Any, **kwargs: Any) -> None:
        self.__dict__.setdefault(STORED, set()).add(name)
        original_store(self, name, *args, **kwargs)

    def load(self: Any, name: str, index: sympy.Expr) -> Any:
        # What the current loop has stored is still in registers, and Inductor takes it from there:
        # a load means that the store lies in an earlier loop, which is in the body already.
        if name in self.__dict__.get(STORED, ()):
            self.body.writeline("tl.debug_barrier()")
            self.__dict__[STORED].clear()
        return original_load(self, name, index)

    kernel_class.load, kernel_class.store = load, store
