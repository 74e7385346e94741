"""Outputs of ``moe_permute_fp8quant``."""

import torch

from torch_cute_ops.formats import FP8_BLOCK128


def moe_permute_fp8quant(
    input: torch.Tensor,
    permuted_to_expanded: torch.Tensor,
    topk: int,
    expanded_to_permuted: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (R, H) and scales (H/128, R)."""
    rows, width = permuted_to_expanded.shape[0], input.shape[1]
    y = input.new_empty((rows, width), dtype=torch.float8_e4m3fn)
    return y, input.new_empty((width // FP8_BLOCK128.block_size, rows), dtype=torch.float32)
