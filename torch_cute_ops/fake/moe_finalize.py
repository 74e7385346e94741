"""Output of ``moe_finalize``."""

from typing import Any

import torch

from torch_cute_ops.formats.shapes import OutputShapes


def moe_finalize(input: torch.Tensor, expanded_to_permuted: torch.Tensor, **_: Any) -> OutputShapes:
    """Describe the weighted sums (M, H) in the dtype of ``input``."""
    return [((expanded_to_permuted.shape[0], input.shape[1]), input.dtype)]
