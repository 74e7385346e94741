"""Reference of ``moe_finalize``."""

import torch


def moe_finalize(
    input: torch.Tensor,
    expanded_to_permuted: torch.Tensor,
    weights: torch.Tensor,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """Sum each token's weighted rows of ``input`` (R, H) in fp32; see the op's docstring."""
    tokens, topk = expanded_to_permuted.shape
    if residual is None:
        total = torch.zeros(tokens, input.shape[1], dtype=torch.float32, device=input.device)
    else:
        total = residual.float()
    if not input.shape[0]:
        return total.to(input.dtype, copy=True)
    for j in range(topk):
        rows = expanded_to_permuted[:, j]
        terms = weights[:, j, None] * input[rows.clamp(min=0).long()].float()
        total = torch.where((rows >= 0)[:, None], total + terms, total)
    return total.to(input.dtype, copy=True, memory_format=torch.contiguous_format)
