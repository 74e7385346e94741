"""``mm_fp4_weight_only``: the GEMM of 16-bit activations and an FP4 weight."""

import torch
from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._gemm import Gemm
from torch_cute_ops.ops._signature import ScaleFormat, WeightScaleLayout


@define(Gemm("16-bit", "fp4"), "out")
def mm_fp4_weight_only(
    a: Tensor,
    b: Tensor,
    b_scale: Tensor,
    alpha: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    block_size: int = 16,
    scale_format: ScaleFormat | None = None,
    scale_layout: WeightScaleLayout = "128x4",
    backend: str = "auto",
    static_weight: bool = False,
    prefetch: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """``out[m, n] = alpha · Σ_k a[m, k] · b[k, n] + bias[n]`` of 16-bit activations and an FP4 weight, accumulated in
    fp32 and rounded once.

    The weight is as checkpoints hold it; nothing is repacked. It is decoded exactly and without its global scale: that
    belongs into ``alpha``, as ``1 / global scale``. So it is on Blackwell, too: tensor cores that take FP4 want both
    operands in it, as :func:`mm_fp4` has them. Float16 activations beside an MXFP4 weight, whose scales exceed
    float16's range, are rounded to bfloat16 first.

    Args:
        a: (M, K), bfloat16 or float16.
        b: (K/2, N), uint8 or float4_e2m1fn_x2, two e2m1 codes a byte, element 0 in the low nibble: the transposed view,
            ``weight.t()``, of a row-major (N, K/2).
        b_scale: scales of the weight over (N, K), in ``scale_layout``: float8_e4m3fn (NVFP4), or uint8 or
            float8_e8m0fnu (MXFP4).
        alpha, bias: as for :func:`mm_fp4`.
        out_dtype: bfloat16, float16 or float32; ``None`` means the dtype of ``a``.
        block_size, scale_format: as for :func:`mm_fp4`.
        scale_layout: ``"linear"`` or ``"128x4"``. Scales in the other layout cannot be detected where its shape is the
            same, and give wrong numbers.
        backend, static_weight, prefetch: as for :func:`mm_fp4`.
        out: tensor (M, N) to write into.

    Returns:
        (M, N) in ``out_dtype``. A NaN scale makes its column NaN.

    Raises:
        ValueError, TypeError: as :func:`mm_fp4`.
    """
