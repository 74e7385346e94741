"""Output of ``moe_finalize``."""

import torch


def moe_finalize(
    input: torch.Tensor,
    expanded_to_permuted: torch.Tensor,
    weights: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows (M, H) of the input's dtype."""
    return input.new_empty((expanded_to_permuted.shape[0], input.shape[1]))
