"""``moe_fc2_fp4_weight_only``: the second GEMM of an expert layer, 16-bit activations times FP4, summed over the
experts."""

import torch
from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._gemm import Gemm
from torch_cute_ops.ops._signature import ScaleFormat, WeightScaleLayout


@define(Gemm("16-bit", "fp4", over="k"), "out")
def moe_fc2_fp4_weight_only(
    a: Tensor,
    w: Tensor,
    w_scale: Tensor,
    alpha: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    block_size: int = 16,
    scale_format: ScaleFormat | None = None,
    scale_layout: WeightScaleLayout = "128x4",
    backend: str = "auto",
    static_weight: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """``out[m, n] = Σ_e alpha[m, e] · (Σ_k a[m, k] · w[n, k] + bias[e, n])``, k over expert e, of 16-bit activations
    and an FP4 weight: the second GEMM of an expert layer, with the weighted sum over a token's experts.

    A row of ``a`` holds a token's activations for every expert, one expert after the other, and a row of ``w`` the
    experts' weights in the same order: ``E·I`` elements for ``E`` experts of ``I``, which both follow from the shapes.
    An expert's sum is accumulated in fp32, its bias added, multiplied by ``alpha`` and added to an fp32 accumulator;
    the total is rounded once. The weight is decoded exactly and without its global scale. Float16 activations beside
    an MXFP4 weight, whose scales exceed float16's range, are rounded to bfloat16 first.

    Args:
        a: (M, E·I), bfloat16 or float16. ``I`` is a multiple of 64.
        w: (N, E·I/2), uint8 or float4_e2m1fn_x2, two e2m1 codes a byte, element 0 in the low nibble, row-major: here
            it is not transposed.
        w_scale: scales of ``w`` over (N, E·I), in ``scale_layout``: float8_e4m3fn (NVFP4), or uint8 or float8_e8m0fnu
            (MXFP4).
        alpha: (M, E) float32 on the device, with any strides: an expert's weight for a token, times
            ``1 / (global scale of w)``, as :func:`moe_route_dense` writes it. Where it is 0 or -0 nothing is computed,
            whatever ``a``, ``w`` and its scales hold there: NaN, or uninitialised memory.
        bias: (E, N), float32 or in the result's dtype: what each expert adds. It is multiplied by ``alpha`` too, so
            callers divide it by what ``alpha`` holds of global scales. Where ``alpha`` is 0 it adds nothing.
        out_dtype: bfloat16, float16 or float32; ``None`` means the dtype of ``a``.
        block_size, scale_format: as for :func:`mm_fp4`.
        scale_layout: ``"linear"`` or ``"128x4"``; as for :func:`mm_fp4_weight_only`, another of the same shape is not
            detected.
        backend, static_weight: as for :func:`mm_fp4`.
        out: tensor (M, N) to write into.

    Returns:
        (M, N) in ``out_dtype``; 0 for tokens without experts. A NaN in ``alpha`` makes its token's row NaN, a NaN scale
        its column for the tokens whose ``alpha`` is not 0.

    Raises:
        ValueError, TypeError: as :func:`moe_fc2_fp4`.
    """
