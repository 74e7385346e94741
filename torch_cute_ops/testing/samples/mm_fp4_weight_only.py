"""Inputs of ``mm_fp4_weight_only``."""

from torch_cute_ops.testing.samples._fp4_product import Product

PRODUCT = Product(has_a_scale=False)
sample_inputs = PRODUCT.samples
error_inputs = PRODUCT.errors
