"""Samples (valid calls) and error inputs of ``rmsnorm_fp4quant_per_token``."""

from collections.abc import Iterator

import torch

from samples._fp4_rows import FP4_ROWS
from samples._inputs import ErrorInput, Sample
from samples._norm import norm_errors, norm_out_errors, norm_samples


def sample_inputs(device: torch.device) -> Iterator[Sample]:
    """Yield calls that the op accepts, each named after what it tests."""
    return norm_samples(FP4_ROWS, device)


def error_inputs(device: torch.device) -> Iterator[ErrorInput]:
    """Yield calls that the op refuses, each with the expected error."""
    yield from norm_errors(FP4_ROWS, device)
    yield from norm_out_errors(FP4_ROWS, device)
