"""``mm_fp8``: GEMM of two FP8 matrices. Each matrix has a scale per row (token or channel), or a scale per tensor."""

import torch
from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._fp8_gemm import TokenFP8Gemm


@define(TokenFP8Gemm(), "out")
def mm_fp8(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
    static_weight: bool = False,
    prefetch: Tensor | None = None,
    fast_accum: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply two FP8 matrices with per-token or per-tensor scales of ``a``, and per-channel or per-tensor scales of
    ``b``.

    The sum, each product with a scale, and the addition of the bias are rounded to fp32::

        out[m, n] = (Σ_k a[m, k] · b[k, n]) · a_scale[m] · b_scale[n] + bias[n]

    The result is rounded once to ``out_dtype``. Operands are stored as :func:`fp8_quantize` writes them
    (``granularity="token"`` or ``"tensor"``) and as FP8 checkpoints of ModelOpt and compressed-tensors hold them.

    Args:
        a: (M, K) float8_e4m3fn; K is a multiple of 64.
        b: (K, N) float8_e4m3fn: the transposed view ``weight.t()`` of a row-major (N, K); N is a multiple of 8. A
            row-major tensor is refused. No check can detect a square weight that is stored transposed.
        a_scale: (M, 1) float32, one scale per row of ``a``; or (1,), one scale for all rows.
        b_scale: (N,) float32, one scale per column of the result; or (1,), one scale for all columns.
        bias: (N,) float32 or the dtype of the result, added in fp32 after the scales.
        out_dtype: dtype of the result: bfloat16, float16 or float32. ``None`` means bfloat16.
        backend: name of a backend that :func:`backends` lists. ``"auto"`` takes the backend that :func:`autotune`
            measured as fastest, or without measurements the backend with the least estimated time.
        static_weight: promise that ``b`` and ``b_scale`` were written before the previous launch on the stream, and
            have not changed since. The kernel may then read the weight before the previous launch ends.
        prefetch: contiguous matrix of 1-byte elements that a later launch reads, such as the row-major weight of the
            next GEMM. Its rows are a multiple of 16 bytes long. On Hopper, GEMMs with tiles of up to 64 rows load the
            first 8 MB of this matrix into L2 after their own operands. Its contents do not affect the result, and may
            change during the call.
        fast_accum: False to add partial sums of at most 512 elements of K in fp32, True to accumulate all of K in the
            tensor cores, which keep about 14 bits. Sums of terms of one sign then come out too small: on an H200 by 5.7
            % for K = 4,096 and by 18.7 % for K = 14,336, compared with 0.2 % without ``fast_accum``. On Gaussian data
            they are off by 0.03 % or less. The corresponding argument in PyTorch is ``use_fast_accum``. The backend
            ``mma_sync`` ignores ``fast_accum`` and adds partial sums of 128 elements in fp32. On data-center
            Blackwell, the backend ``tcgen05`` ignores ``fast_accum``: it accumulates in fp32 in tensor memory, over all
            of K or, with split-K, over a CTA's range of K. The error of this sum has not been measured.
        out: contiguous (M, N) tensor to write the result into.

    Returns:
        (M, N) in ``out_dtype``.

    Raises:
        ValueError: If a shape, device or layout is wrong; if ``b`` is not a transposed view; if the backend is unknown
            or cannot compute the call (the message gives the reason); or if an input requires grad while gradients are
            enabled.
        TypeError: If a dtype is wrong.

    Example:
        >>> import torch
        >>> from torch_cute_ops import fp8_quantize, mm_fp8
        >>> x = torch.zeros(1, 64)
        >>> x[0, :8], x[0, -1] = torch.arange(8.0), 448.0  # amax 448, so that the scale is 1
        >>> a, a_scale = fp8_quantize(x)  # a scale for each token
        >>> weight = torch.eye(8, 64).to(torch.float8_e4m3fn)  # row n takes element n
        >>> mm_fp8(a, weight.t(), a_scale, torch.arange(8.0)).tolist()  # a scale for each channel
        [[0.0, 1.0, 4.0, 9.0, 16.0, 25.0, 36.0, 49.0]]

    References:
        Micikevicius et al., "FP8 Formats for Deep Learning", 2022. Accumulation of Hopper's tensor cores: DeepSeek-AI,
        "DeepSeek-V3 Technical Report", 2024, section 3.3.2. Roundings and special values: docs/numerics.md, "FP8 with
        per-token scales".
    """
