"""Samples (valid calls) and error inputs of ``add_rmsnorm``."""

from collections.abc import Iterator

import torch

from samples._add import add_norm_error_inputs, add_norm_samples
from samples._inputs import ErrorInput, Sample
from samples._rounded import ROUNDED


def sample_inputs(device: torch.device) -> Iterator[Sample]:
    """Yield calls that the op accepts, each named after what it tests."""
    return add_norm_samples(ROUNDED, device)


def error_inputs(device: torch.device) -> Iterator[ErrorInput]:
    """Yield calls that the op refuses, each with the expected error."""
    return add_norm_error_inputs(ROUNDED, device)
