"""The order in which ``fp4_quantize`` rounds NVFP4 scales, compared with the orders of other libraries
(docs/numerics.md)."""

import numpy as np
import torch

import torch_cute_ops

F = np.float32
SIXTH = F(1 / 6)


def rounded(scales: np.ndarray) -> np.ndarray:
    """Round positive fp32 numbers to e4m3; return the codes."""
    return torch.from_numpy(scales).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def test_scales_round_in_our_order() -> None:
    """Check the scales of bfloat16 blocks bitwise. The global scales are small whole numbers, so that quotients often
    lie halfway between two scales, where other orders give other scales."""
    values = (torch.randn(4096, 16) * 4).bfloat16()
    amax = values.float().abs().amax(1).numpy()
    others = dict.fromkeys(("vLLM", "TransformerEngine", "torchao"), 0)
    for whole in range(1, 40):
        g = F(whole)
        _, scale = torch_cute_ops.fp4_quantize(values, torch.tensor([g]), scale_layout="linear")
        ours = scale.view(torch.uint8).flatten().numpy()
        np.testing.assert_array_equal(ours, rounded((amax * g) * SIXTH))
        others["vLLM"] += (ours != rounded(g * (amax * SIXTH))).sum()
        others["TransformerEngine"] += (ours != rounded(amax * (g * SIXTH))).sum()
        others["torchao"] += (ours != rounded((amax / F(6)) / (F(1) / g))).sum()
    assert all(others.values()), others
