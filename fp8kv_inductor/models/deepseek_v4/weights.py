"""Weights under the names of the public reference: random ones, or a safetensors file."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from fp8kv_inductor.config import CacheConfig, ConfigError
from fp8kv_inductor.formats import get_format
from fp8kv_inductor.model_config import ModelConfig
from fp8kv_inductor.models.deepseek_v4.model import DeepseekV4
from fp8kv_inductor.models.deepseek_v4.moe import Experts
from fp8kv_inductor.parallel import Parallel

MTP_PREFIX = "mtp."
"""Weights of the multi-token-prediction layer, which is not part of the backbone."""


SHARD_AXES = {
    ".attn.attn_sink": 0,
    ".attn.wq_b.weight": 0,
    ".attn.wo_a.weight": 0,
    ".attn.wo_b.weight": 1,
    ".w1.weight": 0,
    ".w2.weight": 1,
    ".w3.weight": 0,
}
"""Endings of names -> the axis that the ranks divide; each has the other weights as a whole."""


def shard_axis(name: str) -> int | None:
    """The axis along which the ranks divide a weight of this reference name, None for none."""
    if name == "head.weight":
        return 0
    return next((axis for end, axis in SHARD_AXES.items() if name.endswith(end)), None)


def reference_weights(model: DeepseekV4) -> dict[str, Tensor]:
    """The model's parameters by reference name, as views: writing to one writes to the model.

    Stacked experts appear one by one, and the two weights of a compressor apart. A rank of several
    has only its shards.
    """
    stacked = {name for name, module in model.named_modules() if isinstance(module, Experts)}
    weights: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        owner, _, leaf = name.rpartition(".")
        if owner not in stacked:
            compressor, joined, _ = name.rpartition("wkv_gate.weight")
            names = ("wkv.weight", "wgate.weight") if joined else (name,)
            parts = tensor.chunk(len(names))
            weights |= {compressor + part: w for part, w in zip(names, parts, strict=True)}
            continue
        for expert, weight in enumerate(tensor.unbind()):
            weights[f"{owner}.{expert}.{leaf}.weight"] = weight.T if leaf == "w2" else weight
    return weights


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def load_weights(model: DeepseekV4, state_dict: Mapping[str, Tensor]) -> None:
    """Copy whole weights of reference names into the model, converting dtypes.

    A rank of several copies its shards out of them.

    Weights of the multi-token-prediction layer (``mtp.*``) are ignored.

    Raises:
        ValueError: names are missing or unknown, or shapes differ; one message lists all kinds.
    """
    targets = reference_weights(model)
    given = {name: w for name, w in state_dict.items() if not name.startswith(MTP_PREFIX)}
    problems = []
    if missing := sorted(targets.keys() - given.keys()):
        problems.append(f"{len(missing)} missing ({_some(missing)})")
    if unexpected := sorted(given.keys() - targets.keys()):
        problems.append(f"{len(unexpected)} unknown ({_some(unexpected)})")
    shapes = [
        f"{name} {tuple(given[name].shape)}, needed {needed}"
        for name, target in targets.items()
        if name in given
        and given[name].shape != (needed := whole_shape(name, target, model.parallel))
    ]
    if shapes:
        problems.append(f"{len(shapes)} of another shape ({_some(shapes)})")
    if problems:
        raise ValueError(
            f"weights do not fit model {model.config.name!r}: {'; '.join(problems)}; needed: a "
            "state dict with the reference's names, fp8 and fp4 weights with scales converted "
            "to bf16 beforehand"
        )
    with torch.no_grad():
        for name, target in targets.items():
            axis = shard_axis(name)
            whole = given[name]
            target.copy_(whole if axis is None else model.parallel.shard(whole, axis))


def whole_shape(name: str, shard: Tensor, parallel: Parallel) -> tuple[int, ...]:
    """Shape of the weight of which this rank has ``shard``."""
    shape = list(shard.shape)
    if (axis := shard_axis(name)) is not None:
        shape[axis] *= parallel.world_size
    return tuple(shape)


def load_safetensors(model: DeepseekV4, path: str | Path) -> None:
    """Load a ``.safetensors`` file, or all of a folder; errors as in :func:`load_weights`.

    Raises:
        FileNotFoundError: no such file, or no such files in the folder.
    """
    from safetensors.torch import load_file

    path = Path(path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise FileNotFoundError(f"no .safetensors file in {path}")
    state_dict: dict[str, Tensor] = {}
    for file in files:
        state_dict.update(load_file(file))
    load_weights(model, state_dict)


def shipped_weights(config: ModelConfig) -> Path | None:
    """The checkpoint of this model that comes with the package, None if there is none."""
    path = Path(str(resources.files("fp8kv_inductor"))) / "data" / f"{config.name}.safetensors"
    return path if path.exists() else None


def save_safetensors(model: DeepseekV4, path: str | Path) -> None:
    """Write the model's weights under reference names to a ``.safetensors`` file.

    Raises:
        ConfigError: the model is one rank of several and has only its shards.
    """
    from safetensors.torch import save_file

    if model.parallel.world_size > 1:
        raise ConfigError(
            f"found the shards of rank {model.parallel.rank} of {model.parallel.world_size}; "
            "needed: whole weights; save a model of one process"
        )

    weights = {name: w.contiguous().clone() for name, w in reference_weights(model).items()}
    save_file(weights, path)


def random_weights(
    config: ModelConfig, seed: int, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Tensor]:
    """Random weights on the CPU by reference name, the same for the same seed.

    Linear layers keep the variance of their input, so logits are of order one; sinks, position
    biases, router biases and hyper-connection biases are not zero, so that each of them matters.
    """
    meta = CacheConfig(config, "auto", torch.device("meta"), get_format("bf16"))
    generator = torch.Generator().manual_seed(seed)
    targets = reference_weights(DeepseekV4(meta, dtype))
    return {
        name: _drawn(name, target.shape, target.shape[-1], config, generator).to(target.dtype)
        for name, target in targets.items()
    }


@torch.no_grad()
def draw_weights(model: DeepseekV4, seed: int) -> None:
    """Fill a model with such weights on its own device, where billions of them take seconds.

    Ranks agree on the weights that each of them has whole.
    """
    device, parallel = model.cache.device, model.parallel
    common, own = (
        torch.Generator(device).manual_seed(seed + stride) for stride in (0, 1 + parallel.rank)
    )
    for name, target in reference_weights(model).items():
        n_in = whole_shape(name, target, parallel)[-1]
        generator = common if shard_axis(name) is None else own
        target.copy_(_drawn(name, target.shape, n_in, model.config, generator))


def _drawn(
    name: str, shape: torch.Size, n_in: int, config: ModelConfig, generator: torch.Generator
) -> Tensor:
    """A weight of this reference name, on the generator's device; ``n_in`` of a linear layer."""
    leaf = name.rpartition(".")[2]
    device = generator.device
    if leaf == "tid2eid":
        experts = config.n_routed_experts
        order = torch.rand(shape[0], experts, generator=generator, device=device)
        return order.topk(shape[1], -1).indices
    value = torch.randn(shape, generator=generator, device=device)
    if name.endswith("norm.weight") or leaf.endswith("_scale"):
        return 1 + 0.1 * value
    if leaf.endswith("_base") or leaf in ("ape", "bias"):
        return 0.3 * value
    if leaf == "attn_sink" or name == "embed.weight":
        return value
    return value * n_in**-0.5
