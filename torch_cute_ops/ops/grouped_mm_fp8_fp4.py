"""``grouped_mm_fp8_fp4``: one GEMM per expert, of the expert's FP8 rows and its FP4 weight."""

import torch
from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._fp8_gemm import GroupedFP8Gemm
from torch_cute_ops.ops._signature import ScaleFormat, WeightScaleLayout


@define(GroupedFP8Gemm("fp4"), "out")
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
    scale_layout: WeightScaleLayout | None = None,
    backend: str = "auto",
    static_weight: bool = False,
    fast_accum: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply the FP8 rows of each expert by the expert's FP4 weight, on FP8 tensor cores. The rows have block scales
    or per-token scales.

    With block scales, for each row ``r`` of expert ``e``, with k in the j-th block of 128::

        w8[e, k, n] = e4m3(e2m1 · block scale · 2^-t[e, n, j])
        sum[r, n] = Σ_j a_scale[r, j] · 2^t[e, n, j] · (Σ_k a[r, k] · w8[e, k, n])
        out[r, n] = alpha · sum[r, n] + bias[e, n]

    With per-token scales, all elements of a weight row share one power of two::

        w8[e, k, n] = e4m3(e2m1 · block scale · 2^-u[e, n])
        out[r, n] = (Σ_k a[r, k] · w8[e, k, n]) · a_scale[r] · (alpha · 2^u[e, n]) + bias[e, n]

    ``t`` is the least integer with ``6 · block scale · 2^-t ≤ 448`` for all scales of a row and block, so that all
    numbers fit e4m3. ``u`` is the least integer with ``6 · block scale · 2^-u ≤ 448`` for all scales of a row. Codes
    are rounded to nearest even. The documentation of :func:`mm_fp8_fp4` gives the error of this conversion, and
    describes how sums are accumulated.

    As in :func:`grouped_mm_fp8`, the kernel reads on the device which rows belong to each expert, and padding is
    treated in the same way. This op can therefore replace :func:`grouped_mm_fp8` in an FP8 expert pipeline
    (``moe_permute_fp8quant``, GEMM, ``moe_swiglu_fp8quant``, GEMM, ``moe_finalize``) whose weights are in FP4.

    Args:
        a: (R, K) float8_e4m3fn; K is a multiple of 64, so the last block of 128 may contain 64 elements. Masked: (E,
            max_rows, K). With per-token scales, ``a`` may also be (R, ⌈K/256⌉, 256), masked (E, max_rows, ⌈K/256⌉,
            256), as :func:`interleave_k` returns it.
        b: (E, K/2, N) uint8 or float4_e2m1fn_x2, two e2m1 codes per byte, element 0 in the low nibble: the transposed
            view ``weight.mT`` of weights stacked row-major, (E, N, K/2), as checkpoints store them. N is a multiple of
            8, and E is at most 1,024. A row-major tensor is refused. No check can detect square weights that are stored
            transposed.
        a_scale: (R, ⌈K/128⌉) float32, block scales of ``a``; masked: (E, max_rows, ⌈K/128⌉). Column-major scales, as
            the quantising ops write them, are read in place, even with padding between the columns; scales with other
            strides are copied first. Pass scales (⌈K/128⌉, R) as ``a_scale.mT``: if R = ⌈K/128⌉, no check can detect
            that the scales are transposed. Per-token scales are (R, 1), one scale per row, masked (E, max_rows, 1), or
            (1,), one scale for all rows.
        b_scale: block scales of the weights: tiles over the rows of all experts, 128x4 (⌈(E·N)/128⌉, ⌈K/B/4⌉, 32, 4,
            4), as :func:`fp4_quantize` of the weights (E, N, K) writes them (a tile may span two experts); or linear
            (E, N, K/B), with B the block size. The dtype is float8_e4m3fn (NVFP4), or uint8 or float8_e8m0fnu (MXFP4).
            With per-token scales, ``b_scale`` may also be prepared scales, uint8 (E, 1 + ⌈K/256⌉, N, 256/B), which
            :func:`prepare_scales` computes once from the block scales.
        offsets: (E + 1,) int32 in ascending order: first row of each expert, and the end of the last expert's rows.
            ``None`` selects the masked layout.
        counts: (E,) int32: number of rows of each expert, at most the number reserved for it. ``None`` with ``offsets``
            means all rows between the expert's offsets. Offsets and counts out of range are refused on a CPU. On a GPU
            they give wrong results, but no access out of bounds.
        alpha: float32 tensor on the same device: one element, (E,) with one factor per expert, or (E, N) with one
            factor per expert and column. ``None`` means 1.
        bias: (E, N) float32 or the dtype of the result, added in fp32 after ``alpha``.
        out_dtype: dtype of the result: bfloat16, float16 or float32. ``None`` means bfloat16.
        block_size: elements per block scale: 16 for NVFP4, 32 for MXFP4.
        scale_format: format of the block scales: ``"e4m3"`` (blocks of 16) or ``"ue8m0"`` (blocks of 32). ``None``
            means the format for ``block_size``.
        scale_layout: expected layout of the weight's scales: ``"128x4"`` or ``"linear"``. ``None`` derives the layout
            from the shape. If a layout is given, tiled scales may also have another library's shape: flat (torchao), or
            a padded matrix (FlashInfer, vLLM, cuBLAS). With ``None``, a padded matrix that has the shape of linear
            scales is read as linear scales. Tiles that are padded expert by expert are accepted if ``scale_layout`` is
            given and each expert has a multiple of 128 rows. With prepared scales, pass ``None``.
        backend: name of a backend that :func:`backends` lists. ``"auto"`` takes the backend that :func:`autotune`
            measured as fastest, or without measurements the backend with the least estimated time.
        static_weight: promise that ``b`` and ``b_scale`` were written before the previous launch on the stream, and
            have not changed since. The kernel may then read the weight before the previous launch ends.
        fast_accum: accumulation of calls with per-token scales, as in :func:`mm_fp8`. It has no effect on calls with
            block scales.
        out: contiguous tensor, of the result's shape, to write the result into.

    Returns:
        (R, N) in ``out_dtype``; masked: (E, max_rows, N). Rows of padding are unspecified.

    Raises:
        ValueError: If a shape, device, format or layout is wrong; if neither ``offsets`` nor ``counts`` is given; if
            the backend is unknown or cannot compute the call (the message gives the reason); or if an input requires
            grad while gradients are enabled.
        TypeError: If a dtype is wrong.

    Example:
        >>> import torch
        >>> from torch_cute_ops import fp4_quantize, fp8_quantize, grouped_mm_fp8_fp4
        >>> x = torch.zeros(3, 128)
        >>> x[:, :8], x[:, -1] = torch.arange(8.0), 448.0  # amax 448, so that the scales are 1
        >>> a, a_scale = fp8_quantize(x, granularity="block128")
        >>> b, b_scale = fp4_quantize(torch.stack([6 * torch.eye(8, 128), 3 * torch.eye(8, 128)]))
        >>> offsets = torch.tensor([0, 1, 3], dtype=torch.int32)  # row 0 is expert 0's, rows 1 and 2 expert 1's
        >>> grouped_mm_fp8_fp4(a, b.mT, a_scale, b_scale, offsets).tolist()[:2]
        [[0.0, 6.0, 12.0, 18.0, 24.0, 30.0, 36.0, 42.0], [0.0, 3.0, 6.0, 9.0, 12.0, 15.0, 18.0, 21.0]]

    References:
        NVFP4: NVIDIA, "Introducing NVFP4 for Efficient and Accurate Low-Precision Inference", 2025. MXFP4: OCP
        Microscaling Formats (MX) Specification v1.0, 2023; scales are rounded up as in the cuBLAS documentation.
        Roundings and special values: docs/numerics.md, "FP8 activations times an FP4 weight".
    """
