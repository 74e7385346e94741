"""Reference of ``add_rmsnorm_fp4quant_with_norm_both_layouts``."""

from typing import Any

import torch

from torch_cute_ops.reference.add_rmsnorm_fp4quant_both_layouts import both_layouts


def add_rmsnorm_fp4quant_with_norm_both_layouts(
    **named: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute ``add_rmsnorm_fp4quant_with_norm`` with the scales in both layouts; see the op's docstring."""
    return both_layouts(**named)
