"""rope, act_quant and store equal eager mode's bytes, whatever shapes, strides and neighbours."""

import os

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from interpreted_graph import compile_kernels, interpreted_graph
from row_cases import Case, cases, check_bytes

EXAMPLES = int(os.environ.get("FP8KV_EXAMPLES", "0"))
"""Examples per test for a longer run by hand."""

ALL = ("rope", "act_quant", "store")


def examples(number):
    return settings(max_examples=EXAMPLES or number, suppress_health_check=list(HealthCheck))


def compiled(case):
    def run(graph, inputs):
        torch._dynamo.reset()
        return torch.compile(graph, fullgraph=True, dynamic=case.dynamic)(*inputs)

    return run


@examples(5)
@given(cases())
def test_cpp_backend(case):
    check_bytes(case, compiled(case))


@examples(16)
@given(cases())
@example(Case(("act_quant",), width=160, sizes="dynamic tokens"))
@example(Case(ALL, front="rms_norm", tokens=1))
@example(Case(ALL, front="row reduction", behind="neighbour alone", width=256, blocks=3))
@example(Case(("act_quant", "store"), behind="neighbour alone", layout="slice"))
@example(Case(("store",), behind="reduction over tokens", width=32))
@example(Case(ALL, behind="transposed second consumer", layout="transposed"))
@example(Case(("act_quant",), behind="reduction over parts of rows"))
@example(Case(("rope", "act_quant"), behind="columns backwards", heads=3))
def test_cuda_code_in_the_interpreter(case):
    check_bytes(case, lambda graph, inputs: interpreted_graph(graph, inputs, case.dynamic))


@examples(3)
@given(cases())
def test_cuda_code_compiles(case):
    assert compile_kernels(case.graph, case.inputs(), case.dynamic)


@pytest.mark.gpu
@examples(40)
@given(cases())
def test_on_a_gpu(case):
    check_bytes(case, compiled(case), "cuda")
