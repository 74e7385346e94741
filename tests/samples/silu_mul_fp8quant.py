"""Samples (valid calls) and error inputs of ``silu_mul_fp8quant``."""

from collections.abc import Iterator

import torch

from samples._fp8 import FP8
from samples._inputs import ErrorInput, Sample
from samples._rows import random_rows
from samples._silu_mul import silu_mul_errors, silu_mul_samples


def sample_inputs(device: torch.device) -> Iterator[Sample]:
    """Yield calls that the op accepts, each named after what it tests."""
    yield from silu_mul_samples(FP8, device)
    # With a negative ``swiglu_beta`` the gate turns zeros into -0, but codes beyond I must be +0.
    gate = {"swiglu_beta": -0.75, "interleaved": True}
    yield Sample("interleaved-swiglu-beta", (random_rows(3, 200, device=device),), gate)


def error_inputs(device: torch.device) -> Iterator[ErrorInput]:
    """Yield calls that the op refuses, each with the expected error."""
    return silu_mul_errors(FP8, device)
