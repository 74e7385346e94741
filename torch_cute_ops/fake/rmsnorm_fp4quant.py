"""Outputs of ``rmsnorm_fp4quant``."""

from torch_cute_ops.fake.fp4_quantize import fp4_quantize as rmsnorm_fp4quant

__all__ = ["rmsnorm_fp4quant"]
