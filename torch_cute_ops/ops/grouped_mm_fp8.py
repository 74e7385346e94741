"""``grouped_mm_fp8``: one GEMM per expert, of the expert's rows and its weight, in FP8 with block scales or per-token
scales, or in MXFP8."""

import torch
from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._fp8_gemm import GroupedFP8Gemm


@define(GroupedFP8Gemm("fp8"), "out")
def grouped_mm_fp8(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    offsets: Tensor | None = None,
    counts: Tensor | None = None,
    alpha: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
    static_weight: bool = False,
    fast_accum: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply the rows of each expert by the expert's weight, in FP8 with block scales or per-token scales, or in
    MXFP8.

    With block scales, for each row ``r`` of expert ``e`` and k in the j-th block of 128::

        sum[r, n] = Σ_j a_scale[r, j] · b_scale[e, n // 128, j] · (Σ_k a[r, k] · b[e, k, n])
        out[r, n] = alpha · sum[r, n] + bias[e, n]

    If each row of the weight has its own scales, as always in MXFP8, the factor is ``a_scale[r, j] · b_scale[e, n,
    j]``. In MXFP8, a block contains 32 elements. The dtype of the scales says which: float32, or bytes for MXFP8.

    With per-token and per-channel scales::

        out[r, n] = (Σ_k a[r, k] · b[e, k, n]) · a_scale[r] · (alpha · b_scale[e, n]) + bias[e, n]

    Experts' rows are found on the device: nothing is copied to the host, and a captured call uses the offsets and
    counts of its replay. In the contiguous layout, expert ``e`` owns the rows from ``offsets[e]`` to
    ``offsets[e + 1]``, or the first ``counts[e]`` of these rows. In the masked layout, expert ``e`` owns the first
    ``counts[e]`` rows of ``a[e]``. All other rows are padding: their contents do not affect results, and they are not
    written. Experts without rows cost nothing, except in MXFP8 on Hopper: each call then folds all rows of ``a``, and
    with many rows all weights, into temporary memory (:func:`mm_fp8_block`).

    Sums are accumulated as in :func:`mm_fp8_block`, or with per-token scales as in :func:`mm_fp8`.

    Args:
        a: (R, K) float8_e4m3fn; K is a multiple of 64, so the last block of 128 may contain 64 elements. Masked: (E,
            max_rows, K).
        b: (E, K, N) float8_e4m3fn: the transposed view ``weight.mT`` of weights stacked row-major, (E, N, K), as
            checkpoints hold them. N is a multiple of 8, and E is at most 1,024. A row-major tensor is refused. No check
            can detect square weights that are stored transposed.
        a_scale: (R, ⌈K/128⌉) float32, block scales of ``a``; masked: (E, max_rows, ⌈K/128⌉). Column-major scales, as
            the quantising ops write them, are read in place, even with padding between the columns; scales with other
            strides are copied first. Pass scales (⌈K/128⌉, R) as ``a_scale.mT``: if R = ⌈K/128⌉, no check can detect
            that the scales are transposed. If ``b_scale`` is per channel or per expert, ``a_scale`` is (R, 1), one
            scale per row, masked (E, max_rows, 1), or (1,), one scale for all rows. MXFP8: uint8 or float8_e8m0fnu,
            linear (R, K/32), masked (E, max_rows, K/32), or tiled, with the rows of all experts as one matrix.
        b_scale: (E, ⌈N/128⌉, ⌈K/128⌉) float32, row-major, scales of blocks of 128 weight rows by 128 elements of k. A
            transposed view is refused. Square scales that were transposed and then made contiguous cannot be detected.
            ``b_scale`` may also be (E, N, ⌈K/128⌉), scales of each weight row, column-major, or copied first if it has
            other strides; (E, N), one scale per column of each expert's result; or (E,), one scale per expert.
            MXFP8: uint8 or float8_e8m0fnu, linear (E, N, K/32), or tiled, with the rows of all experts as one matrix.
            Linear scales are read in place if K is a multiple of 128; other scales are rearranged in each call.
        offsets: (E + 1,) int32 in ascending order: first row of each expert, and the end of the last expert's rows.
            ``None`` selects the masked layout.
        counts: (E,) int32: number of rows of each expert, at most the number reserved for it. ``None`` with ``offsets``
            means all rows between the expert's offsets. Offsets and counts out of range are refused on a CPU. On a GPU
            they give wrong results, but no access out of bounds.
        alpha: float32 tensor on the same device: one element, (E,) with one factor per expert, or (E, N) with one
            factor per expert and column. ``None`` means 1.
        bias: (E, N) float32 or the dtype of the result, added in fp32 after ``alpha``.
        out_dtype: dtype of the result: bfloat16, float16 or float32. ``None`` means bfloat16.
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
        >>> from torch_cute_ops import fp8_quantize, grouped_mm_fp8
        >>> x = torch.zeros(3, 128)
        >>> x[:, :8], x[:, -1] = torch.arange(8.0), 448.0  # amax 448, so that the scales are 1
        >>> a, a_scale = fp8_quantize(x, granularity="block128")
        >>> weights = torch.stack([torch.eye(8, 128), 2 * torch.eye(8, 128)]).to(torch.float8_e4m3fn)
        >>> offsets = torch.tensor([0, 1, 3], dtype=torch.int32)  # row 0 is expert 0's, rows 1 and 2 expert 1's
        >>> grouped_mm_fp8(a, weights.mT, a_scale, torch.ones(2, 1, 1), offsets).tolist()[:2]
        [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0]]

    References:
        DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3.2. Roundings and special values:
        docs/numerics.md, "FP8 with block scales" and "FP8 with per-token scales". MXFP8: Open Compute Project, "OCP
        Microscaling Formats (MX) Specification", version 1.0, 2023.
    """
