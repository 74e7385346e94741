"""Reference of ``mm_fp8``."""

from typing import Any

import torch

from torch_cute_ops.reference.mm_fp4 import apply_epilogue, matmul_rows


def mm_fp8(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    **_: Any,
) -> torch.Tensor:
    """Compute ``a_scale · b_scale · a @ b + bias`` for e4m3 matrices, (M, N); see the op's docstring."""
    return scaled_gemm(a, b.t(), a_scale, b_scale, bias, out_dtype or torch.bfloat16)


def scaled_gemm(
    a: torch.Tensor,
    weight: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Compute ``a_scale · b_scale · a @ weight.T + bias`` for e4m3 matrices.

    The product is accumulated in float64 and rounded to fp32, then multiplied by the scale of its row and by the scale
    of its column, each with one rounding; ``apply_epilogue`` then adds the bias.

    Args:
        a: (M, K) float8_e4m3fn.
        weight: (N, K) float8_e4m3fn.
        a_scale: (M, 1) or (1,) float32.
        b_scale: (N,) or (1,) float32.
        bias: (N,), or None.
        out_dtype: dtype of the output.
    """
    total = matmul_rows(a.double(), weight.double()).float()
    return apply_epilogue(total * a_scale, b_scale, bias, out_dtype)
