"""``add_rmsnorm``: residual addition and RMSNorm of each row, in one pass."""

from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._row_quant import RowQuant
from torch_cute_ops.ops._signature import UpdatedTensor


@define(RowQuant("add", normalises=True), "out")
def add_rmsnorm(
    input: Tensor, residual: UpdatedTensor, weight: Tensor, eps: float = 1e-6, *, out: Tensor | None = None
) -> Tensor:
    """Add ``input`` to ``residual`` in place, and RMS-normalise each row of the sum, in one pass.

    The same bits as ``residual += input`` and then :func:`rmsnorm` of it.

    Args:
        input: (..., H), read as by :func:`rmsnorm`.
        residual: as for :func:`add_rmsnorm_fp4quant`; it is updated.
        weight, eps: as for :func:`rmsnorm`.
        out: tensor to write into.

    Returns:
        (..., H) in the input dtype.

    Raises:
        ValueError, TypeError: as :func:`rmsnorm`, and for a residual that is not like ``input``.
    """
