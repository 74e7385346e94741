"""``grouped_mm_fp8``: a GEMM for each expert, of FP8 matrices with block scales."""

import torch
from torch import Tensor

from torch_cute_ops.ops._define import define
from torch_cute_ops.ops._gemm import Gemm


@define(Gemm("fp8", "fp8", over="rows"), "out")
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
    *,
    out: Tensor | None = None,
) -> Tensor:
    """``out[r] = a[r] @ b[e].T`` for the rows ``r`` of each expert ``e``, of FP8 matrices with block scales.

    Which rows an expert has is known on the device alone: nothing is copied to the host, and a captured call uses what
    offsets and counts hold at its replay. In the contiguous layout an expert's rows are those from ``offsets[e]`` on,
    up to ``offsets[e + 1]``, or ``counts[e]`` of them; in the masked layout, the first ``counts[e]`` of ``a[e]``. Other
    rows are padding: whatever they hold, NaN included, is not used, and their results are not written. Experts without
    rows cost nothing.

    Each expert's GEMM is that of :func:`mm_fp8_block`, which has the weight as (K, N): experts' weights are stacked,
    (E, N, K), as checkpoints hold them and without a transposed view.

    Args:
        a: (R, K), float8_e4m3fn; K a multiple of 64, the last block may have 64 elements. Masked: (E, max_rows, K).
        b: (E, N, K), the same of the experts' weights, contiguous; N a multiple of 8, E at most 512.
        a_scale: (⌈K/128⌉, R) float32. Masked: (⌈K/128⌉, E, max_rows).
        b_scale: (E, ⌈N/128⌉, ⌈K/128⌉) float32.
        offsets: (E + 1,) int32, in ascending order; ``None``: the layout is masked.
        counts: (E,) int32, at most the rows that an expert has room for; ``None``: an expert has all of them.
        alpha: float32 on the device: one element, (E,), one for each expert, or (E, N), one for each of its columns;
            ``None`` means 1.
        bias: (E, N), float32 or the result's dtype: added in fp32 after ``alpha``, before the one rounding.
        out_dtype: bfloat16, float16 or float32; ``None`` means bfloat16.
        backend, static_weight: as for :func:`mm_fp8_block`.
        out: tensor like the result to write into.

    Returns:
        (R, N) in ``out_dtype``, unspecified in rows of padding. Masked: (E, max_rows, N).

    Raises:
        ValueError: for a wrong shape or device; for neither offsets nor counts; for a backend that is unknown or cannot
            compute the call, with its reason; or for an input that requires grad while gradients are on.
        TypeError: for a wrong dtype.
    """
