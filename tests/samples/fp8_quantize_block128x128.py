"""Samples (valid calls) and error inputs of ``fp8_quantize_block128x128``."""

from collections.abc import Iterator
from typing import Any

import torch

from samples._inputs import ErrorInput, Sample
from samples._row_errors import input_errors, out_errors
from samples._rows import DTYPES, random_rows, short, special_rows, views


def call(*shape: int, device: torch.device) -> Sample:
    """Return a call with these leading dimensions, and K = 448. No test uses this number, or the number of blocks, as
    its number of rows, because PyTorch treats equal sizes as one symbol."""
    *lead, _ = shape
    return Sample("", (torch.randn(*lead, 448, device=device),))


def sample_inputs(device: torch.device) -> Iterator[Sample]:
    """Yield calls that the op accepts, each named after what it tests."""
    yield Sample("plain", (random_rows(130, 192, device=device),))
    powers = {"scale_format": "ue8m0"}
    for dtype in DTYPES:
        yield Sample(f"matrix-{short(dtype)}", (random_rows(300, 320, dtype=dtype, device=device),))
        yield Sample(f"ue8m0-{short(dtype)}", (random_rows(130, 192, dtype=dtype, device=device),), powers)
        for i, part in enumerate(special_rows(dtype, device, 128).split(2)):
            yield Sample(f"special-{i}-{short(dtype)}", (part,), powers if i % 2 else {})
    for n, k in ((1, 64), (127, 128), (128, 128), (129, 64), (3, 4096), (2500, 64)):
        yield Sample(f"size-{n}x{k}", (random_rows(n, k, device=device),))
    yield Sample("3d", (random_rows(3, 200, 192, device=device),))
    yield Sample("4d", (random_rows(2, 1, 130, 64, device=device),), powers)
    yield Sample("empty", (random_rows(0, 128, device=device),))
    yield Sample("empty-3d", (random_rows(0, 16, 128, device=device),))
    yield Sample("zeros", (torch.zeros(140, 128, device=device),))
    yield Sample("zeros-ue8m0", (-torch.zeros(140, 128, device=device),), powers)
    yield Sample("experts-strided", (random_rows(4, 130, 256, device=device)[::2, :, 64:192],))
    yield Sample("every-other-expert-row", (random_rows(2, 260, 128, device=device)[:, ::2],))
    for name, rows in views(64, device):
        yield Sample(name, (rows,))
    for power in (-100, -60, 60, 100):
        yield Sample(f"times-2^{power}", (torch.randn(3, 192, device=device) * 2.0**power,))
    yield Sample("positional", (random_rows(4, 64, device=device), "ue8m0"))


def error_inputs(device: torch.device) -> Iterator[ErrorInput]:
    """Yield calls that the op refuses, each with the expected error."""
    good = random_rows(4, 128, device=device)

    def bad(name: str, match: str, value: torch.Tensor = good, **kwargs: Any) -> ErrorInput:
        return ErrorInput(name, (value,), kwargs, ValueError, match)

    yield from input_errors(good)
    yield bad("input-1d", "input has one dimension; expected", good[0])
    for width in (32, 100):
        text = rf"last dimension of {width}; expected a positive multiple of 64"
        yield bad(f"width-{width}", text, good[:, :width])
    for name in ("e4m3", "", "UE8M0"):
        text = f"scale_format='{name}' does not fit granularity='block128'; use None or 'ue8m0'"
        yield bad(f"scale-format-{name}", text, scale_format=name)
    outputs = {
        "y": torch.zeros(4, 512, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn),
        "scale": torch.zeros(1, 4, device=device),
    }
    for error in out_errors((random_rows(4, 512, device=device),), {}, outputs, device):
        # ``out_errors`` expects that float32 scales may be column-major, as the scales of rows, and start at multiples
        # of 16 bytes. These scales are stored one element at a time.
        if not error.name.startswith("out-scale-") or not ("strides" in error.match or error.is_address):
            yield error
    strided = torch.zeros(1, 8, device=device)[:, ::2]
    text = "scale with strides .* contiguous"
    yield ErrorInput(
        "out-scale-every-other", (random_rows(4, 512, device=device),), {}, ValueError, text, (outputs["y"], strided)
    )
