"""Inputs of ``rmsnorm_fp8quant``."""

from collections.abc import Iterator

import torch

from samples._fp8 import FP8
from samples._inputs import ErrorInput, Sample
from samples._norm import norm_errors, norm_out_errors, norm_samples


def sample_inputs(device: torch.device) -> Iterator[Sample]:
    """Arguments that the op takes."""
    return norm_samples(FP8, device)


def error_inputs(device: torch.device) -> Iterator[ErrorInput]:
    """Arguments that the op refuses."""
    yield from norm_errors(FP8, device)
    yield from norm_out_errors(FP8, device)
