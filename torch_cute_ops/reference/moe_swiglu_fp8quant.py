"""Reference of ``moe_swiglu_fp8quant``."""

from typing import Any

import torch

from torch_cute_ops.formats import FP8_BLOCK128, resolve_fp8_format
from torch_cute_ops.formats.experts import used_rows, zeroed_rows
from torch_cute_ops.reference.fp8_quantize import quantize_fp8_rows
from torch_cute_ops.reference.silu_mul_fp4quant import silu_mul_rows


def moe_swiglu_fp8quant(
    input: torch.Tensor,
    offsets: torch.Tensor | None,
    counts: torch.Tensor | None,
    scale_format: str | None,
    **gate: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate ``input`` (..., 2I), quantise it to FP8, and set rows of padding to zero; see the op's docstring."""
    lead = input.shape[:-1]
    value = silu_mul_rows(input, **gate)
    fmt, layout = resolve_fp8_format(FP8_BLOCK128.granularity, None, scale_format)
    y, scale = quantize_fp8_rows(value, fmt, None, layout)
    used = used_rows(lead.numel(), offsets, counts).view(*lead, 1)
    return zeroed_rows(y, used), zeroed_rows(scale, used)


def defined(
    outputs: tuple[torch.Tensor, ...],
    input: torch.Tensor,
    offsets: torch.Tensor | None,
    counts: torch.Tensor | None,
    **_: Any,
) -> tuple[torch.Tensor, ...]:
    """Set rows of padding to zero in both outputs, because the op leaves them unspecified."""
    lead = input.shape[:-1]
    used = used_rows(lead.numel(), offsets, counts).view(*lead, 1)
    y, scale = outputs
    return zeroed_rows(y, used), zeroed_rows(scale, used)
