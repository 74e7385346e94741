"""``silu_mul``: SwiGLU's gate of each row."""

from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._row_quant import RowQuant


@define(RowQuant("silu_mul"), "out")
def silu_mul(
    input: Tensor,
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
    swiglu_limit: float | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Gate each row of ``input`` as SwiGLU does.

    In fp32, as by :func:`silu_mul_fp4quant`, and rounded once to the input dtype: by default ``silu(gate) · up``, where
    ``gate`` is the first half of each row of ``input`` and ``up`` the second.

    Args:
        input: (..., 2I), bfloat16, float16 or float32. Rows may be strided; the kernel reads them in place where their
            addresses are multiples of 16 bytes, and from a copy where not, or where I is no multiple of 16.
        swiglu_alpha, swiglu_beta, swiglu_limit: the gate's parameters, as for :func:`silu_mul_fp4quant`.
        out: tensor to write into.

    Returns:
        (..., I) in the input dtype.

    Raises:
        ValueError: for a wrong shape, device or parameter, or an input that requires grad while gradients are on.
        TypeError: for a wrong dtype.
    """
