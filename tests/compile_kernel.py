"""Compile a kernel as its launcher would, for a GPU that need not exist, and read the result."""

import subprocess
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TRITON = tuple(map(int, triton.__version__.split(".")[:2]))
"""Version, for what a compiler makes of the same kernel."""


def e4m3_cast_source(arch: int) -> str:
    """What a cast to e4m3 starts from: below sm_90 fp16, until triton 3.9."""
    return "f16x2" if arch < 90 and TRITON < (3, 9) else "f32"


def compile_kernel(kernel, arch, types, constants, aligned, options, source=ASTSource):
    """What ``triton.compile`` gives.

    Args:
        kernel: a jit function.
        arch: compute capability, major and minor digit.
        types: of the arguments that are neither constants nor i32.
        constants: compile-time arguments and their values.
        aligned: whether an i32 argument is a multiple of 16, by its name; all pointers are.
        options: num_warps and the like.
        source: ASTSource, or GluonASTSource for a Gluon kernel.
    """
    position = kernel.arg_names.index
    signature = {
        argument: "constexpr" if argument in constants else types.get(argument, "i32")
        for argument in kernel.arg_names
    }
    program = source(
        fn=kernel,
        signature=signature,
        constexprs={(position(argument),): value for argument, value in constants.items()},
        attrs={
            (position(argument),): [["tt.divisibility", 16]]
            for argument, kind in signature.items()
            if kind.startswith("*") or (kind == "i32" and aligned(argument))
        },
    )
    return triton.compile(program, target=GPUTarget("cuda", arch, 32), options=options)


def cuobjdump(cubin: bytes, what: str) -> str:
    """What cuobjdump says about a cubin, ``-sass`` or ``-res-usage``."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, what, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
