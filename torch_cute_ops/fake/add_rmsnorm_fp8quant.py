"""Outputs of ``add_rmsnorm_fp8quant``."""

from torch_cute_ops.fake.rmsnorm_fp8quant import rmsnorm_fp8quant as add_rmsnorm_fp8quant

__all__ = ["add_rmsnorm_fp8quant"]
