"""Samples (valid calls) and error inputs of ``fp4_quantize_per_token``."""

from collections.abc import Iterator

import torch

from samples._fp4_rows import FP4_ROWS
from samples._inputs import ErrorInput, Sample
from samples._row_errors import rows_errors
from samples._rows import rows_samples


def sample_inputs(device: torch.device) -> Iterator[Sample]:
    """Yield calls that the op accepts, each named after what it tests."""
    return rows_samples(FP4_ROWS, device)


def error_inputs(device: torch.device) -> Iterator[ErrorInput]:
    """Yield calls that the op refuses, each with the expected error."""
    return rows_errors(FP4_ROWS, device)
