"""``fp4quant_mm_fp4``: FP4 quantisation of 16-bit activations, and their GEMM with an FP4 weight."""

import torch
from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._gemm import Gemm
from torch_cute_ops.ops._signature import ScaleFormat, WeightScaleLayout


@define(Gemm("16-bit", "fp4", quantises_input=True), "out")
def fp4quant_mm_fp4(
    a: Tensor,
    b: Tensor,
    b_scale: Tensor,
    global_scale: Tensor | None = None,
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
    """:func:`mm_fp4` of :func:`fp4_quantize`: a projection with FP4 activations, such as that behind attention.

    ``out[m, n] = alpha · Σ_k q[m, k] · b[k, n] + bias[n]`` with ``q`` the codes of ``a`` times their scales. The
    results are those of the two ops by the same backend and tactic, to the bit. On Hopper up to 8 rows can be
    one launch, in which the CTAs quantise what they multiply, as decoding with few sequences needs it. All else is two.

    Args:
        a: (M, K), bfloat16 or float16.
        b: (K/2, N), uint8 or float4_e2m1fn_x2, two e2m1 codes a byte, element 0 in the low nibble: the transposed view,
            ``weight.t()``, of a row-major (N, K/2).
        b_scale, bias, block_size, scale_format, scale_layout, backend, static_weight, prefetch: as for
            :func:`mm_fp4`.
        global_scale: as for :func:`fp4_quantize`: one float32 element, NVFP4 only; ``None`` means 1.
        alpha: as for :func:`mm_fp4`: it has ``1 / (global_scale · global scale of b)``.
        out_dtype: bfloat16, float16 or float32; ``None`` means the dtype of ``a``.
        out: tensor (M, N) to write into.

    Returns:
        (M, N) in ``out_dtype``. A row with NaN or infinity in it is NaN, and so is the column of a NaN scale.

    Raises:
        ValueError, TypeError: as :func:`mm_fp4` and :func:`fp4_quantize`.
    """
