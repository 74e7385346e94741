"""Samples and bad inputs of ``silu_mul_mm_fp4_weight_only``."""

from samples._input_gemm import InputGemmSamples

SAMPLES = InputGemmSamples(has_a_scale=False, gates=True)
sample_inputs = SAMPLES.samples
error_inputs = SAMPLES.errors
