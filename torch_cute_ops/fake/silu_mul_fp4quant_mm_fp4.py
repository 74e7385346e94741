"""Outputs of ``silu_mul_fp4quant_mm_fp4``."""

from torch_cute_ops.fake.mm_fp4 import mm_fp4 as silu_mul_fp4quant_mm_fp4

__all__ = ["silu_mul_fp4quant_mm_fp4"]
