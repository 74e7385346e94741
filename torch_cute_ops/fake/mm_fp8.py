"""Outputs of ``mm_fp8``."""

from torch_cute_ops.fake.mm_fp4 import mm_fp4 as mm_fp8

__all__ = ["mm_fp8"]
