"""Reference of ``moe_permute_fp8quant``."""

from typing import Any

import torch

from torch_cute_ops.formats import FP8_BLOCK128, resolve_fp8_format
from torch_cute_ops.formats.experts import zeroed_rows
from torch_cute_ops.reference.fp8_quantize import quantize_fp8_rows


def moe_permute_fp8quant(
    input: torch.Tensor, permuted_to_expanded: torch.Tensor, topk: int, scale_format: str | None, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Order rows of ``input`` (M, H) by expert, quantise them to FP8, set padding to 0; see the op's docstring."""
    used = permuted_to_expanded >= 0
    # Append a row of zeros at the end. Rows without a token, whose index is -1, read this row.
    rows = torch.nn.functional.pad(input.float(), (0, 0, 0, 1))
    token = torch.where(used, permuted_to_expanded // topk, -1)
    fmt, layout = resolve_fp8_format(FP8_BLOCK128.granularity, None, scale_format)
    y, scale = quantize_fp8_rows(rows[token.long()].where(used[:, None], 0.0), fmt, None, layout)
    return y, zeroed_rows(scale, used[:, None])


def defined(
    outputs: tuple[torch.Tensor, ...], permuted_to_expanded: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, ...]:
    """Set rows of padding to zero in both outputs, because the op leaves them unspecified."""
    used = permuted_to_expanded >= 0
    y, scale = outputs
    return zeroed_rows(y, used[:, None]), zeroed_rows(scale, used[:, None])
