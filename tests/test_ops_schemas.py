"""The operators' schemas: other people's code is written against these strings."""

import pytest
import torch

SCHEMAS = [
    "fp8kv::rope(Tensor x, Tensor cos, Tensor sin, bool inverse=False) -> Tensor",
    "fp8kv::act_quant(Tensor x, int features, int block=64) -> Tensor",
    "fp8kv::store(Tensor rows, Tensor slots, Tensor(a!) data, Tensor(b!) scale, str fmt) -> ()",
    "fp8kv::sparse_attention(Tensor q, Tensor window_data, Tensor window_scale, Tensor cmp_data, "
    "Tensor cmp_scale, Tensor indices, Tensor? cmp_counts, Tensor sink, int n_window, "
    "float softmax_scale, str fmt) -> (Tensor out, Tensor lse)",
    "fp8kv::indexer_scores(Tensor q, Tensor weights, Tensor idx_data, Tensor page_rows, "
    "Tensor request, Tensor counts, int page_size) -> Tensor",
]


def actual(name: str) -> torch.FunctionSchema:
    return getattr(torch.ops.fp8kv, name).default._schema


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema[7 : schema.index("(")])
def test_schema(schema):
    """Optional arguments may be added at the end; nothing is renamed."""
    expected = torch._C.parse_schema(schema)
    assert actual(expected.name.removeprefix("fp8kv::")).is_backward_compatible_with(expected)


@pytest.mark.parametrize(
    ("old", "new"), [("rows", "row"), ("Tensor(a!)", "Tensor"), (", str fmt", "")]
)
def test_a_changed_schema_would_be_seen(old, new):
    changed = torch._C.parse_schema(SCHEMAS[2].replace(old, new))
    assert not actual("store").is_backward_compatible_with(changed)


@pytest.mark.parametrize("name", ["rope", "act_quant", "sparse_attention", "indexer_scores"])
def test_only_the_store_mutates(name):
    assert not actual(name).is_mutable
    assert actual("store").is_mutable
