"""Valid inputs (samples) and error inputs of the ops, one module per op, in the manner of PyTorch's ``OpInfo``.

Each module defines ``sample_inputs(device)`` and ``error_inputs(device)``. The data of samples comes from torch's
default generators.
"""

import importlib
from collections.abc import Iterator

import torch

from samples._inputs import ErrorInput, Sample

__all__ = ["ErrorInput", "Sample", "error_inputs", "sample_inputs"]


def sample_inputs(op: str, device: torch.device | str) -> Iterator[Sample]:
    """Yield calls that the named op accepts, with new random data."""
    samples: Iterator[Sample] = importlib.import_module(f"samples.{op}").sample_inputs(torch.device(device))
    return samples


def error_inputs(op: str, device: torch.device | str) -> Iterator[ErrorInput]:
    """Yield calls that the named op refuses, each with the expected error."""
    errors: Iterator[ErrorInput] = importlib.import_module(f"samples.{op}").error_inputs(torch.device(device))
    return errors
