"""DeepSeek-V4 on 8-bit KV pools through nothing but ``torch.compile(backend="inductor")``."""

from pathlib import Path

_package = Path(__file__).parent
if not (_package / "lowerings").exists() and (_package.parent / "lowerings/__init__.py").exists():
    # A bare checkout or an editable install: lowerings/ lies beside the package.
    __path__.append(str(_package.parent))

from fp8kv_inductor.config import CacheConfig, ConfigError  # noqa: E402
from fp8kv_inductor.formats import FORMATS, RowFormat, get_format  # noqa: E402
from fp8kv_inductor.ops import (  # noqa: E402
    act_quant,
    indexer_scores,
    rope,
    sparse_attention,
    store,
)
from fp8kv_inductor.pools import KVPools, Pool  # noqa: E402
from fp8kv_inductor.registration import register  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "FORMATS",
    "CacheConfig",
    "ConfigError",
    "KVPools",
    "Pool",
    "RowFormat",
    "act_quant",
    "get_format",
    "indexer_scores",
    "register",
    "rope",
    "sparse_attention",
    "store",
]
