"""torch's scaled GEMM of FP8 matrices, and the same product by decoding where it refuses."""

from typing import Any

import torch
from torch import Tensor

from torch_cute_ops.reference.mm_fp4 import finished

_MULTIPLE = 16
"""What N and K are multiples of in torch's scaled GEMM."""

_public: Any = getattr(torch.nn.functional, "scaled_mm", None)


def scaled_mm(
    a: Tensor, weight: Tensor, a_scale: Tensor, weight_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """``a_scale · weight_scale · (a @ weight.T) + bias``, (M, N) in ``out_dtype``.

    By ``torch.nn.functional.scaled_mm``, or by ``torch._scaled_mm`` in a torch that has only that, and in compiled
    code, because torch 2.11 does not trace the first. Where :func:`reason_refused` gives a reason, the elements are
    decoded, and multiplied in float32, or in float64 on a CPU, which is exact.

    Args:
        a: (M, K) float8_e4m3fn.
        weight: (N, K) float8_e4m3fn, contiguous.
        a_scale: float32: (1,), of the tensor, or (M, 1), of its rows.
        weight_scale: float32: (1,), of the tensor, or (1, N), of the result's columns; (1, N) if ``a_scale`` is (M, 1).
        bias: (N,), or none.
        out_dtype: bfloat16, float16 or float32.
    """
    is_by_row = weight_scale.dim() == 2
    if reason_refused(weight, is_by_row, bias, out_dtype) is not None:
        wide = torch.float64 if a.device.type == "cpu" else torch.float32
        total = (a.to(wide) @ weight.to(wide).t()).float()
        return finished(total * a_scale, weight_scale, bias, out_dtype)
    if is_by_row:
        a_scale = a_scale.expand(len(a), 1).contiguous()
    if _public is None or torch.compiler.is_compiling():
        return torch._scaled_mm(a, weight.t(), a_scale, weight_scale, bias=bias, out_dtype=out_dtype)
    recipes = torch.nn.functional.ScalingType
    recipe = recipes.RowWise if is_by_row else recipes.TensorWise
    return _public(a, weight.t(), a_scale, recipe, weight_scale, recipe, bias=bias, output_dtype=out_dtype)


def reason_refused(weight: Tensor, is_by_row: bool, bias: Tensor | None, out_dtype: torch.dtype) -> str | None:
    """Why torch's scaled GEMM is not used for a weight (N, K); ``None``: it is. It never depends on M."""
    reason = _reason_no_device(weight.device)
    if reason is not None:
        return reason
    if any(size % _MULTIPLE for size in weight.shape):
        return f"N, K = {tuple(weight.shape)} are no multiples of {_MULTIPLE}"
    if out_dtype not in (torch.bfloat16, torch.float16):
        return f"the result is {out_dtype}"
    if is_by_row and out_dtype == torch.float16 and _public is None:
        return "this torch has scales of rows for bfloat16 alone"
    if bias is not None and bias.dtype != out_dtype:
        return f"the bias is {bias.dtype}, and the result {out_dtype}"
    return None


def _reason_no_device(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"the device is {device.type}"
    if torch.version.hip is not None:
        return "the GPU is none of NVIDIA's"
    if torch.cuda.get_device_capability(device) < (8, 9):
        return "the GPU has no FP8 tensor cores"
    return None
