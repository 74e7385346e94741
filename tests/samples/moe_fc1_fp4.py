"""Samples (valid calls) and error inputs of ``moe_fc1_fp4``."""

from collections.abc import Iterator

import torch

from samples._inputs import ErrorInput, Sample
from samples._moe_fc1 import GatedSamples
from samples._row_errors import error_maker
from samples._row_scales import row_scale_errors, row_scales
from samples._silu_mul import GPT_OSS
from torch_cute_ops.formats import MXFP4, NVFP4

SAMPLES = GatedSamples(has_a_scale=True)


def sample_inputs(device: torch.device) -> Iterator[Sample]:
    """Yield calls that the op accepts, each named after what it tests."""
    yield from SAMPLES.samples(device)
    (m, n, k), experts = SAMPLES.sizes, SAMPLES.sizes[1] // 64
    for name, scale in row_scales(m, device):
        yield SAMPLES.sample(f"row-scale-{name}", m, n, k, NVFP4, "128x4", device, row_scale=scale)
    rows, bias = torch.rand(19, device=device) + 0.5, torch.randn(experts, 128, device=device) * 3
    for fmt, layout in ((NVFP4, "linear"), (MXFP4, "8x4")):
        name = f"row-scale-{fmt.name}-{layout}"
        yield SAMPLES.sample(name, 19, n, 128, fmt, layout, device, row_scale=rows, bias=bias, **GPT_OSS)
    yield SAMPLES.sample("row-scale-one-row", 1, n, k, NVFP4, "128x4", device, row_scale=rows[:1])


def error_inputs(device: torch.device) -> Iterator[ErrorInput]:
    """Yield calls that the op refuses, each with the expected error."""
    yield from SAMPLES.errors(device)
    good = SAMPLES.sample("good", 4, 128, 64, NVFP4, "linear", device)
    yield from row_scale_errors(error_maker(SAMPLES.by_name(good), good.kwargs), 4, device)
