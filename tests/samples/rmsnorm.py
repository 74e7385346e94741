"""Samples and bad inputs of ``rmsnorm``."""

from collections.abc import Iterator

import torch

from samples._inputs import ErrorInput, Sample
from samples._norm import norm_errors, norm_out_errors, norm_samples
from samples._rounded import ROUNDED


def sample_inputs(device: torch.device) -> Iterator[Sample]:
    """Yield the samples of the op."""
    return norm_samples(ROUNDED, device)


def error_inputs(device: torch.device) -> Iterator[ErrorInput]:
    """Yield the bad inputs of the op."""
    yield from norm_errors(ROUNDED, device)
    yield from norm_out_errors(ROUNDED, device)
