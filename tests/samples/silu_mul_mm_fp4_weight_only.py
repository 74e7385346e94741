"""Samples (valid calls) and error inputs of ``silu_mul_mm_fp4_weight_only``."""

from samples._prologue_gemm import PrologueGemmSamples

SAMPLES = PrologueGemmSamples(has_a_scale=False, prologue_gate=True)
sample_inputs = SAMPLES.samples
error_inputs = SAMPLES.errors
