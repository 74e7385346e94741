"""Outputs of ``silu_mul_mm_fp4_weight_only``."""

from torch_cute_ops.fake.mm_fp4 import mm_fp4 as silu_mul_mm_fp4_weight_only

__all__ = ["silu_mul_mm_fp4_weight_only"]
