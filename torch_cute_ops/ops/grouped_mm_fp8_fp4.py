"""``grouped_mm_fp8_fp4``: a GEMM for each expert, of FP8 activations with block scales and FP4 weights."""

import torch
from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._gemm import Gemm
from torch_cute_ops.ops._signature import ScaleFormat, WeightScaleLayout


@define(Gemm("fp8", "fp4", over="rows"), "out")
def grouped_mm_fp8_fp4(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    offsets: Tensor | None = None,
    counts: Tensor | None = None,
    alpha: Tensor | None = None,
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
    """``out[r] = a[r] @ b[e].T`` for the rows ``r`` of each expert ``e``: FP8 activations with block scales, as
    :func:`grouped_mm_fp8` takes them, and FP4 weights, re-encoded as :func:`mm_fp8_fp4` does.

    Which rows an expert has, and what becomes of the others, is as for :func:`grouped_mm_fp8`. An expert pipeline in
    FP8 (``moe_permute_fp8quant``, ``grouped_mm_fp8``, ``moe_swiglu_fp8quant``, ``grouped_mm_fp8``, ``moe_finalize``)
    takes FP4 weights by this op in place of both GEMMs.

    Args:
        a: (R, K), float8_e4m3fn; K a multiple of 64, the last block may have 64 elements. Masked: (E, max_rows, K).
        b: (E, N, K/2), uint8 or float4_e2m1fn_x2, two e2m1 codes a byte, contiguous; N a multiple of 8, E at most 512.
        a_scale: (⌈K/128⌉, R) float32. Masked: (⌈K/128⌉, E, max_rows).
        b_scale: scales of the weights, as :func:`fp4_quantize` of all together writes them: linear,
            (E, N, K/block_size), or tiled over the E·N rows, where a tile may hold rows of two experts.
        offsets, counts: as for :func:`grouped_mm_fp8`.
        alpha: float32 on the device: one element, (E,), one for each expert, or (E, N), one for each of its columns;
            ``None`` means 1.
        bias: (E, N), float32 or the result's dtype: added in fp32 after ``alpha``, before the one rounding.
        out_dtype: bfloat16, float16 or float32; ``None`` means bfloat16.
        block_size, scale_format, scale_layout, backend, static_weight: as for :func:`mm_fp8_fp4`.
        out: tensor like the result to write into.

    Returns:
        (R, N) in ``out_dtype``, unspecified in rows of padding. Masked: (E, max_rows, N).

    Raises:
        ValueError, TypeError: as :func:`grouped_mm_fp8`.
    """
