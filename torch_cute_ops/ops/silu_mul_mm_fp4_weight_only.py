"""``silu_mul_mm_fp4_weight_only``: SwiGLU's gate, and the GEMM of its 16-bit results and an FP4 weight."""

import torch
from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._gemm import Gemm
from torch_cute_ops.ops._signature import ScaleFormat, WeightScaleLayout


@define(Gemm("16-bit", "fp4", gates_input=True), "out")
def silu_mul_mm_fp4_weight_only(
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
    """:func:`mm_fp4_weight_only` of :func:`silu_mul`: the down projection of a layer with SwiGLU, from what the merged
    projection of gate and up gives.

    ``out[m, n] = alpha · Σ_k h[m, k] · b[k, n] + bias[n]`` with ``h = silu(gate) · up``, rounded to the dtype of ``a``.
    The results are those of the two ops by the same backend and tactic, to the bit. On Hopper it can be one launch, in
    which the CTAs gate the rows that they multiply: for few rows, as in decoding. Elsewhere it is two.

    Args:
        a: (M, 2K), bfloat16 or float16: ``gate`` is the first half of each row, ``up`` the second.
        b: (K/2, N), uint8 or float4_e2m1fn_x2, two e2m1 codes a byte, element 0 in the low nibble: the transposed view,
            ``weight.t()``, of a row-major (N, K/2).
        b_scale, alpha, bias, out_dtype, block_size, scale_format, scale_layout, backend, static_weight, prefetch: as
            for :func:`mm_fp4_weight_only`.
        out: tensor (M, N) to write into.

    Returns:
        (M, N) in ``out_dtype``. A NaN scale makes its column NaN.

    Raises:
        ValueError, TypeError: as :func:`mm_fp4`.
    """
