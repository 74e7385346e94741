"""Inputs of ``add_rmsnorm_fp8quant``."""

from collections.abc import Iterator

import torch

from torch_cute_ops.testing._inputs import ErrorInput, Sample
from torch_cute_ops.testing.samples._add import add_norm_errors, add_norm_samples, residual_errors
from torch_cute_ops.testing.samples._fp8 import FP8
from torch_cute_ops.testing.samples._norm import norm_errors, norm_out_errors


def sample_inputs(device: torch.device) -> Iterator[Sample]:
    """Arguments that the op takes."""
    return add_norm_samples(FP8, device)


def error_inputs(device: torch.device) -> Iterator[ErrorInput]:
    """Arguments that the op refuses."""
    yield from add_norm_errors(norm_errors(FP8, device))
    yield from residual_errors(device)
    yield from add_norm_errors(norm_out_errors(FP8, device))
