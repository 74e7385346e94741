"""Samples and bad inputs of ``silu_mul_fp4quant_mm_fp4``."""

from samples._input_gemm import InputGemmSamples

SAMPLES = InputGemmSamples(has_a_scale=False, gates=True, quantises=True)
sample_inputs = SAMPLES.samples
error_inputs = SAMPLES.errors
