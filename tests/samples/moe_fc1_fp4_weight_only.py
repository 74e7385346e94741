"""Samples (valid calls) and error inputs of ``moe_fc1_fp4_weight_only``."""

from samples._moe_fc1 import GatedSamples

SAMPLES = GatedSamples(has_a_scale=False)
sample_inputs = SAMPLES.samples
error_inputs = SAMPLES.errors
