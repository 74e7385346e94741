"""Inputs of ``rmsnorm_fp4quant_with_norm``."""

from collections.abc import Iterator

import torch

from torch_cute_ops.testing._inputs import ErrorInput, Sample
from torch_cute_ops.testing.samples._norm import norm_errors, norm_samples


def sample_inputs(device: torch.device) -> Iterator[Sample]:
    """Arguments that the op takes."""
    return norm_samples(device)


def error_inputs(device: torch.device) -> Iterator[ErrorInput]:
    """Arguments that the op refuses."""
    return norm_errors(device, outputs=("y", "scale", "norm"))
