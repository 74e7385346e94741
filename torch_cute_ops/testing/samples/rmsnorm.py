"""Inputs of ``rmsnorm``."""

from collections.abc import Iterator

import torch

from torch_cute_ops.testing._inputs import ErrorInput, Sample
from torch_cute_ops.testing.samples._norm import norm_errors, norm_out_errors, norm_samples
from torch_cute_ops.testing.samples._rounded import ROUNDED


def sample_inputs(device: torch.device) -> Iterator[Sample]:
    """Arguments that the op takes."""
    return norm_samples(ROUNDED, device)


def error_inputs(device: torch.device) -> Iterator[ErrorInput]:
    """Arguments that the op refuses."""
    yield from norm_errors(ROUNDED, device)
    yield from norm_out_errors(ROUNDED, device)
