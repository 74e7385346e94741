"""Samples and error inputs of the ops that write FP4 scales in two layouts."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from samples._add import add_norm_errors, add_norm_samples, residual_errors
from samples._fp4 import FP4
from samples._inputs import ErrorInput, Sample
from samples._norm import norm_errors, random_weight
from samples._row_errors import out_errors
from samples._rows import random_rows


def both_layouts_samples(device: torch.device) -> Iterator[Sample]:
    """Yield the samples of ``add_rmsnorm_fp4quant`` without the argument for the layout."""
    for sample in add_norm_samples(FP4, device):
        if sample.name == "positional":
            yield replace(sample, args=sample.args[:-1])
        elif not any(layout in sample.name.split("-") for layout in ("linear", "8x4")):
            yield replace(sample, kwargs=_without_layout(sample.kwargs))


def both_layouts_errors(device: torch.device, returns_norm: bool = False) -> Iterator[ErrorInput]:
    """Yield the error inputs of ``add_rmsnorm_fp4quant`` without the argument for the layout, and calls with wrong
    outputs."""
    for error in (*add_norm_errors(norm_errors(FP4, device)), *residual_errors(device)):
        if not error.name.startswith("layout-"):
            yield replace(error, kwargs=_without_layout(error.kwargs))
    _, good = FP4.outputs(device)
    scale = good["scale"]
    rows, weight = random_rows(4, 512, device=device), random_weight(512, torch.bfloat16, device)
    outputs = {
        "y": good["y"],
        "scale_128x4": scale.new_zeros(1, 8, 32, 4, 4, dtype=torch.uint8).view(scale.dtype),
        "scale_linear": scale.new_zeros(4, 32, dtype=torch.uint8).view(scale.dtype),
        **({"norm": torch.zeros_like(rows)} if returns_norm else {}),
    }
    yield from out_errors((rows, torch.zeros_like(rows), weight), {}, outputs, device)


def _without_layout(kwargs: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in kwargs.items() if name != "scale_layout"}
