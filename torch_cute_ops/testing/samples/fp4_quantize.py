"""Inputs of ``fp4_quantize``."""

from collections.abc import Iterator

import torch

from torch_cute_ops.testing._inputs import ErrorInput, Sample
from torch_cute_ops.testing.samples._fp4 import FP4
from torch_cute_ops.testing.samples._rows import out_errors, random_rows


def sample_inputs(device: torch.device) -> Iterator[Sample]:
    """Arguments that the op takes."""
    for name, rows, kwargs in FP4.rows(device):
        yield Sample(name, (rows,), kwargs)
    factor, choices = FP4.positional(device)
    yield Sample("positional", (random_rows(4, 64, device=device), factor, *choices))


def error_inputs(device: torch.device) -> Iterator[ErrorInput]:
    """Arguments that the op refuses."""
    yield from FP4.errors(random_rows(4, 128, device=device))
    kwargs, good = FP4.outputs(device)
    yield from out_errors((random_rows(4, 512, device=device),), kwargs, good, device)
