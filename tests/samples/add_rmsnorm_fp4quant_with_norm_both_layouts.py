"""Samples (valid calls) and error inputs of ``add_rmsnorm_fp4quant_with_norm_both_layouts``."""

from collections.abc import Iterator

import torch

from samples._both_layouts import both_layouts_errors, both_layouts_samples
from samples._inputs import ErrorInput, Sample


def sample_inputs(device: torch.device) -> Iterator[Sample]:
    """Yield calls that the op accepts, each named after what it tests."""
    return both_layouts_samples(device)


def error_inputs(device: torch.device) -> Iterator[ErrorInput]:
    """Yield calls that the op refuses, each with the expected error."""
    return both_layouts_errors(device, returns_norm=True)
