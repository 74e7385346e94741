"""Samples and bad inputs of ``add_rmsnorm``."""

from collections.abc import Iterator

import torch

from samples._add import add_norm_error_inputs, add_norm_samples
from samples._inputs import ErrorInput, Sample
from samples._rounded import ROUNDED


def sample_inputs(device: torch.device) -> Iterator[Sample]:
    """Yield the samples of the op."""
    return add_norm_samples(ROUNDED, device)


def error_inputs(device: torch.device) -> Iterator[ErrorInput]:
    """Yield the bad inputs of the op."""
    return add_norm_error_inputs(ROUNDED, device)
