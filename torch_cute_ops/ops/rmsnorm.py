"""``rmsnorm``: RMSNorm of each row, for GEMMs that take 16-bit activations."""

from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._row_quant import RowQuant


@define(RowQuant(normalises=True), "out")
def rmsnorm(input: Tensor, weight: Tensor, eps: float = 1e-6, *, out: Tensor | None = None) -> Tensor:
    """RMS-normalise each row of ``input``.

    ``norm = v / sqrt(mean(v²) + eps) · weight`` over the last dimension in fp32 (Zhang and Sennrich 2019, eq. 4),
    rounded once to the input dtype: the ``norm`` of :func:`rmsnorm_fp4quant_with_norm`. Behind it
    :func:`mm_fp4_weight_only` starts sooner than behind a kernel that does not release its dependents early.

    Args:
        input: (..., H), bfloat16, float16 or float32. Rows may be strided; the kernel reads them in place where their
            addresses are multiples of 16 bytes, and from a copy where not, or where H is no multiple of 16.
        weight: (H,), in the input dtype or float32.
        eps: added to the mean square.
        out: tensor to write into.

    Returns:
        (..., H) in the input dtype.

    Raises:
        ValueError: for a wrong shape or device, or an input that requires grad while gradients are on.
        TypeError: for a wrong dtype.
    """
