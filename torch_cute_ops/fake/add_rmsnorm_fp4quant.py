"""Outputs of ``add_rmsnorm_fp4quant``."""

from torch_cute_ops.fake.fp4_quantize import fp4_quantize as add_rmsnorm_fp4quant

__all__ = ["add_rmsnorm_fp4quant"]
