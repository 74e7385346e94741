"""Check the descriptions of kernel arguments that are passed to the compiler."""

import itertools

from support import kernel_grid
from support.kernel_grid.qkv_rope import qkv_rope_cases
from test_pipelines import GEMM_CASES

from torch_cute_ops.runtime.argspec import Dim, TensorArg


def test_no_wide_stride_follows_a_narrow_stride() -> None:
    """Check that no 64-bit stride of a tensor argument follows a 32-bit stride.

    In this order, nvidia-cutlass-dsl 4.8.1 passes wrong strides to the kernel. Its host code writes a flat struct
    (pointer, extents, strides). The kernel reads nested structs, whose padding differs if the number of extents is odd.
    The emulator does not run the host code, so only a GPU would show the fault.
    """
    cases = (case for cases in GEMM_CASES for case in cases(every=False))
    checked = 0
    rows = (*kernel_grid.covering_cases(), *kernel_grid.moe_cases(), *qkv_rope_cases())
    for case in itertools.chain(rows, cases):
        for argument in case.kernel.arguments():
            if isinstance(argument, TensorArg):
                bits = [stride.bits for stride in argument.stride if isinstance(stride, Dim)]
                assert bits == sorted(bits, reverse=True), (case.id, argument)
                checked += len(bits) > 1
    assert checked > 100
