"""What tests and benchmarks need to know about each op: sample inputs, bad inputs, how close results must be.

Data comes from torch's default generators.
"""

import importlib
from collections.abc import Iterator

import torch

from torch_cute_ops.testing._compare import GATE_ERROR, assert_fp4_close, assert_fp8_close
from torch_cute_ops.testing._inputs import ErrorInput, Sample
from torch_cute_ops.testing._raw import raw_call

__all__ = [
    "GATE_ERROR",
    "ErrorInput",
    "Sample",
    "assert_fp4_close",
    "assert_fp8_close",
    "error_inputs",
    "raw_call",
    "sample_inputs",
]


def sample_inputs(op: str, device: torch.device | str) -> Iterator[Sample]:
    """Arguments that the op of this name takes, with fresh data: ``samples/<op>.py``."""
    samples: Iterator[Sample] = importlib.import_module(f"{__name__}.samples.{op}").sample_inputs(torch.device(device))
    return samples


def error_inputs(op: str, device: torch.device | str) -> Iterator[ErrorInput]:
    """Arguments that the op of this name refuses, and how; from the same module."""
    errors: Iterator[ErrorInput] = importlib.import_module(f"{__name__}.samples.{op}").error_inputs(
        torch.device(device)
    )
    return errors
