"""Inputs of ``silu_mul``."""

from collections.abc import Iterator

import torch

from samples._inputs import ErrorInput, Sample
from samples._rounded import ROUNDED
from samples._silu_mul import silu_mul_errors, silu_mul_samples


def sample_inputs(device: torch.device) -> Iterator[Sample]:
    """Arguments that the op takes."""
    return silu_mul_samples(ROUNDED, device)


def error_inputs(device: torch.device) -> Iterator[ErrorInput]:
    """Arguments that the op refuses."""
    return silu_mul_errors(ROUNDED, device)
