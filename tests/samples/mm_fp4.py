"""Samples (valid calls) and error inputs of ``mm_fp4``."""

from collections.abc import Iterator
from typing import Any

import torch

from samples._fp4_gemm import POWERS, GemmSamples
from samples._inputs import ErrorInput, Sample
from samples._row_errors import error_maker
from samples._row_scales import row_scale_errors, row_scales
from torch_cute_ops.formats import MXFP4, NVFP4

SAMPLES = GemmSamples(has_a_scale=True)


def sample_inputs(device: torch.device) -> Iterator[Sample]:
    """Yield calls that the op accepts, each named after what it tests."""
    yield from SAMPLES.samples(device)

    def sample(name: str, sizes: tuple[int, int, int], fmt: Any = NVFP4, layout: str = "128x4", **given: Any) -> Sample:
        return SAMPLES.sample(f"row-scale-{name}", *sizes, fmt, layout, device, **given)

    for name, scale in row_scales(19, device):
        yield sample(name, (19, 40, 160), row_scale=scale)
    for layout in SAMPLES.layouts:
        rows = torch.rand(130, device=device) + 0.5
        yield sample(layout, (130, 72, 256), layout=layout, row_scale=rows, out_dtype=torch.float32)
    alpha, bias = torch.rand(40, device=device) + 0.5, torch.randn(40, device=device) * 8
    rows = torch.rand(5, device=device) + 0.5
    yield sample("mxfp4-alpha-bias", (5, 40, 160), MXFP4, row_scale=rows, alpha=alpha, bias=bias)
    yield sample("one-row", (1, 256, 2048), row_scale=rows[:1])
    yield sample("no-rows", (0, 24, 64), row_scale=rows[:0])
    powers = torch.tensor([0.25, 4.0, -1.0, 0.0, 2.0], device=device)
    exact = {"row_scale": powers, "scales": POWERS["e4m3"], "out_dtype": torch.float32}
    yield sample("exact", (5, 40, 160), **exact)
    yield sample("exact-epilogue", (5, 40, 160), **exact, alpha=torch.tensor([0.5], device=device), bias=bias.round())


def error_inputs(device: torch.device) -> Iterator[ErrorInput]:
    """Yield calls that the op refuses, each with the expected error."""
    yield from SAMPLES.errors(device)
    good = SAMPLES.sample("good", 4, 24, SAMPLES.smallest_k, NVFP4, "linear", device)
    yield from row_scale_errors(error_maker(SAMPLES.by_name(good), good.kwargs), 4, device)
