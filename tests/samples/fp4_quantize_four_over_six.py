"""Samples (valid calls) and error inputs of ``fp4_quantize_four_over_six``."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from samples._fp4 import FP4, random_global_scale
from samples._fp4_rows import FP4_ROWS
from samples._inputs import ErrorInput, Sample
from samples._row_errors import rows_errors, scalar_errors
from samples._rows import DTYPES, Rows, random_rows, rows_samples, short, special_rows


def _rows(device: torch.device, halves: bool = False) -> Iterator[Rows]:
    yield from FP4_ROWS.rows(device, halves)
    for dtype in DTYPES:
        given = {"global_scale": random_global_scale(device), "scale_layout": "linear"}
        yield Rows(f"global-scale-{short(dtype)}", random_rows(5, 80, dtype=dtype, device=device), given)
        yield Rows(f"special-global-scale-{short(dtype)}", special_rows(dtype, device), given)
    for power in (-60, 60):
        rows = torch.randn(3, 64, device=device) * 2.0**-power
        yield Rows(f"global-scale-2^{power}", rows, {"global_scale": torch.full((1,), 2.0**power, device=device)})
    # The scale of amax / 6 rounds to zero in some of these blocks in which the scale of amax / 4 does not.
    powers = torch.logspace(-11, -7, 60, base=2, device=device)[:, None] * torch.randn(60, 64, device=device)
    yield Rows("smallest-scales", powers, {"scale_layout": "linear"})
    for shape in ((), (1, 1)):
        scale = random_global_scale(device).reshape(shape)
        yield Rows(f"global-scale-{len(shape)}d", random_rows(3, 64, device=device), {"global_scale": scale})


def _errors(good: torch.Tensor, halves: bool = False) -> Iterator[ErrorInput]:
    yield from FP4_ROWS.errors(good, halves)
    yield from scalar_errors("global_scale", good)


def _positional(device: torch.device) -> tuple[tuple[torch.Tensor, ...], tuple[Any, ...]]:
    return (torch.full((1,), 100.0, device=device),), ("8x4",)


FAMILY = replace(FP4_ROWS, rows=_rows, errors=_errors, positional=_positional, outputs=FP4.outputs)


def sample_inputs(device: torch.device) -> Iterator[Sample]:
    """Yield calls that the op accepts, each named after what it tests."""
    return rows_samples(FAMILY, device)


def error_inputs(device: torch.device) -> Iterator[ErrorInput]:
    """Yield calls that the op refuses, each with the expected error."""
    return rows_errors(FAMILY, device)
