"""Inputs of ``fp4_quantize``."""

from collections.abc import Iterator

import torch

from torch_cute_ops.testing._inputs import ErrorInput, Sample
from torch_cute_ops.testing.samples._rows import out_errors, random_rows, row_errors, row_samples


def sample_inputs(device: torch.device) -> Iterator[Sample]:
    """Arguments that the op takes."""
    for name, rows, kwargs in row_samples(device):
        yield Sample(name, (rows,), kwargs)
    g = torch.full((1,), 100.0, device=device)
    yield Sample("positional", (random_rows(4, 64, device=device), g, 16, "e4m3", "128x4"))


def error_inputs(device: torch.device) -> Iterator[ErrorInput]:
    """Arguments that the op refuses."""
    rows = random_rows(4, 64, device=device)
    yield from row_errors(rows, device)
    good = {
        "y": torch.zeros(4, 32, dtype=torch.uint8, device=device),
        "scale": torch.zeros(8, 4, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn),
    }
    yield from out_errors((rows,), {"scale_layout": "8x4"}, good, device)
