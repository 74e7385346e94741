"""``mm_fp8_fp4``: GEMM of FP8 activations, with block scales or per-token scales, and an FP4 weight."""

import torch
from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._fp8_gemm import FP8Gemm
from torch_cute_ops.ops._signature import ScaleFormat, WeightScaleLayout


@define(FP8Gemm("fp4"), "out")
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
    scale_layout: WeightScaleLayout | None = None,
    backend: str = "auto",
    static_weight: bool = False,
    prefetch: Tensor | None = None,
    fast_accum: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply FP8 activations by an FP4 weight, on FP8 tensor cores. The activations have block scales or per-token
    scales.

    The weight is re-encoded in FP8, with powers of two as scales. With block scales, and k in the j-th block of 128::

        w8[n, k] = e4m3(e2m1 · block scale · 2^-t[n, j])
        sum[m, n] = Σ_j a_scale[m, j] · 2^t[n, j] · (Σ_k a[m, k] · w8[n, k])
        out[m, n] = alpha · sum[m, n] + bias[n]

    With per-token scales, all elements of a weight row share one power of two::

        w8[n, k] = e4m3(e2m1 · block scale · 2^-u[n])
        out[m, n] = (Σ_k a[m, k] · w8[n, k]) · a_scale[m] · (alpha · 2^u[n]) + bias[n]

    ``t`` is the least integer with ``6 · block scale · 2^-t ≤ 448`` for all scales of a row and block, so that all
    numbers fit e4m3. ``u`` is the least integer with ``6 · block scale · 2^-u ≤ 448`` for all scales of a row. Codes
    are rounded to nearest even. For MXFP4, the conversion of a block is exact if its scale is at least 2^-14 times the
    largest scale among the same 128 elements (block scales) or in the same row (per-token scales). Numbers in other
    blocks are rounded by up to 2^-10 · 2^t (block scales) or 2^-10 · 2^u (per-token scales). For NVFP4, elements of
    magnitude 0.5, 1, 2 and 4 stay exact; 1.5, 3 and 6 are rounded by up to 4.8 %, because e4m3 holds 4 significant
    bits, and the product of such an element and a block scale needs up to 6 bits. For a Gaussian weight, the relative
    rms error is 9.69 % with ``t`` and with ``u``, compared with 9.51 % before the weight is re-encoded. :func:`mm_fp4`
    and :func:`mm_fp4_weight_only` never re-encode.

    The weight stays in 4 bits in memory. With block scales and many rows, ``"auto"`` may take the backend ``recode``,
    which holds an FP8 copy of the weight for the duration of the call. Activations are stored as the quantising ops
    write them (``granularity="block128"``, ``"token"`` or ``"tensor"``). Sums are accumulated as in
    :func:`mm_fp8_block`, or with per-token scales as in :func:`mm_fp8`, and rounded once to ``out_dtype``.

    Args:
        a: (M, K) float8_e4m3fn; K is a multiple of 64, so the last block of 128 may contain 64 elements. With per-token
            scales, ``a`` may also be (M, ⌈K/256⌉, 256), as :func:`interleave_k` returns it; kernels then need not
            reorder the rows. If K is 256, flatten activations (B, 1, 256) that are not interleaved first, because they
            have the shape of interleaved activations.
        b: (K/2, N) uint8 or float4_e2m1fn_x2, two e2m1 codes per byte, element 0 in the low nibble: the transposed view
            ``weight.t()`` of a row-major (N, K/2); N is a multiple of 8. A row-major tensor is refused. No check can
            detect a square weight that is stored transposed.
        a_scale: (M, ⌈K/128⌉) float32, block scales of ``a``. Column-major scales, as the quantising ops write them, are
            read in place, even with padding between the columns; scales with other strides are copied first. Pass
            scales (⌈K/128⌉, M) as ``a_scale.mT``: if M = ⌈K/128⌉, no check can detect that the scales are transposed.
            Per-token scales are (M, 1), one scale per row, or (1,), one scale for all rows.
        b_scale: block scales of the weight as an (N, K) matrix: 128x4 (⌈N/128⌉, ⌈K/B/4⌉, 32, 4, 4) as
            :func:`fp4_quantize` writes them, or linear (N, K/B), with B the block size. The dtype is float8_e4m3fn
            (NVFP4), or uint8 or float8_e8m0fnu (MXFP4). With per-token scales, ``b_scale`` may also be prepared scales,
            uint8 (1 + ⌈K/256⌉, N, 256/B), which :func:`prepare_scales` computes once from the block scales.
        alpha: float32 tensor on the same device, one element or (N,): one factor for all columns, or one factor per
            column. To divide out the weight's global scale ``g_b``, pass ``1 / g_b``. ``None`` means 1.
        bias: (N,) float32 or the dtype of the result, added in fp32 after ``alpha``.
        out_dtype: dtype of the result: bfloat16, float16 or float32. ``None`` means bfloat16.
        block_size: elements per block scale: 16 for NVFP4, 32 for MXFP4.
        scale_format: format of the block scales: ``"e4m3"`` (blocks of 16) or ``"ue8m0"`` (blocks of 32). ``None``
            means the format for ``block_size``.
        scale_layout: expected layout of the weight's scales: ``"128x4"`` or ``"linear"``. ``None`` derives the layout
            from the shape. If a layout is given, tiled scales may also have another library's shape: flat (torchao), or
            a padded matrix (FlashInfer, vLLM, cuBLAS). With ``None``, a padded matrix that has the shape of linear
            scales is read as linear scales. With prepared scales, pass ``None``.
        backend: name of a backend that :func:`backends` lists. ``"auto"`` takes the backend that :func:`autotune`
            measured as fastest, or without measurements the backend with the least estimated time.
        static_weight: promise that ``b`` and ``b_scale`` were written before the previous launch on the stream, and
            have not changed since. The kernel may then read the weight before the previous launch ends.
        prefetch: contiguous matrix of 1-byte elements that a later launch reads, such as the row-major weight of the
            next GEMM. Its rows are a multiple of 16 bytes long. On Hopper, GEMMs with tiles of up to 16 rows load the
            first 8 MB of this matrix into L2 after their own operands. Its contents do not affect the result, and may
            change during the call.
        fast_accum: accumulation of calls with per-token scales, as in :func:`mm_fp8`. It has no effect on calls with
            block scales.
        out: contiguous (M, N) tensor to write the result into.

    Returns:
        (M, N) in ``out_dtype``. A NaN scale of ``a`` gives a row of NaN; a NaN scale of ``b`` gives a column of NaN.

    Raises:
        ValueError: If a shape, device, format or layout is wrong; if ``b`` is not a transposed view; if the backend is
            unknown or cannot compute the call (the message gives the reason); or if an input requires grad while
            gradients are enabled.
        TypeError: If a dtype is wrong.

    Example:
        >>> import torch
        >>> from torch_cute_ops import fp4_quantize, fp8_quantize, mm_fp8_fp4
        >>> x = torch.zeros(1, 128)
        >>> x[0, :8], x[0, -1] = torch.arange(8.0), 448.0  # amax 448, so that the scale is 1
        >>> a, a_scale = fp8_quantize(x, granularity="block128")
        >>> weight = 6 * torch.eye(8, 128)  # row n takes element n, times 6
        >>> b, b_scale = fp4_quantize(weight)
        >>> mm_fp8_fp4(a, b.t(), a_scale, b_scale).tolist()
        [[0.0, 6.0, 12.0, 18.0, 24.0, 30.0, 36.0, 42.0]]

    References:
        NVFP4: NVIDIA, "Introducing NVFP4 for Efficient and Accurate Low-Precision Inference", 2025. MXFP4: OCP
        Microscaling Formats (MX) Specification v1.0, 2023; scales are rounded up as in the cuBLAS documentation.
        Roundings and special values: docs/numerics.md, "FP8 activations times an FP4 weight".
    """
