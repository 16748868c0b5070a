"""What Gluon calls by another name from one triton to the next."""

from typing import Any

import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

_descriptor: Any = gl.shared_memory_descriptor

# Since 3.7: a group's own barrier.
group_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
# Since 3.9; the old names of the first two are still there, and raise.
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
reinterpret = getattr(_descriptor, "reinterpret", None) or _descriptor._reinterpret
