"""Samples (valid calls) and error inputs of ``moe_fc2_fp4``."""

from samples._moe_fc2 import ExpertGemmSamples

SAMPLES = ExpertGemmSamples(has_a_scale=True)
sample_inputs = SAMPLES.samples
error_inputs = SAMPLES.errors
