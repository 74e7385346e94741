"""Outputs of ``moe_fc2_fp4_weight_only``."""

from torch_cute_ops.fake.moe_fc2_fp4 import moe_fc2_fp4 as moe_fc2_fp4_weight_only

__all__ = ["moe_fc2_fp4_weight_only"]
