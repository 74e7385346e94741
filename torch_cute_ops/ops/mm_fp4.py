"""``mm_fp4``: the GEMM of two FP4 matrices."""

import torch
from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._gemm import Gemm
from torch_cute_ops.ops._signature import FP4ScaleLayout, ScaleFormat


@define(Gemm("fp4", "fp4"), "out")
def mm_fp4(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    alpha: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    block_size: int = 16,
    scale_format: ScaleFormat | None = None,
    scale_layout: FP4ScaleLayout = "128x4",
    backend: str = "auto",
    static_weight: bool = False,
    prefetch: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """``out[m, n] = alpha · Σ_k a[m, k] · b[k, n] + bias[n]`` of two FP4 matrices, accumulated in fp32, rounded once.

    Operands are as :func:`fp4_quantize` writes them and as checkpoints hold them; nothing is repacked. They are decoded
    without their global scales: those belong into ``alpha``, as ``1 / (global scale of a · global scale of b)``.

    Args:
        a: (M, K/2), uint8 or float4_e2m1fn_x2: two e2m1 codes a byte, element 0 in the low nibble.
        b: (K/2, N), the same of the weight: the transposed view, ``weight.t()``, of a row-major (N, K/2).
        a_scale: scales of ``a`` over (M, K), in ``scale_layout``: float8_e4m3fn (NVFP4), or uint8 or float8_e8m0fnu
            (MXFP4).
        b_scale: scales of the weight over (N, K), in ``scale_layout``, or in 128x4 where that is 8x4.
        alpha: float32 on the device: one element, or (N,), one for each column, as merged projections with different
            global scales need it; ``None`` means 1.
        bias: (N,), float32 or the result's dtype: added in fp32 after ``alpha``, before the one rounding.
        out_dtype: bfloat16, float16 or float32; ``None`` means bfloat16.
        block_size: 16 for NVFP4, 32 for MXFP4.
        scale_format: ``"e4m3"`` (block 16) or ``"ue8m0"`` (block 32); ``None`` follows the block size.
        scale_layout: ``"linear"``, ``"128x4"`` or ``"8x4"``. Scales in another layout whose shape is the same cannot be
            detected, and give wrong numbers.
        backend: ``"auto"``: the fastest that :func:`autotune` measured, or else the one with the least estimated time;
            or the name of one that :func:`backends` lists.
        static_weight: the promise that ``b`` and ``b_scale`` were complete before the previous launch on the stream, so
            that they may be read ahead of it.
        prefetch: what a later launch reads, such as the weight of the next GEMM by rows: a contiguous matrix of bytes,
            whose rows are multiples of 16 bytes. On Hopper a tile of up to 16 rows has its first 8 MB brought into L2
            when it has nothing else to load. It changes no result, and may be written at the same time.
        out: tensor (M, N) to write into.

    Returns:
        (M, N) in ``out_dtype``. A NaN scale makes its row, or its column, NaN.

    Raises:
        ValueError: for a wrong shape, device, format or layout; for ``b`` untransposed, where that can be detected; for
            a backend that is unknown or cannot compute the call, with its reason; or for an input that requires grad
            while gradients are on.
        TypeError: for a wrong dtype.
    """
