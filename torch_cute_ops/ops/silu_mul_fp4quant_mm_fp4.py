"""``silu_mul_fp4quant_mm_fp4``: SwiGLU's gate, FP4 quantisation, and the GEMM with an FP4 weight."""

import torch
from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._gemm import Gemm
from torch_cute_ops.ops._signature import ScaleFormat, WeightScaleLayout


@define(Gemm("16-bit", "fp4", gates_input=True, quantises_input=True), "out")
def silu_mul_fp4quant_mm_fp4(
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
    """:func:`mm_fp4` of :func:`silu_mul_fp4quant`: the down projection of a layer with SwiGLU and FP4 activations, from
    what the merged projection of gate and up gives.

    ``out[m, n] = alpha · Σ_k q[m, k] · b[k, n] + bias[n]`` with ``q`` the codes of ``silu(gate) · up``, which is not
    rounded before, times their scales. The results are those of the two ops by the same backend and tactic, to the bit.
    On Hopper up to 8 rows can be one launch, in which the CTAs gate and quantise what they multiply. All else is two.

    Args:
        a: (M, 2K), bfloat16 or float16: ``gate`` is the first half of each row, ``up`` the second.
        b: (K/2, N), uint8 or float4_e2m1fn_x2, two e2m1 codes a byte, element 0 in the low nibble: the transposed view,
            ``weight.t()``, of a row-major (N, K/2).
        b_scale, global_scale, alpha, bias, out_dtype: as for :func:`fp4quant_mm_fp4`.
        block_size, scale_format, scale_layout, backend, static_weight, prefetch: the same.
        out: tensor (M, N) to write into.

    Returns:
        (M, N) in ``out_dtype``. A row with NaN or infinity in it is NaN, and so is the column of a NaN scale.

    Raises:
        ValueError, TypeError: as :func:`fp4quant_mm_fp4`.
    """
