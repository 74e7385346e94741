"""Inputs of ``mm_fp4_weight_only``."""

from torch_cute_ops.testing.samples._fp4_gemm import GemmSamples

SAMPLES = GemmSamples(has_a_scale=False)
sample_inputs = SAMPLES.samples
error_inputs = SAMPLES.errors
