"""Reference of ``moe_permute_fp8quant``."""

from typing import Any

import torch

from torch_cute_ops.formats import FP8_BLOCK128
from torch_cute_ops.formats.experts import zeroed_rows
from torch_cute_ops.formats.fp8 import COLUMN
from torch_cute_ops.reference.fp8_quantize import quantize_fp8_rows


def moe_permute_fp8quant(
    input: torch.Tensor, permuted_to_expanded: torch.Tensor, topk: int, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Order rows of ``input`` (M, H) by expert, quantise them to FP8, set padding to 0; see the op's docstring."""
    used = permuted_to_expanded >= 0
    # Append a row of zeros at the end. Rows without a token, whose index is -1, read this row.
    rows = torch.nn.functional.pad(input.float(), (0, 0, 0, 1))
    token = torch.where(used, permuted_to_expanded // topk, -1)
    return quantize_fp8_rows(rows[token.long()].where(used[:, None], 0.0), FP8_BLOCK128, None, COLUMN)


def defined(
    outputs: tuple[torch.Tensor, ...], permuted_to_expanded: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, ...]:
    """Set rows of padding to zero in both outputs, because the op leaves them unspecified."""
    used = permuted_to_expanded >= 0
    y, scale = outputs
    return zeroed_rows(y, used[:, None]), zeroed_rows(scale, used[:, None])
