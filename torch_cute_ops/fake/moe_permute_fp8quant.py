"""Outputs of ``moe_permute_fp8quant``."""

from typing import Any

import torch

from torch_cute_ops.fake.rmsnorm_fp8quant import quantised
from torch_cute_ops.formats.shapes import OutputShapes


def moe_permute_fp8quant(input: torch.Tensor, permuted_to_expanded: torch.Tensor, **_: Any) -> OutputShapes:
    """Describe the codes (R, H) and the scales (R, ⌈H/128⌉), column-major."""
    return quantised((permuted_to_expanded.shape[0], input.shape[1]), "block128", None)
