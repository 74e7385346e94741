"""Inputs of ``moe_fc2_fp4``."""

from torch_cute_ops.testing.samples._moe_fc2 import ExpertProduct

PRODUCT = ExpertProduct(has_a_scale=True)
sample_inputs = PRODUCT.samples
error_inputs = PRODUCT.errors
