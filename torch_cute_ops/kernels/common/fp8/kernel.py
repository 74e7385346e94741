"""Arguments and launch that all FP8 GEMM kernels by wgmma and mma.sync share."""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from torch_cute_ops.kernels.common.fp8.layouts import Arguments


class FP8Kernel:
    """Base class of the FP8 GEMM kernels by wgmma and mma.sync.

    Attributes:
        gemm: ``FP8Gemm`` or ``WarpGemm``, which a subclass composes.
    """

    gemm: Any

    def arguments(self) -> Arguments:
        return self.gemm.arguments()

    @cute.jit
    def __call__(self, a, b, a_scale, b_scale, offsets, counts, alpha, bias, out, prefetch, max_ctas: Int32, stream):
        given = Arguments(a, b, a_scale, b_scale, offsets, counts, alpha, bias, out, prefetch, max_ctas)
        self.gemm.launch(given, stream)
