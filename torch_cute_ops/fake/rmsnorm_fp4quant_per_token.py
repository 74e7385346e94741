"""Outputs of ``rmsnorm_fp4quant_per_token``."""

from torch_cute_ops.fake.fp4_quantize_per_token import fp4_quantize_per_token as rmsnorm_fp4quant_per_token

__all__ = ["rmsnorm_fp4quant_per_token"]
