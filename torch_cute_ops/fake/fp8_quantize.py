"""Outputs of ``fp8_quantize``."""

from torch_cute_ops.fake.rmsnorm_fp8quant import rmsnorm_fp8quant as fp8_quantize

__all__ = ["fp8_quantize"]
