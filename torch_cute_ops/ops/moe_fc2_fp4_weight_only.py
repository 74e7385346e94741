"""``moe_fc2_fp4_weight_only``: the second product of an expert layer, 16-bit activations times FP4, added up over the
experts."""

from collections.abc import Callable
from typing import Any

import torch

from torch_cute_ops.ops._fp4_product import FP4Product, Given
from torch_cute_ops.runtime.dispatch import is_plain_eager


def _arrange(
    call: Callable[..., Any],
    a: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    alpha: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    block_size: int = 16,
    scale_format: str | None = None,
    scale_layout: str = "128x4",
    backend: str = "auto",
) -> Any:
    choices = (block_size, scale_format, scale_layout)
    dtype = a.dtype if out_dtype is None else out_dtype
    return call(Given(a, w, None, w_scale, alpha, dtype, choices, backend))


_product = FP4Product(
    "moe_fc2_fp4_weight_only",
    "Tensor a, Tensor w, Tensor w_scale, Tensor alpha, ScalarType? out_dtype=None, int block_size=16, "
    'str? scale_format=None, str scale_layout="128x4", str backend="auto"',
    _arrange,
)


def moe_fc2_fp4_weight_only(
    a: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    alpha: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    block_size: int = 16,
    scale_format: str | None = None,
    scale_layout: str = "128x4",
    backend: str = "auto",
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``out[m, n] = Σ_e alpha[m, e] · (Σ_{k of expert e} a[m, k] · w[n, k])`` of 16-bit activations and an FP4 weight:
    the second product of an expert layer, with the sum over a token's experts in it.

    A row of ``a`` holds a token's activations for every expert, one expert after the other, and a row of ``w`` the
    experts' weights in the same order, so there are ``E·I`` elements for ``E`` experts of ``I``; both follow from the
    shapes. An expert's sum is in fp32, multiplied by ``alpha`` in fp32, and added to those of the experts before it in
    fp32; the total is rounded once. The weight is decoded, exactly, without its global scale.

    Args:
        a: (M, E·I), bfloat16 or float16. ``I`` is a multiple of 64.
        w: (N, E·I/2), uint8 or float4_e2m1fn_x2, two e2m1 codes a byte, element 0 in the low nibble, row-major.
        w_scale: scales of ``w`` over (N, E·I), in ``scale_layout``: float8_e4m3fn (NVFP4), or uint8 or float8_e8m0fnu
            (MXFP4).
        alpha: (M, E) float32 on the device, with any strides: an expert's weight for a token, times
            ``1 / (global scale of w)``. Where it is 0 or -0 nothing is computed: what ``a``, ``w`` and its scales hold
            there does not count, NaN and memory that nobody wrote included.
        out_dtype: bfloat16, float16 or float32; ``None`` means the dtype of ``a``.
        block_size: 16 for NVFP4, 32 for MXFP4.
        scale_format: ``"e4m3"`` (block 16) or ``"ue8m0"`` (block 32); ``None`` follows the block size.
        scale_layout: ``"linear"`` or ``"128x4"``.
        backend: ``"auto"``, or one of those that :func:`backends` tells.
        out: tensor (M, N) to write into.

    Returns:
        (M, N) in ``out_dtype``; 0 in the rows of tokens without experts. A NaN in ``alpha`` makes its token's row NaN,
        a NaN scale its column for the tokens whose ``alpha`` is not 0.

    Raises:
        ValueError: for a wrong shape, device, format or layout, for an unknown backend or one that cannot compute this
            call, with its reason, or for an input that requires grad while gradients are on.
        TypeError: for a wrong dtype.
    """
    choices = (block_size, scale_format, scale_layout)
    if is_plain_eager(out, a, w, w_scale, alpha):
        dtype = a.dtype if out_dtype is None else out_dtype
        return _product.run(Given(a, w, None, w_scale, alpha, dtype, choices, backend), out)
    args = (a, w, w_scale, alpha, out_dtype, *choices, backend)
    if out is None:
        return torch.ops.cute.moe_fc2_fp4_weight_only.default(*args)
    torch.ops.cute.moe_fc2_fp4_weight_only.out(*args, out=out)
    return out


OP = _product.spec(moe_fc2_fp4_weight_only)
