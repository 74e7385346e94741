"""Samples and bad inputs of ``silu_mul_fp8quant``."""

from collections.abc import Iterator

import torch

from samples._fp8 import FP8
from samples._inputs import ErrorInput, Sample
from samples._silu_mul import silu_mul_errors, silu_mul_samples


def sample_inputs(device: torch.device) -> Iterator[Sample]:
    """Yield the samples of the op."""
    return silu_mul_samples(FP8, device)


def error_inputs(device: torch.device) -> Iterator[ErrorInput]:
    """Yield the bad inputs of the op."""
    return silu_mul_errors(FP8, device)
