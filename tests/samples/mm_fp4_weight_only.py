"""Samples (valid calls) and error inputs of ``mm_fp4_weight_only``."""

from samples._fp4_gemm import GemmSamples

SAMPLES = GemmSamples(has_a_scale=False)
sample_inputs = SAMPLES.samples
error_inputs = SAMPLES.errors
