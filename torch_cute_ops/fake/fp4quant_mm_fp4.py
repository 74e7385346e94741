"""Outputs of ``fp4quant_mm_fp4``."""

from torch_cute_ops.fake.mm_fp4 import mm_fp4 as fp4quant_mm_fp4

__all__ = ["fp4quant_mm_fp4"]
