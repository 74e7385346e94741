"""``moe_fc2_fp4``: the second GEMM of an expert layer, FP4 times FP4, summed over the experts."""

import torch
from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._gemm import Gemm
from torch_cute_ops.ops._signature import FP4ScaleLayout, ScaleFormat


@define(Gemm("fp4", "fp4", over="k"), "out")
def moe_fc2_fp4(
    a: Tensor,
    w: Tensor,
    a_scale: Tensor,
    w_scale: Tensor,
    alpha: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    block_size: int = 16,
    scale_format: ScaleFormat | None = None,
    scale_layout: FP4ScaleLayout = "128x4",
    backend: str = "auto",
    static_weight: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """``out[m, n] = Σ_e alpha[m, e] · (Σ_k a[m, k] · w[n, k] + bias[e, n])``, k over expert e, of two FP4 matrices: the
    second GEMM of an expert layer, with the weighted sum over a token's experts.

    A row of ``a`` holds a token's activations for every expert, one expert after the other, and a row of ``w`` the
    experts' weights in the same order: ``E·I`` elements for ``E`` experts of ``I``, which both follow from the shapes.
    An expert's sum is accumulated in fp32, its bias added, multiplied by ``alpha`` and added to an fp32 accumulator;
    the total is rounded once. Operands are decoded without their global scales.

    Args:
        a: (M, E·I/2), uint8 or float4_e2m1fn_x2: two e2m1 codes a byte, element 0 in the low nibble. ``I`` is a
            multiple of 64.
        w: (N, E·I/2), the same of the weight, row-major: here it is not transposed.
        a_scale: scales of ``a`` over (M, E·I), in ``scale_layout``: float8_e4m3fn (NVFP4), or uint8 or float8_e8m0fnu
            (MXFP4).
        w_scale: scales of ``w`` over (N, E·I), in ``scale_layout``, or in 128x4 where that is 8x4.
        alpha: (M, E) float32 on the device, with any strides: an expert's weight for a token, times
            ``1 / (global scale of a · global scale of w)``, as :func:`moe_route_dense` writes it. Where it is 0 or -0
            nothing is computed, whatever ``a``, ``w`` and their scales hold there: NaN, or uninitialised memory.
        bias: (E, N), float32 or in the result's dtype: what each expert adds. It is multiplied by ``alpha`` too, so
            callers divide it by what ``alpha`` holds of global scales. Where ``alpha`` is 0 it adds nothing.
        out_dtype: bfloat16, float16 or float32; ``None`` means bfloat16.
        block_size, scale_format: as for :func:`mm_fp4`.
        scale_layout: ``"linear"``, ``"128x4"`` or ``"8x4"``. Scales in another layout whose shape is the same cannot be
            detected, and give wrong numbers.
        backend, static_weight: as for :func:`mm_fp4`.
        out: tensor (M, N) to write into.

    Returns:
        (M, N) in ``out_dtype``; 0 for tokens without experts. A NaN in ``alpha`` makes its token's row NaN, a NaN scale
        what it is multiplied with where ``alpha`` is not 0.

    Raises:
        ValueError: for a wrong shape, device, format or layout; for a backend that is unknown or cannot compute the
            call, with its reason; or for an input that requires grad while gradients are on.
        TypeError: for a wrong dtype.
    """
