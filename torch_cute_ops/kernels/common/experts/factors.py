"""Kernel arguments with a factor for each token and expert, and with a bias for each expert."""

import torch
from cutlass import Uint32

from torch_cute_ops.kernels.common.core import ptx
from torch_cute_ops.kernels.common.core.memory import DSL_DTYPES
from torch_cute_ops.runtime.argspec import Dim, TensorArg


def factors_argument(m: Dim) -> TensorArg:
    """Return the argument for factors (M, experts), float32, with any strides."""
    strides = (Dim("alpha_stride", bits=64), Dim("alpha_column_stride", bits=64))
    return TensorArg("Float32", (m, Dim("experts")), strides, align=4)


def biases_argument(dtype: torch.dtype | None, n: Dim) -> TensorArg | None:
    """Return the argument for biases (experts, N), or None without biases."""
    return None if dtype is None else TensorArg(DSL_DTYPES[dtype].__name__, (Dim("experts"), n), (n, 1), align=16)


def factor_counts(factor):
    """Return whether a pair of a token and an expert is computed: False for a factor of zero of either sign, True for
    NaN."""
    return (ptx.bits_of(factor) & Uint32(0x7FFFFFFF)) != Uint32(0)
