"""``mm_fp8_block``: the GEMM of two FP8 matrices with block scales."""

import torch
from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._gemm import Gemm


@define(Gemm("fp8", "fp8"), "out")
def mm_fp8_block(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    alpha: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
    static_weight: bool = False,
    prefetch: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """``out[m, n] = alpha · Σ_j a_scale[j, m] · b_scale[n // 128, j] · (Σ_k a[m, k] · b[k, n]) + bias[n]`` of two FP8
    matrices, with k in the j-th block of 128.

    Operands are as the quantising ops write them (``granularity="block128"``, ``scale_layout="column"``) and as
    checkpoints like DeepSeek-V3's hold them. Tensor cores accumulate one block at a time; the block's sum, multiplied
    by both scales, is added to an fp32 accumulator, so that the error of the tensor cores' own accumulation does not
    grow with K.

    Args:
        a: (M, K), float8_e4m3fn; K a multiple of 64, the last block may have 64 elements.
        b: (K, N), the same of the weight: the transposed view, ``weight.t()``, of a row-major (N, K); N a multiple of
            8.
        a_scale: (⌈K/128⌉, M) float32.
        b_scale: (⌈N/128⌉, ⌈K/128⌉) float32, for blocks of 128 rows of the weight and 128 elements of k.
        alpha: float32 on the device: one element, or (N,), one for each column; ``None`` means 1.
        bias: (N,), float32 or the result's dtype: added in fp32 after ``alpha``, before the one rounding.
        out_dtype: bfloat16, float16 or float32; ``None`` means bfloat16.
        backend: ``"auto"``: the fastest that :func:`autotune` measured, or else the one with the least estimated time;
            or the name of one that :func:`backends` lists.
        static_weight: the promise that ``b`` and ``b_scale`` were complete before the previous launch on the stream, so
            that they may be read ahead of it.
        prefetch: as for :func:`mm_fp4`, of tiles of up to 64 rows.
        out: tensor (M, N) to write into.

    Returns:
        (M, N) in ``out_dtype``.

    Raises:
        ValueError: for a wrong shape, device, format or layout; for ``b`` untransposed, where that can be detected; for
            a backend that is unknown or cannot compute the call, with its reason; or for an input that requires grad
            while gradients are on.
        TypeError: for a wrong dtype.
    """
