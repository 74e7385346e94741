"""``mm_fp4_weight_only``: 16-bit activations times an FP4 matrix."""

from collections.abc import Callable
from typing import Any

import torch

from torch_cute_ops.ops._fp4_product import FP4Product, Given
from torch_cute_ops.runtime.dispatch import is_plain_eager


def _arrange(
    call: Callable[..., Any],
    a: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    alpha: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    block_size: int = 16,
    scale_format: str | None = None,
    scale_layout: str = "128x4",
    backend: str = "auto",
) -> Any:
    choices = (block_size, scale_format, scale_layout)
    dtype = a.dtype if out_dtype is None else out_dtype
    return call(Given(a, b, None, b_scale, alpha, dtype, choices, backend))


_product = FP4Product(
    "mm_fp4_weight_only",
    "Tensor a, Tensor b, Tensor b_scale, Tensor? alpha=None, ScalarType? out_dtype=None, int block_size=16, "
    'str? scale_format=None, str scale_layout="128x4", str backend="auto"',
    _arrange,
)


def mm_fp4_weight_only(
    a: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    alpha: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    block_size: int = 16,
    scale_format: str | None = None,
    scale_layout: str = "128x4",
    backend: str = "auto",
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``out[m, n] = alpha · Σ_k a[m, k] · b[k, n]`` of 16-bit activations and an FP4 weight, summed in fp32 and rounded
    once.

    The weight is as checkpoints hold it: nothing is repacked. It is decoded, exactly, without its global scale;
    ``alpha`` is the place for that: ``1 / global scale``.

    Args:
        a: (M, K), bfloat16 or float16.
        b: (K/2, N), uint8 or float4_e2m1fn_x2, two e2m1 codes a byte, element 0 in the low nibble: the transposed view,
            ``weight.t()``, of a weight (N, K/2).
        b_scale: scales of ``b`` over (N, K), in ``scale_layout``: float8_e4m3fn (NVFP4), or uint8 or float8_e8m0fnu
            (MXFP4).
        alpha: one float32 element on the device; ``None`` means 1.
        out_dtype: bfloat16, float16 or float32; ``None`` means the dtype of ``a``.
        block_size: 16 for NVFP4, 32 for MXFP4.
        scale_format: ``"e4m3"`` (block 16) or ``"ue8m0"`` (block 32); ``None`` follows the block size.
        scale_layout: ``"linear"`` or ``"128x4"``.
        backend: ``"auto"``, or one of those that :func:`backends` tells.
        out: tensor (M, N) to write into.

    Returns:
        (M, N) in ``out_dtype``. A NaN scale makes its column NaN.

    Raises:
        ValueError: for a wrong shape, device, format or layout, for an unknown backend or one that cannot compute this
            call, with its reason, or for an input that requires grad while gradients are on.
        TypeError: for a wrong dtype.
    """
    choices = (block_size, scale_format, scale_layout)
    if is_plain_eager(out, a, b, b_scale, alpha):
        dtype = a.dtype if out_dtype is None else out_dtype
        return _product.run(Given(a, b, None, b_scale, alpha, dtype, choices, backend), out)
    args = (a, b, b_scale, alpha, out_dtype, *choices, backend)
    if out is None:
        return torch.ops.cute.mm_fp4_weight_only.default(*args)
    torch.ops.cute.mm_fp4_weight_only.out(*args, out=out)
    return out


OP = _product.spec(mm_fp4_weight_only)
