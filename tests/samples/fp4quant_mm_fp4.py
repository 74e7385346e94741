"""Samples (valid calls) and error inputs of ``fp4quant_mm_fp4``."""

from samples._prologue_gemm import PrologueGemmSamples

SAMPLES = PrologueGemmSamples(has_a_scale=False, prologue_quant=True)
sample_inputs = SAMPLES.samples
error_inputs = SAMPLES.errors
