"""Samples and bad inputs of ``fp4quant_mm_fp4``."""

from samples._input_gemm import InputGemmSamples

SAMPLES = InputGemmSamples(has_a_scale=False, quantises=True)
sample_inputs = SAMPLES.samples
error_inputs = SAMPLES.errors
