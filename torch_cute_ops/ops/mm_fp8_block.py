"""``mm_fp8_block``: GEMM of two FP8 matrices with block scales."""

import torch
from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._fp8_gemm import FP8Gemm


@define(FP8Gemm("fp8"), "out")
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
    """Multiply two FP8 matrices with block scales of 128 elements, or two MXFP8 matrices.

    A block contains 128 elements of k, or 32 in MXFP8. The weight has a scale for each 128 rows or, always in MXFP8,
    for each row. With k in the j-th block::

        sum[m, n] = Σ_j a_scale[m, j] · b_scale[n // 128, j] · (Σ_k a[m, k] · b[k, n])
        sum[m, n] = Σ_j a_scale[m, j] · b_scale[n, j] · (Σ_k a[m, k] · b[k, n])
        out[m, n] = alpha · sum[m, n] + bias[n]

    Operands are stored as the quantising ops write them (``granularity="block128"`` or ``"block32"``) and as
    checkpoints such as DeepSeek-V3 hold them. The dtype of the scales says which: float32, or bytes for MXFP8. The
    tensor cores accumulate one block at a time. The block's sum, times both scales, is added to an fp32 accumulator, so
    that the error of the tensor cores' own accumulation does not grow with K. The result is rounded once to
    ``out_dtype``.

    For MXFP8, this holds only for ``mma_sync`` on compute capabilities 9.0, 10.0 and 10.3. ``tcgen05``, and
    ``mma_sync`` on 12.0 and 12.1, use block-scaled MMAs, which apply the scales and accumulate over all of K. On
    Hopper, ``"auto"`` takes ``wgmma``. It converts the scales of each 128 elements, or of each weight row, to one
    scale, the largest, which rounds elements below 2^-6 times this scale to multiples of 2^-9 times it. It needs M · K,
    or with many rows K · (N + M), bytes of temporary memory.

    Args:
        a: (M, K) float8_e4m3fn; K is a multiple of 64, so the last block of 128 may contain 64 elements.
        b: (K, N) float8_e4m3fn: the transposed view ``weight.t()`` of a row-major (N, K); N is a multiple of 8. A
            row-major tensor is refused. No check can detect a square weight that is stored transposed.
        a_scale: (M, ⌈K/128⌉) float32, block scales of ``a``. Column-major scales, as the quantising ops write them, are
            read in place, even with padding between the columns; scales with other strides are copied first. Pass
            scales (⌈K/128⌉, M) as ``a_scale.mT``: if M = ⌈K/128⌉, no check can detect that the scales are transposed.
            MXFP8: uint8 or float8_e8m0fnu, linear (M, K/32) or tiled as the quantising ops write them.
        b_scale: (⌈N/128⌉, ⌈K/128⌉) float32, row-major, scales of blocks of 128 weight rows by 128 elements of k. A
            transposed view is refused. Square scales that were transposed and then made contiguous cannot be detected.
            ``b_scale`` may also be (N, ⌈K/128⌉) float32, scales of each weight row, as ``fp8_quantize`` writes them.
            Column-major scales are read in place, scales with other strides are copied first.
            MXFP8: uint8 or float8_e8m0fnu, linear (N, K/32) or tiled. ``tcgen05`` reads scales in the layout 128x4 in
            place, and ``wgmma`` and ``mma_sync`` linear scales if K is a multiple of 128. Other scales are rearranged
            in each call.
        alpha: float32 tensor on the same device, one element or (N,): one factor for all columns, or one factor per
            column. ``None`` means 1.
        bias: (N,) float32 or the dtype of the result, added in fp32 after ``alpha``.
        out_dtype: dtype of the result: bfloat16, float16 or float32. ``None`` means bfloat16.
        backend: name of a backend that :func:`backends` lists. ``"auto"`` takes the backend that :func:`autotune`
            measured as fastest, or without measurements the backend with the least estimated time.
        static_weight: promise that ``b`` and ``b_scale`` were written before the previous launch on the stream, and
            have not changed since. The kernel may then read the weight before the previous launch ends.
        prefetch: contiguous matrix of 1-byte elements that a later launch reads, such as the row-major weight of the
            next GEMM. Its rows are a multiple of 16 bytes long. On Hopper, GEMMs with tiles of up to 64 rows load the
            first 8 MB of this matrix into L2 after their own operands. Its contents do not affect the result, and may
            change during the call.
        out: contiguous (M, N) tensor to write the result into.

    Returns:
        (M, N) in ``out_dtype``.

    Raises:
        ValueError: If a shape, device, format or layout is wrong; if ``b`` is not a transposed view; if the backend is
            unknown or cannot compute the call (the message gives the reason); or if an input requires grad while
            gradients are enabled.
        TypeError: If a dtype is wrong.

    Example:
        >>> import torch
        >>> from torch_cute_ops import fp8_quantize, mm_fp8_block
        >>> x = torch.zeros(1, 128)
        >>> x[0, :8], x[0, -1] = torch.arange(8.0), 448.0  # amax 448, so that the scale is 1
        >>> a, a_scale = fp8_quantize(x, granularity="block128")
        >>> weight = torch.eye(8, 128).to(torch.float8_e4m3fn)  # row n takes element n
        >>> mm_fp8_block(a, weight.t(), a_scale, torch.full((1, 1), 0.5)).tolist()
        [[0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]]

    References:
        DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3.2. Roundings and special values:
        docs/numerics.md, "FP8 with block scales". MXFP8: Open Compute Project, "OCP Microscaling Formats (MX)
        Specification", version 1.0, 2023.
    """
