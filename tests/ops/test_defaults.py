"""Ops called one after another with their default layouts."""

import pytest
import torch

from torch_cute_ops import fp4_dequantize, fp4_quantize, mm_fp4, mm_fp4_weight_only

# For the first two sizes, the scales' shape is the same in the 128x4 and linear layouts, so only the default tells the
# op which layout it gets.
SHAPES = [(128, 64), (384, 192), (256, 80), (136, 256), (40, 48), (8, 32)]
by_shape = pytest.mark.parametrize(("n", "k"), SHAPES)


def exact_matrix(rows, k, device):
    """Return a matrix that FP4 represents exactly, whose block scales are different powers of two."""
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=device)
    values = magnitudes[torch.randint(8, (rows, k // 16, 16), device=device)]
    values *= torch.randint(0, 2, values.shape, device=device) * 2 - 1
    values[..., 0] = 6
    return (values * 2.0 ** torch.randint(-3, 4, (rows, k // 16, 1), device=device)).view(rows, k).bfloat16()


def relative_error(got, want):
    return float((got.double() - want).norm() / want.norm())


@by_shape
def test_exact(n, k, device):
    """Quantise numbers that FP4 represents exactly, and check that the decoded weight and the sums are exact."""
    w, a = exact_matrix(n, k, device), exact_matrix(5, k, device)
    x = torch.randint(-8, 9, (5, k), device=device).bfloat16()
    codes, scales = fp4_quantize(w)
    assert torch.equal(fp4_dequantize(codes, scales), w)
    assert torch.equal(mm_fp4_weight_only(x, codes.t(), scales), (x.double() @ w.double().t()).bfloat16())
    a_codes, a_scales = fp4_quantize(a)
    assert torch.equal(mm_fp4(a_codes, codes.t(), a_scales, scales), (a.double() @ w.double().t()).bfloat16())


@by_shape
def test_error_of_random_weights(n, k, device):
    """Check that the relative error is NVFP4's rounding error, 0.095 for normally distributed weights. Scales read in
    the wrong layout would give 0.35."""
    w = torch.randn(max(n, 32), k, device=device).bfloat16()
    x = torch.randn(64, k, device=device).bfloat16()
    codes, scales = fp4_quantize(w)
    assert 0.05 < relative_error(fp4_dequantize(codes, scales), w.double()) < 0.13
    assert 0.05 < relative_error(mm_fp4_weight_only(x, codes.t(), scales), x.double() @ w.double().t()) < 0.15
