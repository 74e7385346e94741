"""``grouped_mm_fp8``: products of FP8 matrices under block scales, one for each expert."""

from collections.abc import Callable
from typing import Any

import torch

from torch_cute_ops.ops._fp8_product import FP8Product, Given
from torch_cute_ops.runtime.dispatch import is_plain_eager


def _arrange(
    call: Callable[..., Any],
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    offsets: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Any:
    return call(Given(a, b, a_scale, b_scale, offsets, counts, out_dtype))


_product = FP8Product(
    "grouped_mm_fp8",
    "Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? offsets=None, Tensor? counts=None, "
    "ScalarType out_dtype=bfloat16",
    _arrange,
)


def grouped_mm_fp8(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    offsets: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``out[r] = a[r] @ b[e].T`` for the rows ``r`` of each expert ``e``, of FP8 matrices under block scales.

    Which rows an expert has, the device alone knows: nothing is read back, and a captured call follows what offsets and
    counts hold at its replay. In the contiguous layout these are the rows from ``offsets[e]`` on, up to
    ``offsets[e + 1]``, or ``counts[e]`` of them; in the masked layout, ``counts[e]`` of the e-th part of ``a``. Other
    rows are padding: neither what lies there is used, NaN included, nor is anything written there. Experts without rows
    cost nothing.

    A product is as that of :func:`mm_fp8_block`: scales of 128 elements of k of a row, and of 128 rows of the weight;
    sums of a block are multiplied by both and added up in fp32.

    Args:
        a: (R, K), float8_e4m3fn; K is a multiple of 128. Masked: (E, rows of an expert, K).
        b: (E, N, K), the same: the experts' weights. N is a multiple of 8; E is at most 512.
        a_scale: (K/128, R) float32. Masked: (K/128, E, rows of an expert).
        b_scale: (E, ⌈N/128⌉, K/128) float32.
        offsets: (E + 1,) int32, rising; ``None``: the layout is masked.
        counts: (E,) int32, at most the rows that an expert has room for; ``None``: an expert has all of them.
        out_dtype: bfloat16, float16 or float32.
        out: tensor like the result to write into.

    Returns:
        (R, N) in ``out_dtype``, unspecified in rows of padding. Masked: (E, rows of an expert, N).

    Raises:
        ValueError: for a wrong shape or device, for neither offsets nor counts, or for an input that requires grad
            while gradients are on.
        TypeError: for a wrong dtype.
    """
    if is_plain_eager(out, a, b, a_scale, b_scale, offsets, counts):
        return _product.run(Given(a, b, a_scale, b_scale, offsets, counts, out_dtype), out)
    args = (a, b, a_scale, b_scale, offsets, counts, out_dtype)
    if out is None:
        return torch.ops.cute.grouped_mm_fp8.default(*args)
    torch.ops.cute.grouped_mm_fp8.out(*args, out=out)
    return out


OP = _product.spec(grouped_mm_fp8)
