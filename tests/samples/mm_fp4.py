"""Samples (valid calls) and error inputs of ``mm_fp4``."""

from samples._fp4_gemm import GemmSamples

SAMPLES = GemmSamples(has_a_scale=True)
sample_inputs = SAMPLES.samples
error_inputs = SAMPLES.errors
