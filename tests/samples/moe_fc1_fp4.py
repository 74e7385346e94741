"""Samples (valid calls) and error inputs of ``moe_fc1_fp4``."""

from samples._moe_fc1 import GatedSamples

SAMPLES = GatedSamples(has_a_scale=True)
sample_inputs = SAMPLES.samples
error_inputs = SAMPLES.errors
