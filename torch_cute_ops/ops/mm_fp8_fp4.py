"""``mm_fp8_fp4``: the GEMM of FP8 activations with block scales and an FP4 weight."""

import torch
from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._gemm import Gemm
from torch_cute_ops.ops._signature import ScaleFormat, WeightScaleLayout


@define(Gemm("fp8", "fp4"), "out")
def mm_fp8_fp4(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
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
    """``out[m, n] = alpha · Σ_j a_scale[j, m] · 2^t[n, j] · (Σ_k a[m, k] · w8[n, k]) + bias[n]`` of FP8 activations and
    an FP4 weight on FP8 tensor cores, with k in the j-th block of 128.

    The weight stays in 4 bits in memory; with many rows, a call makes a copy in FP8 for as long as it takes (backend
    ``recode``, which ``"auto"`` takes where it is faster). The result is as if each row's block of 128 elements was
    re-encoded as ``w8[n, k] = e4m3(e2m1 · block scale · 2^-t[n, j])``, rounded to nearest even, with the least integer
    t for which the block's largest number fits e4m3. For MXFP4 that is exact unless scales within 128 elements are more
    than 2^14 apart. For NVFP4 the codes 0.5, 1, 2 and 4 stay exact, and 1.5, 3 and 6 are rounded by at most 4.8 %,
    since a block scale has 4 significant bits and 1.5 times it up to 6: a Gaussian weight is 9.69 % (rms) off in all,
    where NVFP4 alone is 9.51 % off. :func:`mm_fp4` and :func:`mm_fp4_weight_only` never do this.

    The activations are as the quantising ops write them (``granularity="block128"``, ``scale_layout="column"``). Sums
    are as for :func:`mm_fp8_block`: of each block by the tensor cores, over the blocks in fp32.

    Args:
        a: (M, K), float8_e4m3fn; K a multiple of 64, the last block may have 64 elements.
        b: (K/2, N), uint8 or float4_e2m1fn_x2, two e2m1 codes a byte, element 0 in the low nibble: the transposed view,
            ``weight.t()``, of a row-major (N, K/2); N a multiple of 8.
        a_scale: (⌈K/128⌉, M) float32.
        b_scale: scales of the weight over (N, K), in ``scale_layout``: float8_e4m3fn (NVFP4), or uint8 or
            float8_e8m0fnu (MXFP4). The global scale belongs into ``alpha``, as ``1 / global scale``.
        alpha, bias: as for :func:`mm_fp4`.
        out_dtype: bfloat16, float16 or float32; ``None`` means bfloat16.
        block_size, scale_format: as for :func:`mm_fp4`.
        scale_layout: of ``b_scale``, as for :func:`mm_fp4_weight_only`.
        backend, static_weight, prefetch: as for :func:`mm_fp4`.
        out: tensor (M, N) to write into.

    Returns:
        (M, N) in ``out_dtype``. A NaN scale makes its row, or its column, NaN.

    Raises:
        ValueError, TypeError: as :func:`mm_fp4`.
    """
