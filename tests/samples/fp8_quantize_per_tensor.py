"""Samples (valid calls) and error inputs of ``fp8_quantize_per_tensor``."""

from collections.abc import Iterator

import torch

from samples._inputs import ErrorInput, Sample
from samples._row_errors import input_errors, out_errors
from samples._rows import DTYPES, ODD_WIDTHS, odd_views, random_rows, short, special_rows, views


def sample_inputs(device: torch.device) -> Iterator[Sample]:
    """Yield calls that the op accepts, each named after what it tests."""
    yield Sample("plain", (random_rows(19, 96, device=device),))
    for dtype in DTYPES:
        yield Sample(f"rows-{short(dtype)}", (random_rows(130, 80, dtype=dtype, device=device),))
        for i, row in enumerate(special_rows(dtype, device)):
            yield Sample(f"special-{i}-{short(dtype)}", (row.view(2, -1),))
    for width in ODD_WIDTHS:
        yield Sample(f"width-{width}", (random_rows(3, width, device=device),))
    yield Sample("1d", (random_rows(384, device=device),))
    yield Sample("3d", (random_rows(2, 5, 256, device=device),))
    yield Sample("decode", (random_rows(1, 7168, device=device),))
    yield Sample("many-rows", (random_rows(2501, 128, device=device),))
    yield Sample("wide", (random_rows(2, 65536, device=device),))
    yield Sample("empty", (random_rows(0, 256, device=device),))
    yield Sample("empty-3d", (random_rows(2, 0, 256, device=device),))
    yield Sample("zeros", (-torch.zeros(3, 256, device=device),))
    for size in (2.0**-149, 2.0**-140, 2.0**-100, 2.0**100):
        yield Sample(f"times-{size:g}", (torch.rand(3, 256, device=device) * size,))
    for name, rows in (*views(32, device), *odd_views(1, device)):
        yield Sample(name, (rows,))
    for width in (256, 300, 2880):
        yield Sample(f"interleaved-{width}", (random_rows(5, width, device=device),), {"interleaved": True})
    yield Sample("interleaved-2x3x2880", (random_rows(2, 3, 2880, device=device),), {"interleaved": True})
    yield Sample("positional", (random_rows(4, 64, device=device), True))


def error_inputs(device: torch.device) -> Iterator[ErrorInput]:
    """Yield calls that the op refuses, each with the expected error."""
    yield from input_errors(random_rows(4, 128, device=device))
    outputs = {
        "y": torch.zeros(4, 512, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn),
        "scale": torch.zeros(1, device=device),
    }
    for error in out_errors((random_rows(4, 512, device=device),), {}, outputs, device):
        # ``out_errors`` expects that float32 scales may be column-major, as the scales of rows, and start at multiples
        # of 16 bytes. These scales are stored one element at a time.
        if not error.name.startswith("out-scale-") or not ("strides" in error.match or error.is_address):
            yield error
