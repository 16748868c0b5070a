"""Private torch names that may differ by version, probed by looking, each behind a function."""

from __future__ import annotations

import importlib
from functools import reduce

TRITON = "torch._inductor.codegen.triton"
LOWERING_NAMES = {
    "rows": (
        "torch._inductor.ir:Scatter",
        "torch._inductor.ir:MutationLayoutSHOULDREMOVE",
        "torch._inductor.ir:FallbackKernel.create",
        "torch._inductor.ir:IRNode.current_origins",
        "torch._inductor.dtype_propagation:DtypePropagationOpsHandler",
        "torch._inductor.shape_propagation:get_broadcasted_shape",
        "torch._inductor.shape_propagation:ShapePropagationOpsHandler",
        "torch._inductor.ops_handler:DefaultHandler._call_default",
        "torch._inductor.codegen.common:CSE.newvar",
        "torch._inductor.codegen.common:DeferredLine",
        "torch._inductor.codegen.simd:SIMDScheduling.create_tiling",
        "torch._inductor.codegen.simd:SIMDScheduling.get_tiling_and_scores",
        "torch._inductor.scheduler:FusedSchedulerNode.reorder_loops_by_dep_pair",
        "torch._inductor.scheduler:Scheduler.can_fuse",
        "torch._inductor.scheduler:SchedulerNode.reorder_loops_by_dep_pair",
        "torch._inductor.sizevars:SizeVarAllocator.guard_int",
        "torch._inductor.sizevars:SizeVarAllocator.optimization_hint",
        "torch._inductor.codegen.simd_kernel_features:SIMDKernelFeatures.contains_op",
        "torch._inductor.lowering:fallback_handler",
        f"{TRITON}:HelperFunctions.add",
        f"{TRITON}:IndexingOptions",
        f"{TRITON}:TritonOverrides",
        f"{TRITON}:TritonCSEVariable.update_on_args",
        f"{TRITON}:TritonKernel.active_range_trees",
        f"{TRITON}:TritonKernel.dense_size_list",
        f"{TRITON}:TritonKernel.filter_masks",
        f"{TRITON}:TritonKernel.get_load_buffer",
        f"{TRITON}:TritonKernel.index_to_str",
        f"{TRITON}:TritonKernel.indexing",
        f"{TRITON}:TritonKernel.indexing_size_str",
        f"{TRITON}:TritonKernel.load",
        f"{TRITON}:TritonKernel.store",
        "torch._inductor.config:triton.codegen_upcast_to_fp32",
    ),
    "attention": (
        "torch._inductor.ir:MutationOutput",
        "torch._inductor.ir:Reduction.create",
        "torch._inductor.lowering:empty_strided",
        "torch._inductor.lowering:fallback_handler",
        "torch._inductor.select_algorithm:ExternKernelCaller.output_node",
        "torch._inductor.select_algorithm:ExternKernelChoice.bind",
        "torch._inductor.select_algorithm:TritonTemplate.maybe_append_choice",
        "torch._inductor.select_algorithm:SymbolicGridFn",
        "torch._inductor.select_algorithm:autotune_select_algorithm",
        "torch._inductor.select_algorithm:realize_inputs",
        "torch._inductor.sizevars:SizeVarAllocator.evaluate_expr",
        "torch._inductor.sizevars:SizeVarAllocator.guard_int",
        "torch._inductor.sizevars:SizeVarAllocator.optimization_hint",
        f"{TRITON}:triton_type",
    ),
}
LOWERING_NAMES["indexer"] = LOWERING_NAMES["attention"]
"""Names without which the lowerings of a file cannot work, as ``module:attribute``."""


def missing_names(lowering: str) -> list[str]:
    """Names of ``LOWERING_NAMES[lowering]`` that this torch does not have."""
    return [name for name in LOWERING_NAMES[lowering] if not _exists(name)]


def _exists(name: str) -> bool:
    module, _, path = name.partition(":")
    try:
        reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):
        return False
    return True


def generated_kernels() -> int:
    """Kernels that Inductor generated in this process so far: Triton kernels, C++ loop nests.

    A hit in Inductor's cache counts the kernels of the cached graph. Calls of library kernels and
    of eager operators do not count.
    """
    from torch._inductor import metrics

    return metrics.generated_kernel_count
