"""How each operator becomes Inductor IR; file names are op names."""

if __name__ != "fp8kv_inductor.lowerings":
    raise ImportError(
        f"the lowerings were imported as {__name__!r}; import fp8kv_inductor.lowerings"
    )

from functools import cache

from fp8kv_inductor.lowerings import cache_key
from fp8kv_inductor.lowerings.attention import register_attention
from fp8kv_inductor.lowerings.block import register_primitives
from fp8kv_inductor.lowerings.indexer import register_indexer
from fp8kv_inductor.lowerings.rows import register_rows


def register() -> None:
    """Register the lowerings, once per process, and make sure that the cache key is in place."""
    _register_lowerings()
    cache_key.install()


@cache
def _register_lowerings() -> None:
    register_primitives()
    register_rows()
    register_attention()
    register_indexer()
