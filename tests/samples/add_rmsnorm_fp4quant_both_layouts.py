"""Samples and bad inputs of ``add_rmsnorm_fp4quant_both_layouts``."""

from collections.abc import Iterator

import torch

from samples._both_layouts import both_layouts_errors, both_layouts_samples
from samples._inputs import ErrorInput, Sample


def sample_inputs(device: torch.device) -> Iterator[Sample]:
    """Yield the samples of the op."""
    return both_layouts_samples(device)


def error_inputs(device: torch.device) -> Iterator[ErrorInput]:
    """Yield the bad inputs of the op."""
    return both_layouts_errors(device)
