"""Samples (valid calls) and error inputs of ``rmsnorm``."""

from collections.abc import Iterator

import torch

from samples._inputs import ErrorInput, Sample
from samples._norm import norm_errors, norm_out_errors, norm_samples
from samples._rounded import ROUNDED


def sample_inputs(device: torch.device) -> Iterator[Sample]:
    """Yield calls that the op accepts, each named after what it tests."""
    return norm_samples(ROUNDED, device)


def error_inputs(device: torch.device) -> Iterator[ErrorInput]:
    """Yield calls that the op refuses, each with the expected error."""
    yield from norm_errors(ROUNDED, device)
    yield from norm_out_errors(ROUNDED, device)
