"""The inverse rope of a read's output moves into the read, and only then."""

import pytest
import torch
from nasty import nasty_reads
from torch.fx.experimental.proxy_tensor import make_fx

from fp8kv_inductor import register, rope, sparse_attention
from fp8kv_inductor.chains import angles, read
from fp8kv_inductor.lowerings import inverse_rope

TOKENS, HEADS, COLUMNS = 5, 3, 136


@pytest.fixture(scope="module")
def arguments():
    return (*nasty_reads(TOKENS, HEADS, COLUMNS, "fp8_e4m3"), *angles(TOKENS))


def operators_behind_the_pass(fn, arguments):
    """Names of our operators in a graph, once the pass has gone over it."""
    q, window, cmp, *rest = arguments
    graph = make_fx(lambda q, *rest: fn(q, window, cmp, *rest))(q, *rest).graph
    inverse_rope.fuse(graph)
    graph.lint()
    names = [str(node.target) for node in graph.nodes if "fp8kv" in str(node.target)]
    return [name.split(".")[1] for name in names]


def compiled(fn, *args):
    register()
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        return torch.compile(fn, fullgraph=True)(*args)


def rotated(*args):
    return rope(read(*args[:-2])[0], *args[-2:], inverse=True)


def test_the_read_rotates(arguments):
    assert operators_behind_the_pass(rotated, arguments) == ["sparse_attention"]
    result = compiled(rotated, *arguments)
    plain = compiled(lambda *args: read(*args)[0], *arguments[:-2])
    assert torch.equal(result, rope(plain, *arguments[-2:], inverse=True))


def test_eager_operator_with_angles(arguments):
    *args, cos, sin = arguments
    out, lse = read(*args)
    q, window, cmp, indices, counts, sink = args
    rotated_out, same_lse = sparse_attention(
        q, window, cmp, indices, counts, sink, 128, 512**-0.5, angles=(cos, sin)
    )
    assert torch.equal(rotated_out, rope(out, cos, sin, inverse=True))
    assert torch.equal(lse, same_lse)


def forward_rope(*args):
    return rope(read(*args[:-2])[0], *args[-2:])


def output_used_twice(*args):
    out, _ = read(*args[:-2])
    return rope(out, *args[-2:], inverse=True), out


def lse_used(*args):
    out, lse = read(*args[:-2])
    return rope(out, *args[-2:], inverse=True), lse


def angles_of_the_output(*args):
    out, lse = read(*args[:-2])
    return rope(out, args[-2] + lse[:, :1], args[-1], inverse=True)


def rotated_twice(*args):
    return rope(rotated(*args), *args[-2:], inverse=True)


@pytest.mark.parametrize(
    "fn, names",
    [
        (forward_rope, ["sparse_attention", "rope"]),
        (output_used_twice, ["sparse_attention", "rope"]),
        (lse_used, ["sparse_attention"]),
        (angles_of_the_output, ["sparse_attention", "rope"]),
        (rotated_twice, ["sparse_attention", "rope"]),
    ],
)
def test_what_is_left_alone(fn, names, arguments):
    assert operators_behind_the_pass(fn, arguments) == names
