"""Samples (valid calls) and error inputs of ``all_reduce_add_rmsnorm_fp8quant``."""

from collections.abc import Iterator

import torch

from samples._all_reduce import all_reduce_error_inputs, all_reduce_samples
from samples._fp8 import FP8
from samples._inputs import ErrorInput, Sample


def sample_inputs(device: torch.device) -> Iterator[Sample]:
    """Yield calls that the op accepts, each named after what it tests."""
    return all_reduce_samples(FP8, device)


def error_inputs(device: torch.device) -> Iterator[ErrorInput]:
    """Yield calls that the op refuses, each with the expected error."""
    return all_reduce_error_inputs(FP8, device)
