"""Outputs of ``add_rmsnorm_fp4quant_with_norm``."""

from torch_cute_ops.fake.rmsnorm_fp4quant_with_norm import rmsnorm_fp4quant_with_norm as add_rmsnorm_fp4quant_with_norm

__all__ = ["add_rmsnorm_fp4quant_with_norm"]
