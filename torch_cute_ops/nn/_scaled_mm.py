"""Call torch's scaled GEMM of FP8 matrices, or decode the operands if torch does not support the call."""

from typing import Any

import torch
from torch import Tensor

from torch_cute_ops.reference.mm_fp4 import apply_epilogue

_MULTIPLE = 16
"""N and K must be multiples of this number in torch's scaled GEMM."""

_public: Any = getattr(torch.nn.functional, "scaled_mm", None)


def scaled_mm(
    a: Tensor, weight: Tensor, a_scale: Tensor, weight_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """Compute ``a_scale · weight_scale · (a @ weight.T) + bias``, (M, N) in ``out_dtype``.

    The function calls ``torch.nn.functional.scaled_mm``; in torch versions without ``scaled_mm``, and in compiled code
    (torch 2.11 cannot trace ``scaled_mm``), it calls ``torch._scaled_mm``. If :func:`reason_refused` returns a reason,
    the elements are decoded and multiplied in float32, or on a CPU in float64, which is exact.

    Args:
        a: (M, K) float8_e4m3fn.
        weight: (N, K) float8_e4m3fn, contiguous.
        a_scale: float32: (1,) for the tensor, or (M, 1) for its rows.
        weight_scale: float32: (1,) for the tensor, or (1, N) for the columns of the result; (1, N) if ``a_scale`` is
            (M, 1).
        bias: (N,), or ``None``.
        out_dtype: bfloat16, float16 or float32.
    """
    is_by_row = weight_scale.dim() == 2
    if reason_refused(weight, is_by_row, bias, out_dtype) is not None:
        wide = torch.float64 if a.device.type == "cpu" else torch.float32
        total = (a.to(wide) @ weight.to(wide).t()).float()
        return apply_epilogue(total * a_scale, weight_scale, bias, out_dtype)
    if is_by_row:
        a_scale = a_scale.expand(len(a), 1).contiguous()
    if _public is None or torch.compiler.is_compiling():
        return torch._scaled_mm(a, weight.t(), a_scale, weight_scale, bias=bias, out_dtype=out_dtype)
    recipes = torch.nn.functional.ScalingType
    recipe = recipes.RowWise if is_by_row else recipes.TensorWise
    return _public(a, weight.t(), a_scale, recipe, weight_scale, recipe, bias=bias, output_dtype=out_dtype)


def reason_refused(weight: Tensor, is_by_row: bool, bias: Tensor | None, out_dtype: torch.dtype) -> str | None:
    """Return the reason why torch's scaled GEMM does not support a weight of shape (N, K), or None if it does. The
    reason does not depend on M."""
    reason = _reason_no_device(weight.device)
    if reason is not None:
        return reason
    if any(size % _MULTIPLE for size in weight.shape):
        return f"N, K = {tuple(weight.shape)} are not multiples of {_MULTIPLE}"
    if out_dtype not in (torch.bfloat16, torch.float16):
        return f"the result is {out_dtype}"
    if is_by_row and out_dtype == torch.float16 and _public is None:
        return "this torch supports row scales only for bfloat16"
    if bias is not None and bias.dtype != out_dtype:
        return f"the bias is {bias.dtype}, but the result {out_dtype}"
    return None


def _reason_no_device(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"the device is {device.type}"
    if torch.version.hip is not None:
        return "the GPU is not from NVIDIA"
    if torch.cuda.get_device_capability(device) < (8, 9):
        return "the GPU lacks FP8 tensor cores"
    return None
