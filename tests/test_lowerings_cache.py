"""Our source is part of Inductor's cache key, next to other projects' passes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

from fp8kv_inductor import register
from fp8kv_inductor.lowerings import cache_key

ROOT = Path(__file__).parent.parent

COMPILE_A_STORE = """
import json, torch
from fp8kv_inductor import Pool, store
from torch._dynamo.utils import counters
for fmt in ("fp8_e4m3", "bf16"):
    pools = [Pool.empty(8, 64, fmt) for _ in range(2)]
    for step, pool in zip((store, torch.compile(store, fullgraph=True)), pools):
        step(torch.ones(2, 64), torch.arange(2), pool)
    assert torch.equal(pools[0].data, pools[1].data) and pools[0].data[:2].any()
    assert torch.equal(pools[0].scale, pools[1].scale)
print(json.dumps({**counters["inductor"], **counters["aot_autograd"]}))
"""


@pytest.fixture
def checkout(tmp_path):
    """A copy of the sources whose compilations use a cache of their own."""
    for folder in ("fp8kv_inductor", "lowerings"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    return tmp_path


def compile_in_new_process(checkout: Path) -> dict[str, int]:
    result = subprocess.run(
        [sys.executable, "-c", COMPILE_A_STORE],
        cwd=checkout,
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": str(checkout),
            "TORCHINDUCTOR_CACHE_DIR": str(checkout / "cache"),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(result.stdout.splitlines()[-1])


def cache_counts(checkout: Path) -> dict[str, int]:
    """What a new process got out of the FX cache and the AOTAutograd cache."""
    counts = compile_in_new_process(checkout)
    caches = ("fxgraph_cache", "autograd_cache")
    events = [f"{cache}_{event}" for cache in caches for event in ("hit", "miss", "bypass")]
    return {event: counts[event] for event in events if event in counts}


def test_second_process_hits_and_changed_source_misses(checkout):
    """Two formats in each process."""
    misses = {"fxgraph_cache_miss": 2, "autograd_cache_miss": 2}
    assert cache_counts(checkout) == misses
    assert cache_counts(checkout) == {"fxgraph_cache_hit": 2, "autograd_cache_hit": 2}
    changed = checkout / "lowerings" / "rows.py"
    changed.write_text(changed.read_text() + "\n# another lowering\n")
    assert cache_counts(checkout) == misses


def test_templates_and_kernels_are_part_of_the_key():
    names = {Path(file).name for file in cache_key.source_files()}
    assert {"rows.py", "numerics.py", "sparse_attention.py.jinja", "attention.py"} <= names


class OtherProject(CustomGraphPass):
    """A pass that was there first."""

    def __init__(self):
        self.runs = 0

    def __call__(self, graph):
        self.runs += 1

    def uuid(self):
        return "other"


def test_another_projects_pass_stays():
    other = OtherProject()
    with config.patch(post_grad_custom_pre_pass=other):
        register()
        register()
        ours = config.post_grad_custom_pre_pass
        assert isinstance(ours, cache_key.SourceKey) and ours.earlier is other
        ours(torch.fx.Graph())
        assert other.runs == 1
        assert ours.uuid()[1] == "other"
    with config.patch(post_grad_custom_pre_pass=[other]):
        register()
        register()
        passes = config.post_grad_custom_pre_pass
        assert [type(entry) for entry in passes] == [OtherProject, cache_key.SourceKey]


def test_a_bare_function_bypasses_the_cache_as_before():
    with config.patch(post_grad_custom_pre_pass=lambda graph: None):
        register()
        assert config.post_grad_custom_pre_pass.uuid() is None
