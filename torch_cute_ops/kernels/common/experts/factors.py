"""A factor for each token and expert, and a bias for each expert: the kernel arguments, and which factors count."""

import torch
from cutlass import Uint32

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.memory import DSL_DTYPES
from torch_cute_ops.runtime.argspec import Dim, TensorArg


def factors_argument(m: Dim) -> TensorArg:
    """The factors (M, experts), fp32, of any strides."""
    strides = (Dim("alpha_stride", bits=64), Dim("alpha_column_stride", bits=64))
    return TensorArg("Float32", (m, Dim("experts")), strides, align=4)


def biases_argument(dtype: torch.dtype | None, n: Dim) -> TensorArg | None:
    """The biases (experts, N); ``None``: there are none."""
    return None if dtype is None else TensorArg(DSL_DTYPES[dtype].__name__, (Dim("experts"), n), (n, 1), align=16)


def factor_counts(factor):
    """Whether the pair of a token and an expert is computed: not where its factor is zero, of either sign; NaN
    counts."""
    return (ptx.bits_of(factor) & Uint32(0x7FFFFFFF)) != Uint32(0)
