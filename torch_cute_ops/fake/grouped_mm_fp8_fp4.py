"""Output of ``grouped_mm_fp8_fp4``."""

from torch_cute_ops.fake.grouped_mm_fp8 import grouped_mm_fp8 as grouped_mm_fp8_fp4

__all__ = ["grouped_mm_fp8_fp4"]
