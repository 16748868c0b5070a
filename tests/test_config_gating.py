"""CacheConfig.resolve: every mode that cannot be had is one ConfigError that tells what to do."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8kv_inductor import FORMATS, CacheConfig, ConfigError, Pool, get_format
from fp8kv_inductor.config import KV_CACHE_DTYPES, PAGE_SIZE
from fp8kv_inductor.model_config import PRESETS, TINY

QUANTIZED = [mode for mode in KV_CACHE_DTYPES if mode != "auto"]


@pytest.fixture
def old_gpu(monkeypatch):
    """A GPU without e4m3 conversions (compute capability 8.0)."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))


@pytest.mark.parametrize("name", list(PRESETS))
@pytest.mark.parametrize("mode", list(KV_CACHE_DTYPES))
def test_presets_resolve_on_the_cpu(name, mode):
    cache = CacheConfig.resolve(name, mode, "cpu")
    assert cache.model is PRESETS[name]
    assert cache.kv_format is get_format(KV_CACHE_DTYPES[mode])
    assert cache.idx_format is get_format("bf16") and cache.state_format is get_format("fp32")


def test_the_default_is_not_quantized():
    cache = CacheConfig.resolve("tiny")
    assert cache.kv_cache_dtype == "auto" and not cache.kv_format.quantized


@pytest.mark.parametrize("mode", ["fp8", "fp8_e5m2", "bf16", "fp32", ""])
def test_unknown_mode(mode):
    with pytest.raises(ConfigError, match=f"found kv_cache_dtype='{mode}'; needed: one of 'auto'"):
        CacheConfig.resolve("tiny", mode, "cpu")


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ("llama", "unknown model 'llama'; known: v4-flash, v4-pro, tiny"),
        ({"model_type": "llama"}, "model_type 'llama'"),
        ({}, "model_type None"),
        (torch.nn.Linear(1, 1), r"model_type None \(Linear\)"),
        (None, r"model_type None \(NoneType\)"),
        ({"model_type": "deepseek_v4"}, "compress_rates"),
    ],
)
@pytest.mark.parametrize("mode", ["auto", "fp8_e4m3"])
def test_not_a_dsv4_model(model, found, mode):
    with pytest.raises(ConfigError, match=f"needs a DeepSeek-V4 model: .*{found}"):
        CacheConfig.resolve(model, mode, "cpu")


@pytest.mark.parametrize("mode", QUANTIZED)
@pytest.mark.parametrize("head_dim", [48, 80])
def test_head_dim_not_a_multiple_of_the_block(mode, head_dim):
    model = replace(TINY, head_dim=head_dim)
    message = f"found head_dim {head_dim} in 'tiny'.*needs a multiple of 32; use .*'auto'"
    with pytest.raises(ConfigError, match=message):
        CacheConfig.resolve(model, mode, "cpu")
    assert CacheConfig.resolve(model, "auto", "cpu").kv_format.name == "bf16"


@pytest.mark.parametrize("mode", QUANTIZED)
def test_a_gpu_without_fp8(old_gpu, mode):
    message = r"found a GPU of compute capability 8\.0; .* needs 8\.9 or newer .*use .*'auto'"
    with pytest.raises(ConfigError, match=message):
        CacheConfig.resolve("tiny", mode, "cuda")
    assert CacheConfig.resolve("tiny", "auto", "cuda").device.type == "cuda"


@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name].quantized])
def test_pools_and_operators_on_a_gpu_without_fp8(old_gpu, name):
    """Whoever resolves no cache mode meets the same error, before any kernel is compiled."""
    message = rf"found a GPU of compute capability 8\.0; format '{name}' needs 8\.9 or newer"
    with FakeTensorMode():
        data = torch.empty(8, 64, dtype=torch.uint8, device="cuda")
        scale = torch.empty(8, 2, dtype=FORMATS[name].scale_dtype, device="cuda")
        rows, slots = torch.empty(2, 64, device="cuda"), torch.arange(2, device="cuda")
        with pytest.raises(ConfigError, match=message):
            Pool(data, scale, FORMATS[name])
        with pytest.raises(ConfigError, match=message):
            torch.ops.fp8kv.store(rows, slots, data, scale, name)
        rows_of_bf16 = torch.empty(8, 64, dtype=torch.bfloat16, device="cuda")
        torch.ops.fp8kv.store(rows, slots, rows_of_bf16, scale, "bf16")


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (12, 0)])
def test_a_gpu_with_fp8(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert CacheConfig.resolve("tiny", "fp8_e4m3", "cuda").kv_format.quantized


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_other_devices(device):
    with pytest.raises(
        ConfigError, match=f"found device type '{device}'; .* needs 'cuda' or 'cpu'"
    ):
        CacheConfig.resolve("tiny", "fp8_e4m3", device)


@pytest.mark.gpu
def test_this_gpu_is_the_default():
    assert CacheConfig.resolve("tiny", "fp8_e4m3").device.type == "cuda"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device():
    with pytest.raises(ConfigError, match=r"no usable CUDA device behind 'cuda'.*device='cpu'"):
        CacheConfig.resolve("tiny", "fp8_e4m3", "cuda")


def test_there_is_one_page_size():
    """Slot maps and planner share a constant, so a mode cannot bring a page size of its own."""
    cache = CacheConfig.resolve("tiny", "auto", "cpu")
    assert cache.page_size == PAGE_SIZE
    with pytest.raises(TypeError, match="page_size"):
        replace(cache, page_size=64)
