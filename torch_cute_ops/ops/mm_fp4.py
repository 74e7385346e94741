"""``mm_fp4``: the product of two FP4 matrices."""

from collections.abc import Callable
from typing import Any

import torch

from torch_cute_ops.ops._fp4_product import FP4Product, Given
from torch_cute_ops.runtime.dispatch import is_plain_eager


def _arrange(
    call: Callable[..., Any],
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    alpha: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    block_size: int = 16,
    scale_format: str | None = None,
    scale_layout: str = "128x4",
    backend: str = "auto",
) -> Any:
    choices = (block_size, scale_format, scale_layout)
    return call(Given(a, b, a_scale, b_scale, alpha, out_dtype, choices, backend))


_product = FP4Product(
    "mm_fp4",
    "Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? alpha=None, ScalarType out_dtype=bfloat16, "
    'int block_size=16, str? scale_format=None, str scale_layout="128x4", str backend="auto"',
    _arrange,
)


def mm_fp4(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    alpha: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    block_size: int = 16,
    scale_format: str | None = None,
    scale_layout: str = "128x4",
    backend: str = "auto",
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``out[m, n] = alpha · Σ_k a[m, k] · b[k, n]`` of two FP4 matrices, summed in fp32 and rounded once.

    Operands are as :func:`fp4_quantize` gives them, and as checkpoints hold them: nothing is repacked. They are decoded
    without their global scales; ``alpha`` is the place for those: ``1 / (global scale of a · global scale of b)``.

    Args:
        a: (M, K/2), uint8 or float4_e2m1fn_x2: two e2m1 codes a byte, element 0 in the low nibble.
        b: (K/2, N), the same of the other matrix: the transposed view, ``weight.t()``, of a weight (N, K/2).
        a_scale: scales of ``a`` over (M, K), in ``scale_layout``: float8_e4m3fn (NVFP4), or uint8 or float8_e8m0fnu
            (MXFP4).
        b_scale: scales of ``b`` over (N, K), in ``scale_layout``, or in 128x4 where that is 8x4.
        alpha: one float32 element on the device; ``None`` means 1.
        out_dtype: bfloat16, float16 or float32.
        block_size: 16 for NVFP4, 32 for MXFP4.
        scale_format: ``"e4m3"`` (block 16) or ``"ue8m0"`` (block 32); ``None`` follows the block size.
        scale_layout: ``"linear"``, ``"128x4"`` or ``"8x4"``.
        backend: ``"auto"``, or one of those that :func:`backends` tells.
        out: tensor (M, N) to write into.

    Returns:
        (M, N) in ``out_dtype``. A NaN scale makes its row, or its column, NaN.

    Raises:
        ValueError: for a wrong shape, device, format or layout, for an unknown backend or one that cannot compute this
            call, with its reason, or for an input that requires grad while gradients are on.
        TypeError: for a wrong dtype.
    """
    choices = (block_size, scale_format, scale_layout)
    if is_plain_eager(out, a, b, a_scale, b_scale, alpha):
        return _product.run(Given(a, b, a_scale, b_scale, alpha, out_dtype, choices, backend), out)
    args = (a, b, a_scale, b_scale, alpha, out_dtype, *choices, backend)
    if out is None:
        return torch.ops.cute.mm_fp4.default(*args)
    torch.ops.cute.mm_fp4.out(*args, out=out)
    return out


OP = _product.spec(mm_fp4)
