"""``mm_fp8_block``: the product of two FP8 matrices under block scales."""

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
    out_dtype: torch.dtype = torch.bfloat16,
) -> Any:
    return call(Given(a, b, a_scale, b_scale, None, None, out_dtype))


_product = FP8Product(
    "mm_fp8_block",
    "Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, ScalarType out_dtype=bfloat16",
    _arrange,
)


def mm_fp8_block(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``out[m, n] = Σ_j a_scale[j, m] · b_scale[n // 128, j] · (Σ_{k of block j} a[m, k] · b[k, n])`` of two FP8
    matrices; blocks are 128 elements of k.

    Operands are as the quantising ops give them (``granularity="block128"``, ``scale_layout="column"``), and as
    checkpoints of DeepSeek-V3's kind hold them. Tensor cores add up a block; its sum is multiplied by both scales and
    added to those of the blocks before in fp32, so that an error of these units does not grow with K.

    Args:
        a: (M, K), float8_e4m3fn; K is a multiple of 128.
        b: (K, N), the same: the transposed view, ``weight.t()``, of a weight (N, K). N is a multiple of 8.
        a_scale: (K/128, M) float32.
        b_scale: (⌈N/128⌉, K/128) float32, of 128 rows of the weight and 128 elements of k.
        out_dtype: bfloat16, float16 or float32.
        out: tensor (M, N) to write into.

    Returns:
        (M, N) in ``out_dtype``.

    Raises:
        ValueError: for a wrong shape or device, or for an input that requires grad while gradients are on.
        TypeError: for a wrong dtype.
    """
    if is_plain_eager(out, a, b, a_scale, b_scale):
        return _product.run(Given(a, b, a_scale, b_scale, None, None, out_dtype), out)
    args = (a, b, a_scale, b_scale, out_dtype)
    if out is None:
        return torch.ops.cute.mm_fp8_block.default(*args)
    torch.ops.cute.mm_fp8_block.out(*args, out=out)
    return out


OP = _product.spec(mm_fp8_block)
