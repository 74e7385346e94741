"""Samples (valid calls) and error inputs of ``add_rmsnorm_fp4quant_per_token``."""

from collections.abc import Iterator

import torch

from samples._add import add_norm_error_inputs, add_norm_samples
from samples._fp4_rows import FP4_ROWS
from samples._inputs import ErrorInput, Sample


def sample_inputs(device: torch.device) -> Iterator[Sample]:
    """Yield calls that the op accepts, each named after what it tests."""
    return add_norm_samples(FP4_ROWS, device)


def error_inputs(device: torch.device) -> Iterator[ErrorInput]:
    """Yield calls that the op refuses, each with the expected error."""
    return add_norm_error_inputs(FP4_ROWS, device)
