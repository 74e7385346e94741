"""A factor for each token and expert: the kernel argument, and which factors count."""

from cutlass import Uint32

from torch_cute_ops.kernels.common import ptx
from torch_cute_ops.runtime.argspec import Dim, TensorArg


def factors_argument(m: Dim) -> TensorArg:
    """The factors (M, experts), fp32, of any strides."""
    strides = (Dim("alpha_stride", bits=64), Dim("alpha_column_stride", bits=64))
    return TensorArg("Float32", (m, Dim("experts")), strides, align=4)


def factor_counts(factor):
    """Whether the pair of a token and an expert is computed: not where its factor is zero, of either sign; NaN
    counts."""
    return (ptx.bits_of(factor) & Uint32(0x7FFFFFFF)) != Uint32(0)
