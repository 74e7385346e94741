"""Samples (valid calls) and error inputs of ``silu_mul_fp4quant_per_token``."""

from collections.abc import Iterator

import torch

from samples._fp4_rows import FP4_ROWS
from samples._inputs import ErrorInput, Sample
from samples._silu_mul import silu_mul_errors, silu_mul_samples


def sample_inputs(device: torch.device) -> Iterator[Sample]:
    """Yield calls that the op accepts, each named after what it tests."""
    return silu_mul_samples(FP4_ROWS, device)


def error_inputs(device: torch.device) -> Iterator[ErrorInput]:
    """Yield calls that the op refuses, each with the expected error."""
    return silu_mul_errors(FP4_ROWS, device)
